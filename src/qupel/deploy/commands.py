"""Commands for model files: export, inspect, predict, eval. `cli.py` registers them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from qupel.util.errors import UserError
from qupel.util.terminal import out, plain, shown

if TYPE_CHECKING:
    from qupel.deploy.about import About
    from qupel.deploy.own import Allowed
    from qupel.deploy.packed import Packed
    from qupel.deploy.timing import Middle

ModelFile = Annotated[Path, typer.Argument(help="a packed (.safetensors) or ONNX (.onnx) model file")]
KeepPacked = Annotated[bool, typer.Option("--keep-packed", help="decode weights in every run: less memory, slower")]
Trust = Annotated[bool, typer.Option("--trust", help="run an ONNX file in this process, whatever it holds and takes")]
Own = Annotated[str | None, typer.Option("--model", help="my_module:Name, the code of a network of your own")]
Changed = Annotated[bool, typer.Option("--changed", help="take that code even if it is not what it was")]
_FORMATS = "packed, onnx, coreml, or module:function of your own"
_ROWS = 200  # layers that are shown


def allowed_model(model: str | None, changed: bool) -> Allowed:
    """Which code a file may name: what the user says."""
    from qupel.deploy import own

    if model is None:
        return own.NOTHING
    if ":" not in model:
        raise UserError(f"--model {model!r}: needed is my_module:Name")
    own.modules_here()
    return own.Allowed(model, changed=changed)


def _allowed_by(run: Path, name: str, changed: bool) -> Allowed:
    """... or what the config of a run says that he gives."""
    from qupel.deploy import own
    from qupel.util.files import read_json

    if ":" not in name or not (run / "config.json").is_file():
        return own.NOTHING
    config = read_json(run / "config.json")
    named = [config.get("model", {}).get("name"), *(m.get("model") for m in config.get("methods", {}).values())]
    own.modules_here()
    return own.Allowed(name, loose=True, changed=changed) if name in named else own.NOTHING


def kib(size: int) -> str:
    return f"{size / 1024:,.1f} KiB"


# --- export ---


def export(
    run: Annotated[Path, typer.Argument(help="a finished run, a folder of packed models, or one of them")],
    to: Annotated[str, typer.Option("--to", help=_FORMATS)] = "packed",
    client: Annotated[list[int] | None, typer.Option("--client", help="number of a client; may be repeated")] = None,
    all: Annotated[bool, typer.Option("--all", help="every client")] = False,
    unseen: Annotated[bool, typer.Option("--unseen", help="of the clients that joined later")] = False,
    cell: Annotated[str | None, typer.Option("--cell", help="METHOD-sSEED, when the run has several")] = None,
    folder: Annotated[Path, typer.Option("--out", help="folder for the files")] = Path("exported"),
    rest: Annotated[Literal["fp32", "fp16"], typer.Option(help="layers that are not quantized")] = "fp32",
    zstd: Annotated[bool, typer.Option("--zstd", help="compress packed files for transfer")] = False,
    model: Own = None,
    changed: Changed = False,
) -> None:
    """Write clients' models as packed files, ONNX or Core ML; each is verified before it is left on disk."""
    from qupel.deploy.file import load
    from qupel.deploy.formats import suffix
    from qupel.deploy.own import modules_here

    if ":" in to:
        modules_here()
    ending = suffix(to) + (".zst" if zstd else "")
    if zstd and to != "packed":
        raise UserError(f"--zstd: only packed files are compressed, not {to}")
    table = Table("client", "file", "bytes", "of fp32", "budget")
    over: list[str] = []
    for source in _sources(run, cell, client, all, "unseen" if unseen else "client"):
        packed = load(source)
        target = folder / (source.name.removesuffix(".safetensors") + ending)
        allowed = allowed_model(model, changed) if model else _allowed_by(run, packed.about.model, changed)
        size = _write(packed, target, to, rest, zstd, allowed)
        share = size / _dense_bytes(packed)
        budget = packed.about.extra.get("budget")  # travels in the file, where the client had one
        told = ""
        if isinstance(budget, int) and 0 < budget < 2**63:
            told = f"{size / budget:.0%} of {kib(budget)}"
            over += [target.name] if size > budget else []
        who = packed.about.client or source.stem
        table.add_row(shown(who), shown(target.name), f"{size:,}", f"{share:.1%}", told)
    out.print(table)
    out.print(f"[dim]written to {shown(folder)}[/dim]")
    if over:
        raise UserError(f"{len(over)} of {table.row_count} files are over their client's budget: {', '.join(over[:5])}")


def _sources(run: Path, cell: str | None, clients: list[int] | None, all: bool, kind: str = "client") -> list[Path]:
    """The packed files that are meant: RUN/cells/CELL/models/client-000.safetensors, or a file itself. kind: "unseen"
    for those of clients that joined later."""
    if run.is_file():
        return [run]
    if saved := sorted(run.glob(f"{kind}-*.safetensors")):  # as `Fit.save` leaves them
        return _chosen(run, saved, clients, all)
    cells = sorted(p.parent.name for p in run.glob("cells/*/models")) if run.is_dir() else []
    if not cells:
        raise UserError(f"{run}: neither a model file, a folder of them nor a finished run (no cells/*/models in it)")
    if cell is None and len(cells) > 1:
        raise UserError(f"{run} has several cells; give --cell, one of: {', '.join(cells)}")
    if cell is not None and cell not in cells:
        raise UserError(f"{run} has no cell {cell!r}; allowed: {', '.join(cells)}")
    models = sorted((run / "cells" / (cell or cells[0]) / "models").glob(f"{kind}-*.safetensors"))
    if not models:
        raise UserError(f"{run} has no model of {'a client that joined later' if kind == 'unseen' else 'a client'}")
    return _chosen(run, models, clients, all)


def _chosen(run: Path, models: list[Path], clients: list[int] | None, all: bool) -> list[Path]:
    if all == bool(clients):
        raise UserError(f"give --client N (0 to {len(models) - 1}, may be repeated) or --all")
    if all:
        return models
    found = {int(p.stem.rpartition("-")[2]): p for p in models}
    if missing := [c for c in clients or [] if c not in found]:
        raise UserError(f"no client {missing[0]} in {run}; allowed: 0 to {len(models) - 1}")
    return [found[c] for c in clients or []]


def _write(packed: Packed, target: Path, to: str, rest: Literal["fp32", "fp16"], zstd: bool, allowed: Allowed) -> int:
    from qupel.core.layout import Layout
    from qupel.deploy.file import write_packed
    from qupel.deploy.formats import write

    if to == "packed":  # nothing of the network's code is needed
        return write_packed(target, packed.with_rest(rest), compress=zstd)
    module = packed.model(allowed)
    return write(target, module, packed.codebook(Layout.of(module)), packed.about, to, rest, zstd)


def _dense_bytes(packed: Packed) -> int:
    return sum(4 * layer.size for layer in packed.layers) + sum(4 * value.size for value in packed.rest.values())


# --- inspect ---


def inspect(
    file: ModelFile,
    picture: Annotated[Path | None, typer.Option(help="also draw the histograms to this PNG or SVG")] = None,
    trust: Trust = False,
    model: Own = None,
    changed: Changed = False,
) -> None:
    """Show what is in a model file: layers, bits, centers, bytes, entropy of the codes."""
    from qupel.deploy import inspect as look

    packed, size = look.read(file, trust), file.stat().st_size
    table = Table("layer", "shape", "m", "bytes", "bits", "entropy", "codes")
    rows = look.rows(replace(packed, layers=packed.layers[:_ROWS]))
    for row in rows:
        shape = "x".join(map(str, row.shape))
        numbers = (str(len(row.centers)), f"{row.bytes:,}", str(row.bits), f"{row.entropy:.2f}")
        table.add_row(shown(row.name), shape, *numbers, look.bars(row.counts))
    if left := len(packed.layers) - len(rows):
        table.add_row(f"and {left:,} more", *[""] * 6)
    numbers, size_of_rest = (sum(getattr(v, what) for v in packed.rest.values()) for what in ("size", "nbytes"))
    table.add_row("not quantized", f"{numbers:,}", "", f"{size_of_rest:,}", "", "", "")
    out.print(table)
    for row in rows:
        centers = [f"{c:.3g}" for c in row.centers]
        text = " ".join(centers if len(centers) <= 8 else [*centers[:4], "...", *centers[-4:]])
        if row.scales is not None:
            text += f" times {row.scales[0]:.3g} to {row.scales[1]:.3g}, scaled by channel"
        out.print(f"{shown(row.name)}: {text}", highlight=False)
    dense = _dense_bytes(packed)
    more = 100 * (size / max(1, packed.floor) - 1)
    out.print(f"{size:,} bytes ({kib(size)}), {dense / size:.1f} times smaller than fp32", highlight=False)
    what = "codes, centers, scales and rest" if packed.channels else "codes, centers and rest"
    out.print(f"{more:+.1f} % against {what} alone", highlight=False)
    out.print(shown(f"quantized: {look.coverage(packed, allowed_model(model, changed))}", 2000), highlight=False)
    _tell(packed.about)
    if picture is not None:
        look.picture(packed, picture)
        out.print(f"drawn to {shown(picture)}")


def _tell(about: About) -> None:
    known = {"model": about.model, "input": "x".join(map(str, about.input_shape)), "client": about.client}
    known |= about.extra
    told = [f"{plain(k, 40)} {plain(v, 80)}" for k, v in known.items() if v or v == 0]
    out.print(shown(", ".join(told), 2000), highlight=False)


# --- predict, eval ---


def predict(
    file: ModelFile,
    inputs: Annotated[Path, typer.Argument(help="an image, a folder of images, a .npz or a .csv file")],
    top: Annotated[int, typer.Option(min=1, help="how many classes to show")] = 1,
    keep_packed: KeepPacked = False,
    trust: Trust = False,
    own: Own = None,
    changed: Changed = False,
) -> None:
    """Print what the model sees in images or rows of numbers; of a model without classes its outputs."""
    from qupel.deploy.predict import open_model, probabilities, read_inputs

    model = open_model(file, keep_packed=keep_packed, trust=trust, allowed=allowed_model(own, changed))
    names, values = read_inputs(inputs, model)
    labels, classes = model.about.labels, bool(model.about.classes)
    for start in range(0, len(names), 256):
        outputs = model.run(values[start : start + 256])
        for name, p in zip(names[start:], probabilities(outputs, len(labels)) if classes else outputs, strict=False):
            if classes:
                best = p.argsort()[::-1][:top]
                said = ", ".join(f"{shown(labels[k], 60) if labels else k} {100 * p[k]:.1f} %" for k in best)
            else:
                said = ", ".join(f"{value:.6g}" for value in p.reshape(-1))
            out.print(f"{shown(name)}: {said}", highlight=False, soft_wrap=True)


def evaluate_file(
    file: ModelFile,
    data: Annotated[str | None, typer.Option("--data", help="data set, .npz file, or folder of data sets")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="folder of data sets (else QUPEL_DATA)")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first samples")] = None,
    keep_packed: KeepPacked = False,
    trust: Trust = False,
    own: Own = None,
    changed: Changed = False,
) -> None:
    """Accuracy on the test set, latency, energy where the machine tells it, size and peak memory of a model file."""
    import torch

    from qupel.data import sources
    from qupel.deploy.predict import accuracy, open_model
    from qupel.deploy.timing import costs

    name = data
    if data is not None and Path(data).is_dir():  # as elsewhere: --data FOLDER; the file knows the data set
        name, folder = None, Path(data)
    if name is None:
        from qupel.deploy.inspect import read

        name = read(file, trust).about.extra.get("data")
        if not isinstance(name, str) or not sources.is_known(name):  # which files are opened is for the user to say
            raise UserError(f"{file} names none of the known data sets; give --data")
    judged = sources.load(name, folder, limit)
    inputs, targets, _ = judged.test.read(slice(0, len(judged.test)))
    if judged.test.labels is None:
        raise UserError(f"{name} has no class labels to compare with")
    torch.set_num_threads(1)  # so that latencies mean the same everywhere
    allowed = allowed_model(own, changed)
    model = open_model(file, keep_packed=keep_packed, threads=1, trust=trust, allowed=allowed)
    if model.about.input_shape != judged.shape:
        raise UserError(f"{file} takes inputs {model.about.input_shape}; {name} has {judged.shape}")
    right = accuracy(model, inputs, targets)
    before, most = model.memory()
    one, many = costs(model.timed, (1, 64))
    table = Table(show_header=False)
    table.add_row("accuracy", f"{100 * right:.2f} % of {len(inputs):,} test samples of {shown(name)}")
    table.add_row("latency", f"{_each(one.seconds, many.seconds, 'ms')}, one thread")
    if one.joules and many.joules:
        table.add_row("energy", f"{_each(one.joules, many.joules, 'mJ')}, of the whole processor")
    table.add_row("size", f"{model.bytes:,} bytes ({kib(model.bytes)}), {model.kind}")
    grown = (most - before) / 2**20
    table.add_row("peak memory", f"{most / 2**20:,.0f} MiB of its process, {grown:,.1f} MiB of it for this model")
    out.print(table)
    if isinstance(model.about.extra.get("test"), float):
        out.print(f"[dim]the run reported {100 * model.about.extra['test']:.2f} % on this client's own test data[/dim]")


def _each(one: Middle, many: Middle, unit: str) -> str:
    """Of 1 and of 64 inputs, in thousandths."""
    said = [f"{1e3 * m.median:.3g} {unit} ({1e3 * m.low:.3g} to {1e3 * m.high:.3g})" for m in (one, many)]
    return f"{said[0]} for 1 input, {said[1]} for 64; medians, 95 % intervals"
