"""Put finished runs under docs/results: a page with table, command and machine, a picture, and the numbers of every
seed and client, from which the page can be made again.

    python experiments/publish.py runs/NAME [runs/OTHER ...]     the page is named after the first run, or --as=NAME
    python experiments/publish.py docs/results/NAME.json         the page (a table of the paper, too) from its numbers

What `benchmarks/adaptation.py` and `benchmarks/exported.py` measured of a run goes with it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from qupel.paper.reproduce.publish import rewrite
from qupel.report import figures, later, networks, tables
from qupel.report.forms import GAIN, OVER, UNSEEN
from qupel.report.measure import told_metrics
from qupel.report.runs import load_run
from qupel.util.files import write_atomic

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "results"
LINE = ("round", "phase", "method", "quantizer", "test", "validation", "float_test", "bits")
LINE += ("model_bytes", "upload_bytes")
FILE = "file: mean bytes of the clients' files."
FLOOR = "floor: bytes computed from bits and centers, without a file's head and BatchNorm's statistics."

Section = dict[str, Any]  # what is kept of a run: origin, note, one_place, rows, and the cells they come from


def section(folder: Path) -> Section:
    run = load_run(folder, folder.name)
    if len(run.results) < run.cells:
        raise SystemExit(f"{folder}: {len(run.results)} of {run.cells} cells are done")
    cells = [compact(result) for result in run.results]
    about = {"origin": _origin(run), "note": run.note, "one_place": run.one_place}
    for measured in ("adaptation", "exported"):
        if (path := folder / f"{measured}.json").exists():
            about[measured] = json.loads(path.read_text())
    return about | {"rows": rows(cells), "cells": cells}


def compact(result: tables.Result) -> tables.Result:
    """What a table is made of: the curve, and at its end every client's scores, bits and bytes, also of those that
    joined later."""
    lines = [{k: _short(line[k]) for k in LINE if k in line} for line in result["lines"]]
    last, more = result["lines"][-1], result["lines"][-1].get("over_clients", {})
    names = [name for name in more if name != "test"]
    lines[-1] |= {k: _short(last[k]) for k in (f"test_{name}" for name in names) if k in last}
    lines[-1] |= {"over_clients": _short(more)} if more else {}
    if clients := last.get("clients"):  # none where there are many
        told = ("test", "bits", "bytes", *(["count", *names] if names else []))
        lines[-1]["clients"] = {k: _short(clients[k]) for k in told if k in clients}
    rest = {k: _short(result[k]) for k in ("files", "unseen", "networks") if k in result}
    if "config" in result:
        rest["config"] = {"model": {"name": result["config"]["model"]["name"]}}
    about = {"label": result["label"], "seed": result["seed"], "seconds": _short(result["seconds"])}
    return {**about, **rest, "lines": lines}


def rows(cells: list[tables.Result]) -> list[dict[str, Any]]:
    """The table's rows as JSON has them."""
    found: list[dict[str, Any]] = json.loads(json.dumps([r.told() for r in tables.rows(cells)]))
    return found


def page(name: str, raw: dict[str, Section]) -> str:
    parts = [_table(part) for part in raw.values()]
    again = f"`python experiments/publish.py docs/results/{name}.json` makes this page from the numbers kept there.\n"
    of = next(iter(raw)) + (": the first of the runs above" if len(raw) > 1 else "")
    return "\n".join([f"# {name}\n", *parts, again, f"![{of}]({name}.png)\n", *([f"{of}\n"] if len(raw) > 1 else [])])


def write(name: str, raw: dict[str, Section], target: Path) -> None:
    """NAME.md and NAME.json, a line for each row and cell."""
    sections = []
    for run, part in raw.items():
        keys = ",\n".join(f'"{k}": {_lines(v) if isinstance(v, list) else json.dumps(v)}' for k, v in part.items())
        sections.append(f"{json.dumps(run)}: {{\n{keys}}}")
    write_atomic(target / f"{name}.json", "{" + ",\n".join(sections) + "}\n")
    write_atomic(target / f"{name}.md", page(name, raw))


def _lines(values: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in values) + "]"


def _short(value: Any) -> Any:
    """Ten digits are enough to tell any two accuracies apart."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def _origin(run: Any) -> str:
    machine, command = run.results[0]["machine"], "train" if run.one_place else "run"
    told = f"`qupel {command} experiments/{run.name}.toml --out runs/{run.name}`"
    if run.name == "demo":
        told = "`make demo` (`qupel run`)"
    minutes = sum(r["seconds"] for r in run.results) / 60
    return (
        f"{told}; seeds {run.config['seeds']}; {machine['cpus']} CPUs ({machine['processor']}), Python "
        f"{machine['python']}, torch {machine['torch']}; {minutes:.0f} minutes in all."
    )


def _table(part: Section) -> str:
    found = [tables.Row(**{**r, "by_bits": {float(b): v for b, v in r["by_bits"].items()}}) for r in part["rows"]]
    head, body = tables.training_table(found) if part["one_place"] else tables.federation_table(found)
    said = "" if part["one_place"] else tables.sentence(found)
    legend = "Test accuracy in percent after the last round"
    legend += ", mean ± std over seeds. " if found[0].seeds > 1 else "; one seed: no spread, no test. "
    legend += FILE if "file" in head else FLOOR
    legend += "" if part["one_place"] else f" {GAIN.format(first=found[0].label)}"
    legend += f" {UNSEEN}." if "unseen" in head else ""
    cells = part.get("cells", ())
    texts = [part["origin"], tables.markdown(head, body).strip(), said, legend, part["note"]]
    if cells and told_metrics(cells):
        texts += [tables.markdown(*tables.metrics_table(cells, part["one_place"])).strip(), f"{OVER}."]
    if networks.with_networks(cells):
        texts += [tables.markdown(*networks.table(cells)).strip(), networks.legend(cells)]
    if later.with_late(cells):
        texts += [tables.markdown(*later.table(cells)).strip(), later.legend(cells)]
    if measured := part.get("adaptation"):
        texts.append(_adaptation(measured))
    if measured := part.get("exported"):
        texts.append(_exported(measured))
    return "\n\n".join(filter(None, texts)) + "\n"


def _adaptation(m: dict[str, Any]) -> str:
    """What `benchmarks/adaptation.py` measured, in words."""
    return (
        f"One adaptation, `{m['command']}` in a process of its own ({m['clients']} clients, one after the other, one "
        f"thread; `{m['made_by']}`): {m['seconds']:.1f} s (median; {m['least']:.1f} to {m['most']:.1f}), of which "
        f"{m['adapting']:.1f} s are the adapting and the rest is loading Python, torch and the data; at most "
        f"{m['peak_MB']:.0f} MB of memory, where `import torch` alone has {m['torch_MB']:.0f}. A file has "
        f"{m['file_bytes']:,} bytes."
    )


def _exported(cells: list[dict[str, Any]]) -> str:
    """What `benchmarks/exported.py` measured, in words."""
    sizes = ", ".join(f"{c['label']}: {c['files']} files of {tables.size(c['bytes'])}" for c in cells)
    apart = max(c["apart"] for c in cells)
    return (
        "The models of those who joined later as ONNX files (`python benchmarks/exported.py`; means of bytes), "
        f"{sizes}. In ONNX Runtime each has the accuracy told here, at most {100 * apart:.2g} points apart."
    )


def main() -> None:
    named = [word.removeprefix("--as=") for word in sys.argv[1:] if word.startswith("--as=")]
    paths = [Path(word) for word in sys.argv[1:] if not word.startswith("--as=")]
    if not paths:
        raise SystemExit(__doc__)
    if paths[0].suffix == ".json":
        for path in paths:
            raw = json.loads(path.read_text())
            if "table" in raw:
                rewrite(path)
                continue
            for part in raw.values():
                part["rows"] = rows(part["cells"]) if part.get("cells") else part["rows"]
            write(path.stem, raw, path.parent)
        return
    raw = {folder.name: section(folder) for folder in paths}
    first = raw[paths[0].name]
    name = named[0] if named else paths[0].name
    write(name, raw, TARGET)
    figures.comparison_picture(first["cells"], tables.rows(first["cells"]), TARGET / f"{name}.png")


if __name__ == "__main__":
    main()
