"""`qupel plan`: which network and which bits fit a device, by bytes and by a quick look. `cli.py` registers it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from qupel.deploy.commands import Changed, Own, allowed_model, kib
from qupel.util.errors import UserError
from qupel.util.terminal import out, shown

if TYPE_CHECKING:
    from torch import nn

    from qupel.deploy.about import About
    from qupel.deploy.budget import BudgetPlan, Choice, Planner
    from qupel.deploy.own import Allowed
    from qupel.run.config import Config

SAMPLES = 2000  # that a measurement looks at, one in five of them held out


def plan(
    model: Annotated[
        list[str], typer.Argument(help="names of models, my_module:Name, or packed files (their weights tell more)")
    ],
    budget: Annotated[list[str], typer.Option("--budget", help="bytes of a device: 96KiB; may be repeated")],
    shape: Annotated[str | None, typer.Option("--input", help="shape of an input, such as 3x32x32")] = None,
    classes: Annotated[int, typer.Option(min=1)] = 10,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="also quantize the first and the last")] = False,
    rest: Annotated[Literal["fp32", "fp16"], typer.Option(help="layers that are not quantized")] = "fp32",
    levels: Annotated[Literal["layer", "channel"], typer.Option(help="channel: levels scaled by channel")] = "layer",
    measure: Annotated[
        str | None, typer.Option(help="a data set: how well each choice does after a quick training on 2,000 samples")
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="of that training")] = 200,
    own: Own = None,
    changed: Changed = False,
) -> None:
    """Which bits fit each device, uniform and layer by layer, counting everything that is in the file; of several
    models, which of them, each at its widest bits, with --measure by how well they do."""
    from qupel.deploy.budget import parse_size

    budgets = [parse_size(text) for text in budget]
    if measure is not None:
        shape, classes = _kind(measure)
    planners = planners_for(model, shape, classes, all_layers, rest, levels == "channel", allowed_model(own, changed))
    if len(planners) == 1 and measure is None:
        _show_plans(planners, budgets)
    else:
        _show_choices(planners, budgets, measure, steps)


def planners_for(
    models: Sequence[str],
    shape: str | None,
    classes: int,
    all_layers: bool,
    rest: Literal["fp32", "fp16"],
    channels: bool,
    allowed: Allowed,
) -> dict[str, Planner]:
    """Sizes of these networks, by name."""
    from qupel.core.layout import Layout
    from qupel.deploy.budget import Planner

    found = {}
    for name in dict.fromkeys(models):
        module, about = _planned(name, shape, classes, allowed)
        layers = Layout.of(module).weights if all_layers else None
        found[name] = Planner(module, layers=layers, about=about, rest=rest, channels=channels)
    return found


def _show_choices(planners: Mapping[str, Planner], budgets: Sequence[int], measure: str | None, steps: int) -> None:
    from qupel.deploy.budget import choices

    found, best = [choices(planners, size) for size in budgets], []
    scores = {c: quick_score(c.network, c.bits, measure, steps) for each in found for c in each} if measure else {}
    for size, fitting in zip(budgets, found, strict=True):
        fitting = sorted(fitting, key=lambda c: -scores[c]) if scores else fitting
        told = [f"{kib(c.bytes)}, {100 * scores[c]:.1f} %" if scores else kib(c.bytes) for c in fitting]
        said = [f"{c.network} at {_bits(c.bits)} ({t})" for c, t in zip(fitting, told, strict=True)]
        out.print(f"[bold]{kib(size)}[/bold]: {shown(' or '.join(said), 2000)}", highlight=False, soft_wrap=True)
        best.append(fitting[0])
    if scores:
        out.print(f"[dim]%: of held-out samples after {steps} steps on one client, a first look[/dim]", highlight=False)
    _show_config(best)


def _kind(data: str) -> tuple[str, int]:
    """(shape of an input, classes) of a data set, as options have them."""
    from qupel.run.jobs import data_of

    found = data_of(measuring("mlp", 32, data, 10))
    if found.classes is None:
        raise UserError(f"--measure {data}: it has no class labels")
    return "x".join(map(str, found.shape)), found.classes


def measuring(network: str, bits: int, data: str, steps: int) -> Config:
    """A short training in one place."""
    from qupel.run.config import validate

    return validate(
        {
            "data": {"name": data, "limit": SAMPLES},
            "split": {"kind": "iid", "clients": 1, "validation": 0.2, "blind": True},
            "model": {"name": network},
            "bits": bits,
            "rounds": max(2, steps // 10),
            "local_steps": 10,
            "evaluate_every": 10**6,
            "methods": {"quick": {"recipe": "local", "warmup": 0.5, "finetune": 0.0}},
        },
        "--measure",
    )


def quick_score(network: str, bits: int, data: str, steps: int) -> float:
    """The share of held-out samples that a network at these bits gets right after a short training."""
    from qupel.engine.inline import Inline
    from qupel.engine.rounds import run
    from qupel.run.jobs import Cell, build_job

    config = measuring(network, bits, data, steps)
    job = build_job(config, Cell("quick", 0))
    with Inline(job) as engine:
        return float(run(job, engine).lines[-1]["validation"])


def _show_config(chosen: Sequence[Choice]) -> None:
    """What a config says for clients with these networks and bits."""
    networks = ", ".join(json.dumps(c.network) for c in chosen)
    said = f"in a config: bits = {[c.bits for c in chosen]}, and in [model] networks = [{networks}]"
    out.print(shown(said, 2000), style="dim", highlight=False, soft_wrap=True)


def _bits(bits: int) -> str:
    return "full precision" if bits > 8 else f"{bits} bit{'s' * (bits > 1)}"


def _show_plans(planners: Mapping[str, Planner], budgets: Sequence[int]) -> None:
    """Of one model."""
    from qupel.core.layout import Coverage
    from qupel.deploy.budget import WIDTHS

    ((model, planner),) = planners.items()
    table = Table("bits", *map(str, WIDTHS), title=f"{shown(model)}: file at most", title_justify="left")
    sizes = [planner.bytes(b) / 1024 for b in WIDTHS]
    table.add_row("KiB", *[f"{size:.1f}" if size < 100 else f"{size:.0f}" for size in sizes])
    out.print(table)
    covered = Coverage.of(planner.layout, planner.layers)
    out.print(shown(f"to be quantized: {covered}", 2000), highlight=False)
    refused = []
    for size in budgets:
        try:
            _show_plan(planner.fit(size))
        except UserError as error:
            refused.append(error)
            if len(budgets) > 1:
                out.print(f"\n{shown(error, 2000)}", style="red", highlight=False)
    if len(refused) == len(budgets):
        raise refused[0]


def _show_plan(found: BudgetPlan) -> None:
    uniform = f"{found.uniform}-bit layers" if found.uniform <= 8 else "full precision"
    size = kib(found.uniform_bytes)
    out.print(f"\n[bold]{kib(found.budget)}[/bold]: {uniform}, {size}; or layer by layer, {kib(found.bytes)},")
    errors = f"{found.error:.2g} instead of {found.uniform_error:.2g}"
    out.print(f"with an error of the weights of {errors}:", highlight=False)
    by_bits: dict[int, list[str]] = {}
    for name, bits in found.bits.items():
        by_bits.setdefault(bits, []).append(name.removesuffix(".weight"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right")
    for bits, names in sorted(by_bits.items()):
        grid.add_row(f"  {bits}-bit", shown(", ".join(names), 20_000))
    out.print(grid, highlight=False)


_USUAL = {"digits_cnn": (1, 8, 8), "mlp": (1, 28, 28), "lstm": (80,), "transformer": (80,)}
_USUAL |= dict.fromkeys(("cnn1d", "mobilenet1d", "tcn"), (8, 52))


def _planned(model: str, shape: str | None, classes: int, allowed: Allowed) -> tuple[nn.Module, About | None]:
    from qupel.deploy.file import load
    from qupel.deploy.own import modules_here
    from qupel.tasks import zoo

    if model not in zoo.networks and (":" not in model or Path(model).is_file()):
        if not Path(model).is_file():
            raise UserError(f"{model!r} is neither a model ({', '.join(zoo.networks)}, or module:Name) nor a file")
        packed = load(model)
        return packed.model(allowed), packed.about
    modules_here()
    try:
        dims = tuple(int(v) for v in shape.split("x")) if shape else _USUAL.get(model, (3, 32, 32))
    except ValueError:
        raise UserError(f"--input {shape!r}: such as 3x32x32") from None
    return zoo.build(model, dims, classes, seed=0), None
