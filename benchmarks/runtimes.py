"""The same ONNX files in stock runtimes: ONNX Runtime as it is installed here, onnxruntime-web (WASM) in a headless
Chromium, and the oldest ONNX Runtime that understands them. A part of formats.py:

    python benchmarks/formats.py --again runtimes [--folder FOLDER]        the folder keeps what is fetched and exported

Latencies are those of `qupel eval`: medians of stretches by turns, with 95 % intervals; one thread everywhere.
"""

from __future__ import annotations

import gzip
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qupel.deploy.onnx import session
from qupel.deploy.timing import Middle, Stretch, costs, stretch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stock import WASM, WEB, Oldest, Web

BATCHES = (1, 16)
LOADS = 7
HERE, BROWSER = "ONNX Runtime", "browser"


@dataclass(frozen=True, eq=False)
class File:
    model: str
    bits: int
    path: Path
    wanted: np.ndarray  # torch's outputs


class Way(NamedTuple):
    file: int
    runtime: str
    kept: bool
    batch: int


def measure(files: list[File], x: np.ndarray, folder: Path, seconds: float) -> dict[str, Any]:
    """x  inputs of which every file's outputs are wanted; seconds  for all ways together."""
    for name in ("web", "oldest"):
        (folder / name).mkdir(exist_ok=True)
    oldest = Oldest(folder / "oldest")
    with Web(folder / "web") as web:
        rows = _run(files, x, web, seconds)
        agent = web.agent.split("HeadlessChrome/")[-1].split(".")[0]
        module = (folder / "web" / WASM[-1]).read_bytes()
    for file in files:
        got = oldest.run(file.path, {"input": x})
        rows.append(_row(file, f"ONNX Runtime {oldest.version}", False) | {"max abs error": _error(got, file.wanted)})
    return {
        "versions": {"onnxruntime-web": WEB, "Chromium": agent, "oldest": oldest.version},
        "wasm bytes": len(module),
        "wasm bytes, gzip": len(gzip.compress(module)),
        "rows": rows,
    }


def _row(file: File, runtime: str, kept: bool) -> dict[str, Any]:
    size = file.path.stat().st_size
    return {"model": file.model, "bits": file.bits, "bytes": size, "runtime": runtime, "kept packed": kept}


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max())


def _run(files: list[File], x: np.ndarray, web: Web, seconds: float) -> list[dict[str, Any]]:
    inputs = {batch: {"input": x[:batch]} for batch in BATCHES}
    sessions: dict[str, Any] = {}

    def opened(file: File, runtime: str, kept: bool) -> float:
        """Seconds to make a session."""
        key = f"{file.path.name} {kept}"
        if runtime == BROWSER:
            return web.open(file.path, key, keep_packed=kept)
        began = time.perf_counter()
        sessions[key] = session(file.path, keep_packed=kept, threads=1)
        return time.perf_counter() - began

    def outputs(way: Way) -> np.ndarray:
        key = f"{files[way.file].path.name} {way.kept}"
        if way.runtime == BROWSER:
            return web.run(key, inputs[way.batch])
        return sessions[key].run(None, inputs[way.batch])[0]

    def timed(way: Way, length: float) -> Stretch:
        if way.runtime == BROWSER:
            key = f"{files[way.file].path.name} {way.kept}"
            return Stretch(statistics.median(web.times(key, inputs[way.batch], length)), None)
        return stretch(lambda: outputs(way), length)

    kinds = [
        (i, runtime, kept)
        for i, file in enumerate(files)
        for runtime in (HERE, BROWSER)
        for kept in ([False, True] if file.bits < 32 else [False])
    ]
    loads = {kind: [opened(files[kind[0]], *kind[1:]) for _ in range(1 + LOADS)][1:] for kind in kinds}
    ways = [Way(*kind, batch) for kind in kinds for batch in BATCHES]
    found = dict(zip(ways, (cost.seconds for cost in costs(timed, ways, seconds)), strict=True))
    return [_measured(files, kind, loads[kind], found, outputs) for kind in kinds]


def _measured(
    files: list[File],
    kind: tuple[int, str, bool],
    loads: list[float],
    found: dict[Way, Middle],
    outputs: Callable[[Way], np.ndarray],
) -> dict[str, Any]:
    i, runtime, kept = kind
    row = _row(files[i], runtime, kept) | {"load ms": 1000 * statistics.median(loads)}
    for batch in BATCHES:
        row[f"ms of {batch}"] = {end: 1000 * value for end, value in asdict(found[Way(*kind, batch)]).items()}
    plain = next(k for k, f in enumerate(files) if (f.model, f.bits) == (files[i].model, 32))
    base = found[Way(plain, runtime, False, BATCHES[-1])].median
    ratio = found[Way(*kind, BATCHES[-1])].median / base
    error = _error(outputs(Way(*kind, BATCHES[-1])), files[i].wanted)
    return row | {"of fp32 latency": ratio, "max abs error": error}


# --- the page ---


def page(told: dict[str, Any]) -> list[str]:
    versions = told["versions"]
    lines = [
        "## The same files in stock runtimes",
        "",
        f"`python benchmarks/formats.py --again runtimes`. {told['about']}",
        "",
        f"browser: onnxruntime-web {versions['onnxruntime-web']} (WASM, one thread) from npm in a headless Chromium",
        f"{versions['Chromium']}; the runtime itself is {told['wasm bytes'] / 1e6:.1f} MB to fetch,",
        f"{told['wasm bytes, gzip'] / 1e6:.1f} MB with gzip. ONNX Runtime {versions['oldest']} (1.14 is the first with",
        "opset 18): outputs were compared, no times taken. Medians of 20 stretches by turns with all others, with 95 %",
        "intervals, one thread. load: to make a session, without fetching. of fp32: 16 images in the same runtime.",
        "Error: against torch with the same weights, 16 images.",
        "",
        "| model | bits | bytes | runtime | load ms | ms, 1 image | 95 % | ms, 16 images | 95 % | of fp32 "
        "| max abs error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(told["rows"], key=lambda r: (r["model"], r["bits"] % 32)):
        runtime = r["runtime"] + (", kept packed" if r["kept packed"] else "")
        cells = [r["model"], "fp32" if r["bits"] == 32 else r["bits"], f"{r['bytes']:,}", runtime]
        if "load ms" in r:
            cells.append(f"{r['load ms']:.1f}")
            for t in (r[f"ms of {batch}"] for batch in BATCHES):
                cells += [f"{t['median']:.2f}", f"{t['low']:.2f} to {t['high']:.2f}"]
            cells.append(f"{r['of fp32 latency']:.2f}")
        else:
            cells += [""] * 6
        lines.append("| " + " | ".join(map(str, [*cells, f"{r['max abs error']:.1e}"])) + " |")
    return lines
