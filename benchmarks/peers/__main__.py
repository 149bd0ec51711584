"""The same federated work on our engine and on its peers, in turns, as ratios.

    make bench      # its own environment, .venv-bench; minutes to hours, on an idle machine; peers that are not
                    # installed there are left out
    python benchmarks/peers [--only MLP] [--repeats 3] [--data FOLDER] [--out docs/results]

Every framework gets two processes with one thread each, the same first model and the same batches, and has to end with
the same model. A first run of each is for its memory only, since looking at it takes time; of the others the first
round is not counted. Without --data (a folder with cifar10) images are random.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from work import WORKS, Work, prepare

from qupel.util.files import write_atomic, write_json
from qupel.util.machine import machine

HERE = Path(__file__).parent
FAR = 1.5  # times the fastest peer's round: a peer beyond is run once, and counted while its memory is watched
PEERS = {"QuPeL": "ours.py", "Flower simulation": "flower_peer.py", "pfl": "pfl_peer.py"}
PEERS |= {"fluke": "fluke_peer.py", "NVFlare simulator": "nvflare_peer.py"}
PACKAGES = {
    "QuPeL": "torch",
    "Flower simulation": "flwr",
    "pfl": "pfl",
    "fluke": "fluke-fl",
    "NVFlare simulator": "nvflare",
}
MOST_CLIENTS = {"NVFlare simulator": 20}  # beyond it starts a process for every client of every round: minutes a round


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def peers_of(work: Work) -> list[str]:
    """The frameworks that are installed and carry so many clients."""
    return [p for p in PEERS if installed(PACKAGES[p]) and work.clients <= MOST_CLIENTS.get(p, work.clients)]


def family(pid: int) -> list[int]:
    """A process and everything it started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def memory(pid: int) -> int:
    """Bytes that a process and everything it started hold; shared pages count once."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def run(script: str, folder: Path, out: Path, watch: bool) -> dict:
    """One run of one framework: seconds to its first round, seconds of each round, its last model, and, where it is
    watched, its peak of memory."""
    environment = os.environ | {"QUPEL_BENCH_BORN": repr(time.time()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    log = out.with_suffix(".log")
    with log.open("w") as words:
        child = subprocess.Popen(
            [sys.executable, str(HERE / script), str(folder), str(out)], stdout=words, stderr=words, env=environment
        )
        peak = 0
        while watch and child.poll() is None:
            peak = max(peak, memory(child.pid))
            time.sleep(0.5)
        child.wait()
    if child.returncode or not out.exists():
        raise SystemExit(f"{script} failed on {folder.name}:\n{log.read_text()[-2000:]}")
    return {**json.loads(out.read_text()), "memory": peak, "w": np.load(out.with_suffix(".npy"))}


def took_of(run: dict) -> float:
    """Seconds of a round, without the first."""
    return statistics.median(run["rounds"][1:])


def measure(name: str, data: str | None, repeats: int, place: Path) -> dict:
    """All frameworks in turns on one work item."""
    folder = place / name.replace(" ", "-").replace(",", "")
    said = prepare(WORKS[name], folder, data)
    runs: dict[str, list[dict]] = {peer: [] for peer in peers_of(WORKS[name])}
    fastest = math.inf
    for turn in range(1 + repeats):
        for peer in runs:
            script = PEERS[peer]
            if turn and took_of(runs[peer][0]) > FAR * fastest:
                continue
            runs[peer].append(run(script, folder, folder / f"{script}-{turn}.json", watch=turn == 0))
            print(f"{name}: {peer} {took_of(runs[peer][-1]):.3f} s a round", flush=True)
        fastest = min((took_of(several[0]) for peer, several in runs.items() if peer != "QuPeL"), default=math.inf)
    reference = runs["QuPeL"][0]["w"]
    found = {}
    for peer, several in runs.items():
        counted = several[1:] or several
        seconds = [took_of(r) for r in counted]
        found[peer] = {
            "round": statistics.median(seconds),
            "least": min(seconds),
            "most": max(seconds),
            "start": statistics.median(r["start"] for r in counted),
            "memory": several[0]["memory"],
            "runs": len(counted),
            "apart": float(np.abs(several[0]["w"] - reference).max()),
        }
    return {"data": said, "peers": found}


def page(results: dict[str, dict]) -> str:
    packages = [package for package in (*PACKAGES.values(), "ray") if installed(package)]
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    told = machine()
    lines = [
        "# Against the peers",
        "",
        f"`make bench`; {told['cpus']} CPUs ({told['processor']}), Python {told['python']}, {versions}; "
        "frameworks in turns, medians (least to most; runs), first rounds not counted, memory in a run of its own "
        f"(a peer {FAR} times slower than the fastest is run once, for both: its memory is looked at every half "
        "second while it is timed, which slows it, so that its seconds, here all of Flower's, are upper bounds). Two "
        "processes with one thread each, same first model and batches; the last column: how far the last models are "
        "apart at most. Evaluation is off everywhere. fluke trains clients one after the other, so it is one process "
        "with two threads. NVFlare's simulator has a process for each of up to 20 clients; of more it starts one for "
        "each in every round, two at a time: there it is left out.",
        "",
        "CNN: 5 layers, 797,962 parameters, batch 50. MLP: 64-64-32-10, 6,570 parameters, batch 10; wide MLP: 50,826 "
        "parameters. Ten local steps a round; a client of an MLP has 100 samples, so that a round is an epoch. "
        "Images and models come in PyTorch's default memory order, unless an item says channels_last; our engine "
        "changes to it by itself, and takes 5x5 convolutions forward by FFT. QuPeL on a peer is plain PyTorch in that "
        "peer's idiom (benchmarks/peers/plain.py).",
        "",
        "| work | framework | seconds a round | ratio to ours | start s | peak memory | apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ours = result["peers"]["QuPeL"]["round"]
        for peer, r in result["peers"].items():
            spread = f"{r['round']:.3f} ({r['least']:.3f} to {r['most']:.3f}; {r['runs']})"
            lines.append(
                f"| {name} | {peer} | {spread} | {r['round'] / ours:.2f} | {r['start']:.1f} "
                f"| {r['memory'] / 1e6:.0f} MB | {r['apart']:.0e} |"
            )
    said = sorted({r["data"] for r in results.values()})
    return "\n".join([*lines, "", f"Data: {', '.join(said)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the work item of this name, else those whose names contain it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", default=os.environ.get("QUPEL_DATA"))
    parser.add_argument("--out", type=Path, help="a folder for benchmarks.md and benchmarks.json")
    options = parser.parse_args()
    known = options.out / "benchmarks.json" if options.out else None
    results = json.loads(known.read_text()) if known and known.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for name in WORKS:
            if name == options.only or (options.only not in WORKS and (options.only or "") in name):
                results[name] = measure(name, options.data, options.repeats, Path(place))
                results = {k: results[k] for k in WORKS if k in results}
                if options.out:  # item by item: what is measured is not lost
                    write_atomic(options.out / "benchmarks.md", page(results))
                    write_json(options.out / "benchmarks.json", results)
    print(page(results))


if __name__ == "__main__":
    main()
