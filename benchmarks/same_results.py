"""Do two trees give the same results? Runs every recipe on digits with each tree's own code and compares metrics and
model files, number by number and bit by bit.

    python benchmarks/same_results.py BEFORE AFTER [--out FILE.md] [--rename old=new ...]

BEFORE and AFTER are checkouts. Clients have 1, 2, 3 and 32 bits; engines are the loop, two workers, two ranks, and
stacks. A number that only one tree has is listed, not compared.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = (
    "qupel", "qupel-corrected", "qupel-paper", "local", "local-corrected", "training-corrected", "fedavg",
    "fedavg-finetune", "proxquant", "binaryrelax", "ptq-range", "ptq-kmeans",
)  # fmt: skip
VARIANTS = {
    "qupel soft": 'recipe = "qupel-prox"\nmode = "soft"',
    "qupel carry": 'recipe = "qupel-prox"\ncarry = true',
    "qupel momentum": 'recipe = "qupel-prox"\noptimizer = "momentum"',
    "qupel adam": 'recipe = "qupel-prox"\noptimizer = "adam"\neta1 = 0.01',
    "local soft": 'recipe = "local-prox"\nmode = "soft"',
    "local carry": 'recipe = "local-prox"\ncarry = true',
}
ENGINES = {
    "loop": ["--workers", "1"],
    "two workers": ["--workers", "2"],
    "two ranks": ["--workers", "2", "--engine", "ranks"],
    "stacks": ["--workers", "1", "--set", "vectorize=on"],
}
HEAD = """
rounds = 10
local_steps = 4
batch = 10
evaluate_every = 4
bits = [1, 2, 3, 32]
vectorize = "off"
[data]
name = "digits"
[split]
clients = 8
classes = 4
[model]
name = "{model}"
"""


def config(model: str) -> str:
    tables = {name: f'recipe = "{name}"' for name in RECIPES} | VARIANTS
    given = (f'[methods."{label}"]\n{text}\nbits = [1, 2, 3, 32]\n' for label, text in tables.items())
    return HEAD.format(model=model) + "".join(given)


def run(tree: Path, text: str, options: list[str], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_suffix(".toml")
    path.write_text(text)
    command = [sys.executable, "-m", "qupel", "run", str(path), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def numbers(line: dict, renamed: dict[str, str], where: str = "") -> dict[str, object]:
    """A line of metrics as path -> value, without times."""
    found = {}
    for key, value in line.items():
        path = where + renamed.get(key, key)
        if key in {"seconds", "method", "quantizer"}:
            continue
        if isinstance(value, dict):
            found |= numbers(value, renamed, f"{path}.")
        else:
            found[path] = json.dumps(value)
    return found


def compare(before: Path, after: Path, renamed: dict[str, str]) -> tuple[int, list[str], set[str]]:
    """(numbers and files that are equal, what differs, names that only one has)."""
    equal, differ, alone = 0, [], set()
    cells = sorted(p.name for p in (before / "cells").iterdir())
    for cell in cells:
        a, b = (json.loads((run / "cells" / cell / "result.json").read_text())["lines"] for run in (before, after))
        if len(a) != len(b):
            differ.append(f"{cell}: {len(a)} and {len(b)} lines")
        for old, new in zip(a, b, strict=False):
            ours, theirs = numbers(old, renamed), numbers(new, {})
            alone |= {f"-{k}" for k in ours.keys() - theirs.keys()} | {f"+{k}" for k in theirs.keys() - ours.keys()}
            for key in ours.keys() & theirs.keys():
                if ours[key] == theirs[key]:
                    equal += 1
                else:
                    differ.append(f"{cell}, round {old['round']}: {key} {ours[key][:40]} and {theirs[key][:40]}")
        for file in sorted((before / "cells" / cell / "models").iterdir()):
            other = after / "cells" / cell / "models" / file.name
            if other.exists() and tensors(file) == tensors(other):
                equal += 1
            else:
                differ.append(f"{cell}: models/{file.name}")
    return equal, differ, alone


def tensors(file: Path) -> str:
    """A hash of a safetensors file's data, without its header."""
    data = file.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("before", type=Path)
    arguments.add_argument("after", type=Path)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--rename", nargs="*", default=[])
    arguments.add_argument("--models", nargs="*", default=["digits_cnn", "mlp"])
    given = arguments.parse_args()
    renamed = dict(pair.split("=") for pair in given.rename)
    lines, different = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            for engine, options in ENGINES.items():
                if engine == "stacks" and model != given.models[-1]:
                    continue
                runs = [Path(folder) / f"{side}-{model}-{engine}".replace(" ", "-") for side in ("before", "after")]
                for tree, out in zip((given.before, given.after), runs, strict=True):
                    run(tree, config(model), options, out)
                equal, differ, alone = compare(*runs, renamed)
                different += len(differ)
                lines.append(f"- {model}, {engine}: {equal:,} numbers and files equal, {len(differ)} different")
                lines += [f"  - {text}" for text in differ[:20]]
                if alone:
                    lines.append(f"  - only before (-) or after (+): {', '.join(sorted(alone))}")
                print(lines[-1 - min(len(differ), 20) - bool(alone)], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
