"""Is one tree slower than another? Runs `benchmarks/quick.py` of two checkouts in turns, each with its own code, and
prints the medians of every line. A line is itself a ratio, or gigabytes: less is better, as is a last column below 1.

    python benchmarks/before_after.py BEFORE AFTER [--times 3]

What else the machine does should be little: a line whose runs lie far apart, in brackets, says nothing.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

LINE = re.compile(r"(.+?) +([0-9.]+)   bar ")
Found = dict[str, list[float]]


def quick(tree: Path) -> dict[str, float]:
    """What a checkout's quick.py tells, by line. That one is past its limit is no matter here."""
    tree = tree.resolve()
    command = [sys.executable, str(tree / "benchmarks" / "quick.py")]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines or not re.fullmatch(r"[0-9]+ s", lines[-1]):  # its last words
        raise SystemExit(f"{' '.join(command)} did not end:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return {m[1]: float(m[2]) for m in map(LINE.match, lines) if m}


def told(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3f}{spread}"


def table(before: Found, after: Found) -> str:
    lines = ["| line | before | after | after / before |", "|---|---|---|---|"]
    for name in {**before, **after}:  # in their order
        a, b = before.get(name, []), after.get(name, [])
        ratio = f"{statistics.median(b) / statistics.median(a):.3f}" if a and b else "-"
        lines.append(f"| {name} | {told(a)} | {told(b)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    before: Found = {}
    after: Found = {}
    for turn in range(options.times):
        for found, tree in ((before, options.before), (after, options.after)):
            for name, value in quick(tree).items():
                found.setdefault(name, []).append(value)
            print(f"run {turn + 1} of {options.times}: {tree}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(f"Medians of {options.times} runs each, in turns (least to most).\n\n{table(before, after)}")


if __name__ == "__main__":
    main()
