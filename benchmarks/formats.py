"""Sizes, loading, latency, exactness and memory of model files. Writes docs/results/formats.md and formats.json.

    python benchmarks/formats.py [--quick]
    python benchmarks/formats.py --again memory|runtimes        only that part; the rest from the JSON

Latencies are medians of runs interleaved with those of the fp32 ONNX model, one thread; memory is measured in a process
of its own for each way of running, as what is resident beyond the same process before the model is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import runtimes
from qupel.core.codebook import Codebook, plan_bits, start_codebook
from qupel.core.layout import Layout
from qupel.deploy import About, empty, export_coreml, export_onnx, keep_packed, load, save
from qupel.deploy.memory import peak, reset_peak, resident
from qupel.deploy.onnx import session
from qupel.deploy.packed import pack_model
from qupel.tasks import zoo as models
from qupel.util.errors import UserError

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
BATCH = 16
WIDTH, DEPTH = 1024, 24  # of the MLP whose memory is measured: 24 layers of 1024 x 1024, 25 million weights
RESULTS = Path(__file__).parent.parent / "docs" / "results"
Ways = dict[str, Callable[[np.ndarray], np.ndarray]]


def deployed(module: nn.Module, bits: int, layers: tuple[str, ...] | None = None) -> Codebook:
    """Hard-quantize the module in place, with k-means centers."""
    layout = Layout.of(module)
    x = layout.flatten(module)
    codebook = start_codebook(layout, x, plan_bits(layout, bits, layers), "kmeans")
    layout.load(module, codebook.hard(x))
    return codebook


def calibrated(name: str) -> nn.Module:
    """The network with biases and BatchNorm as after training, any numbers (ones and zeros would flatter zstd), and
    statistics measured on noise, so that outputs have a usual size."""
    module = models.build(name, (3, 32, 32), 10, seed=0)
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.uniform_(0.5, 1.5, generator=generator)
        if isinstance(layer, nn.BatchNorm2d | nn.Conv2d | nn.Linear) and layer.bias is not None:
            layer.bias.data.normal_(0, 0.1, generator=generator)
    with torch.no_grad():
        for _ in range(20):
            module(torch.randn(32, 3, 32, 32, generator=generator))
    return module.eval()


def run_torch(module: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    def run(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(x)).numpy()

    return run


def run_onnx(path: Path, stay: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    running = session(path, keep_packed=stay, threads=1)
    return lambda x: running.run(None, {"input": x})[0]


def timed(ways: Ways, x: np.ndarray, repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, interleaved in an order that turns, so that no way always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(3):
        for run in ways.values():
            run(x)
    for i in range(repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = time.perf_counter()
            ways[name](x)
            times[name].append(time.perf_counter() - began)
    return times


def median_load(make: Callable[[], Any], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        make()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(name: str, bits: int, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """One row a format."""
    about = About(name, (3, 32, 32), 10, LABELS, MEAN, STD, "client-007", {"method": "qupel", "seed": 0, "test": 0.61})
    module = calibrated(name)
    codebook = deployed(module, bits)
    packed = pack_model(module, codebook, about)
    path = {kind: folder / f"{name}{bits}.{kind}" for kind in ("safetensors", "zst", "onnx", "fp32.onnx", "mlpackage")}
    size = {
        "packed": save(path["safetensors"], module, codebook, about=about),
        "packed + zstd": save(path["zst"], module, codebook, about=about, compress=True),
        "ONNX": export_onnx(path["onnx"], module, codebook, about=about),
        "fp32 ONNX": export_onnx(path["fp32.onnx"], module, Codebook(), about=about),
    }
    try:
        size["Core ML"] = export_coreml(path["mlpackage"], module, codebook, about=about)
    except UserError as error:
        print(error)
    x = np.random.default_rng(0).normal(size=(BATCH, 3, 32, 32)).astype(np.float32)
    wanted = run_torch(module)(x)
    ways: Ways = {
        "fp32 ONNX": run_onnx(path["fp32.onnx"]),
        "ONNX": run_onnx(path["onnx"]),
        "ONNX, kept packed": run_onnx(path["onnx"], stay=True),
        "packed": run_torch(load(path["safetensors"]).model()),
        "packed + zstd": run_torch(load(path["zst"]).model()),
        "packed, kept packed": run_torch(keep_packed(load(path["safetensors"]))),
    }
    loads = {
        "fp32 ONNX": lambda: run_onnx(path["fp32.onnx"]),
        "ONNX": lambda: run_onnx(path["onnx"]),
        "ONNX, kept packed": lambda: run_onnx(path["onnx"], stay=True),
        "packed": lambda: load(path["safetensors"]).model(),
        "packed + zstd": lambda: load(path["zst"]).model(),
        "packed, kept packed": lambda: keep_packed(load(path["safetensors"])),
    }
    times = timed(ways, x, repeats)
    base = times["fp32 ONNX"]
    rows = []
    for kind in (*ways, "Core ML"):
        plain = kind.removesuffix(", kept packed").removesuffix(",")
        if kind not in ways and kind not in size:
            continue
        row: dict[str, Any] = {"model": name, "bits": bits, "format": kind, "bytes": size[plain]}
        row |= {"of floor": size[plain] / packed.floor, "of fp32": size[plain] / size["fp32 ONNX"]}
        if kind in ways:
            # Of paired runs, a few milliseconds apart: a busy moment of the machine strikes both or leaves the median.
            ratio = statistics.median(a / b for a, b in zip(times[kind], base, strict=True))
            row |= {"load ms": 1000 * median_load(loads[kind]), "ms": 1000 * statistics.median(times[kind])}
            row |= {"of fp32 latency": ratio, "max abs error": float(np.abs(ways[kind](x) - wanted).max())}
        rows.append(row)
        print(row, flush=True)
    return rows


# --- memory ---


def big_mlp() -> nn.Module:
    return models.mlp(WIDTH, (WIDTH,) * DEPTH, 10)


def make_big(folder: Path) -> None:
    torch.manual_seed(0)
    module = big_mlp()
    about = About("", (WIDTH,), 10)
    export_onnx(folder / "fp32.onnx", module, Codebook(), about=about)
    layout = Layout.of(module)
    codebook = deployed(module, 2, layout.weights[:-1])
    export_onnx(folder / "packed.onnx", module, codebook, about=about)
    save(folder / "packed.safetensors", module, codebook, about=about)
    save(folder / "fp32.safetensors", module, Codebook(), about=about)


def memory(way: str, folder: Path) -> dict[str, float]:
    """MiB beyond this process before the model: after five runs of one input, and at the peak."""
    torch.set_num_threads(1)
    x = np.zeros((1, WIDTH), np.float32)
    torch.zeros(1, 8) @ torch.zeros(8, 8)  # the libraries' own memory is not the model's
    import onnxruntime  # noqa: F401

    reset_peak()
    before = resident()
    if way.startswith("ONNX"):
        run = run_onnx(folder / ("fp32.onnx" if "fp32" in way else "packed.onnx"), stay="kept" in way)
    else:
        with empty():
            module = big_mlp()
        file = load(folder / ("fp32.safetensors" if "fp32" in way else "packed.safetensors"))
        if "kept" in way:
            module = keep_packed(file, module)
        else:
            module = module.to_empty(device="cpu")
            file.into(module)
        del file
        run = run_torch(module)
    for _ in range(5):
        run(x)
    began = time.perf_counter()
    run(x)
    seconds = time.perf_counter() - began
    mib = 2.0**20
    return {"resident MiB": (resident() - before) / mib, "peak MiB": (peak() - before) / mib, "ms": 1000 * seconds}


WAYS = ("ONNX fp32", "ONNX decoded at load", "ONNX kept packed", "torch fp32", "torch kept packed")
ALLOCATORS = {"default": {}, "returning": {"MALLOC_MMAP_THRESHOLD_": "65536"}}


def memories(folder: Path) -> list[dict[str, Any]]:
    make_big(folder)
    rows = []
    for (kind, setting), way in product(ALLOCATORS.items(), WAYS):
        words = [sys.executable, __file__, "--memory", way, "--folder", str(folder)]
        found = [
            json.loads(subprocess.run(words, check=True, capture_output=True, env=os.environ | setting).stdout)
            for _ in range(5)
        ]
        row = {"way": way, "malloc": kind} | {key: statistics.median(f[key] for f in found) for key in found[0]}
        rows.append(row | {"largest": max(f["resident MiB"] for f in found)})
        print(rows[-1], flush=True)
    return rows


# --- the page ---


def in_runtimes(folder: Path, seconds: float) -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(BATCH, 3, 32, 32)).astype(np.float32)
    files = []
    for name, bits in product(("cnn5", "resnet20"), (32, 2, 3)):
        module = calibrated(name)
        codebook = deployed(module, bits) if bits < 32 else Codebook()
        path = folder / f"{name}-{bits}.onnx"
        if not path.exists():  # in a folder that was given and used before
            export_onnx(path, module, codebook, about=About(name, (3, 32, 32), 10, LABELS, MEAN, STD, "client-007"))
        files.append(runtimes.File(name, bits, path, run_torch(module)(x)))
    return runtimes.measure(files, x, folder, seconds)


def page(told: dict[str, Any]) -> str:
    rows, big, about = told["formats"], told["memory"], told["about"]
    lines = [
        "# Model files: size, speed, exactness, memory",
        "",
        f"`python benchmarks/formats.py`. {about}",
        "",
        "Networks with k-means centers on all but the first and the last layer, not trained. Floor: bits x quantized",
        "weights / 8 + fp32 rest (with BatchNorm's statistics) + centers. fp32: the same network as plain fp32 ONNX.",
        f"Latency: median of runs of {BATCH} images, one thread, interleaved with fp32 ONNX; its ratio is the median",
        "of the ratios of paired runs. Error: against torch with the same weights. Core ML files can be made here but",
        "not run; their weights are read back and compared when they are made.",
        "",
        "| model | bits | format | bytes | of floor | of fp32 | load ms | ms | of fp32 ms | max abs error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [r["model"], r["bits"], r["format"], f"{r['bytes']:,}", f"{r['of floor']:.3f}", f"{r['of fp32']:.3f}"]
        cells += [f"{r['load ms']:.1f}", f"{r['ms']:.2f}", f"{r['of fp32 latency']:.2f}"] if "ms" in r else [""] * 3
        cells += [f"{r['max abs error']:.1e}"] if "ms" in r else [""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    base = {(r["way"].split()[0], r["malloc"]): r["resident MiB"] for r in big if "fp32" in r["way"]}
    lines += [
        "",
        f"## Memory of a 25-million-weight MLP ({DEPTH} layers of {WIDTH} x {WIDTH}) at 2 bits",
        "",
        "Each in a process of its own (median and largest of 5), beyond what the process had before the model was",
        "loaded; one input; ratios to fp32 in the same runtime with the same allocator. malloc `returning` is",
        "MALLOC_MMAP_THRESHOLD_=65536 in the environment: freed memory goes back to the system at once. By default the",
        "C library (glibc) keeps some of what loading and decoding have freed.",
        "",
        "| way | malloc | resident MiB | largest | of fp32 | peak MiB | ms a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in big:
        share = r["resident MiB"] / base[r["way"].split()[0], r["malloc"]]
        cells = [r["way"], r["malloc"], f"{r['resident MiB']:.1f}", f"{r['largest']:.1f}", f"{share:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{r['peak MiB']:.1f}", f"{r['ms']:.1f}"]) + " |")
    if "runtimes" in told:
        lines += ["", *runtimes.page(told["runtimes"])]
    return "\n".join(lines) + "\n"


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing written")
    parser.add_argument("--again", choices=["memory", "runtimes"], help="measure only that; the rest from the JSON")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for files and fetched runtimes (default: a temporary one)")
    given = parser.parse_args()
    if given.memory:
        print(json.dumps(memory(given.memory, given.folder)))
        return
    torch.set_num_threads(1)
    repeats = 15 if given.quick else 200
    began = time.strftime("%Y-%m-%d")
    told = json.loads((RESULTS / "formats.json").read_text()) if given.again else {}
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        if not given.again:
            names = ("cnn5", "resnet20")
            told["formats"] = [r for m in names for bits in (1, 2, 3) for r in measure(m, bits, folder, repeats)]
        if given.again != "runtimes":
            told["memory"] = memories(folder)
        if given.again != "memory":
            told["runtimes"] = in_runtimes(folder, 4.0 if given.quick else 80.0)
    if given.quick:
        print(page(told | {"about": ""}))
        return
    import onnxruntime

    load_average = f"{os.getloadavg()[0]:.1f}"
    where = (
        f"{began}, {cpu()} (shared; load {load_average} at the end), torch {torch.__version__}, "
        f"ONNX Runtime {onnxruntime.__version__}"
    )
    if given.again != "runtimes":
        told["about"] = f"{where}, {repeats} runs of each, networks of one seed."
    if given.again != "memory":
        told["runtimes"]["about"] = f"{where}."
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "formats.md").write_text(page(told))
    (RESULTS / "formats.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
