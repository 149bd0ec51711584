"""The command line. Every command is a thin call of the library."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qupel import __version__
from qupel.deploy import commands as deploy
from qupel.flower import commands as flower
from qupel.paper.convergence.commands import theory
from qupel.paper.reproduce import commands as reproduce
from qupel.run import lists
from qupel.run.commands import Reuse, adapt, compare, keep, leaderboard
from qupel.run.plan import plan
from qupel.util.errors import UserError
from qupel.util.terminal import (
    Watcher,
    err,
    leave_quietly,
    number_table,
    out,
    plain,
    shown,
    speak_plainly,
    stop_requests,
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path | None, typer.Argument(help="a TOML file; none: the demo on embedded digits")]
Out = Annotated[Path | None, typer.Option("--out", help="run directory (default: runs/<name>-<time>)")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a key: --set split.clients=10")]
Workers = Annotated[int | None, typer.Option(min=1, help="worker processes, one thread each (default: all cores)")]
Data = Annotated[Path | None, typer.Option("--data", help="folder with the data sets (else QUPEL_DATA)")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --out")]
OtherVersions = Annotated[
    bool, typer.Option("--other-versions", help="resume what other versions of the packages began, maybe to other bits")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; on a GPU all clients run in this process")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="also write event files to RUN/tensorboard")]
Engine = Annotated[
    Literal["local", "ranks"] | None,
    typer.Option(help="worker processes here, or ranks of torch.distributed (default: local; ranks under torchrun)"),
]
RankTimeout = Annotated[
    float | None, typer.Option(min=1, help="seconds of silence after which a rank counts as hung (default: 600)")
]
Diagnostics = Annotated[
    Literal["cheap", "full"] | None,
    typer.Option(help="measure what the theorems speak of, on one batch a client or on all of its data"),
]
BadUpload = Annotated[
    Literal["refuse", "stop"] | None,
    typer.Option(help="a client sends what cannot be used: leave it out of the round, or end the run"),
]

Vectorize = Annotated[
    Literal["auto", "on", "off"] | None,
    typer.Option(help="train clients in stacks; auto: where a quick measurement says that it pays (the default)"),
]

TargetEpsilon = flower.TargetEpsilon
Delta = flower.Delta

MOST_CLASSES = 12  # whose counts fit 80 columns

DEMO = """
seeds = [0, 1, 2, 3, 4]
bits = [2, 3]
rounds = 10
evaluate_every = 5
checkpoint_every = 10
[split]
train_per_client = 20
[methods.QuPeL]
recipe = "qupel"
[methods.Local]
recipe = "local"
[methods.FedAvg]
recipe = "fedavg"
[methods."FedAvg, then 2 and 3 bits"]
of = "FedAvg"
bits = [2, 3]
[methods."FedAvg + tuning"]
recipe = "fedavg-finetune"
finetune = 0.3
[methods."FedAvg + tuning, then 2 and 3 bits"]
of = "FedAvg + tuning"
bits = [2, 3]
"""
TRAINING = {"split": {"kind": "one"}, "bits": 2, "local_steps": 10}
TRAINING_DEMO = """
rounds = 60
batch = 50
[methods."learned centers"]
recipe = "local-prox"
[methods."full precision"]
recipe = "local-prox"
bits = 32
[methods."k-means afterwards"]
recipe = "ptq-kmeans"
"""


def _version(asked: bool) -> None:
    if asked:
        print(f"qupel {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="say which one this is")]


@app.callback()
def _start(version: Version = False) -> None:
    """Federated learning in which every client ends with its own model, small enough for its own device."""


@app.command()
def run(
    config: ConfigFile = None,
    out: Out = None,
    set: Set = None,
    workers: Workers = None,
    data: Data = None,
    resume: Resume = False,
    on_bad_upload: BadUpload = None,
    device: Device = "cpu",
    tensorboard: TensorBoard = False,
    engine: Engine = None,
    rank_timeout: RankTimeout = None,
    diagnostics: Diagnostics = None,
    vectorize: Vectorize = None,
    other_versions: OtherVersions = False,
    target_epsilon: TargetEpsilon = None,
    delta: Delta = None,
    reuse: Reuse = None,
) -> None:
    """Run a federation: every client ends with its own small model. Without a config: the demo."""
    given: dict[str, Any] = {"on_bad_upload": on_bad_upload, "diagnostics": diagnostics, "vectorize": vectorize}
    given |= {"privacy.target_epsilon": target_epsilon, "privacy.delta": delta}
    overrides = [*(set or []), *(f"{key}={value}" for key, value in given.items() if value)]
    with _crew(engine, workers, rank_timeout, config) as (workers, start):
        where = (device, tensorboard, other_versions)
        _experiment(config, DEMO, {}, out, overrides, workers, start, data, resume, *where, reuse or ())


@app.command()
def train(
    config: ConfigFile = None,
    out: Out = None,
    set: Set = None,
    workers: Workers = None,
    data: Data = None,
    resume: Resume = False,
    device: Device = "cpu",
    tensorboard: TensorBoard = False,
    diagnostics: Diagnostics = None,
    other_versions: OtherVersions = False,
) -> None:
    """Train quantized models in one place (Algorithm 1 and its competitors). Without a config: digits."""
    overrides = [*(set or []), *([f"diagnostics={diagnostics}"] if diagnostics else [])]
    with _crew("local", workers) as (workers, start):
        where = (device, tensorboard, other_versions)
        _experiment(config, TRAINING_DEMO, TRAINING, out, overrides, workers, start, data, resume, *where)


@contextmanager
def _crew(
    engine: str | None, workers: int | None, rank_timeout: float | None = None, config: Path | None = None
) -> Iterator[tuple[int, Any]]:
    """(number of workers, what starts them). A rank other than 0 serves in here until its process ends."""
    from qupel.engine import group
    from qupel.engine.workers import Pool
    from qupel.run import config as configs
    from qupel.run import experiment
    from qupel.util.machine import available_cpus

    timeout = rank_timeout or group.TIMEOUT
    with group.joined(timeout) as ranks:
        if ranks is None:
            start = partial(group.start, timeout=timeout) if engine == "ranks" else Pool
            yield workers or available_cpus(), start
            return
        if ranks.rank > 0:
            if config is not None:  # that of rank 0 comes as an order; parts of one's own may stand beside the file
                configs.find_modules_in(config.resolve().parent)
            experiment.serve(ranks)
        if engine == "local" and ranks.size > 1:
            raise UserError(f"{ranks.size} ranks were started, and the local engine needs none: start it by itself")
        if workers not in {None, ranks.size}:
            raise UserError(f"--workers {workers}, but {ranks.size} ranks were started; leave it out")
        yield ranks.size, lambda _: ranks


def _experiment(
    path: Path | None,
    embedded: str,
    defaults: dict[str, Any],
    folder: Path | None,
    overrides: list[str],
    workers: int,
    start: Any,
    data: Path | None,
    resume: bool,
    device: str,
    tensorboard: bool,
    other_versions: bool,
    reuse: Sequence[Path] = (),
) -> None:
    from qupel.report.board import Board
    from qupel.report.show import show
    from qupel.run import config as configs
    from qupel.run import experiment

    if data is not None:
        overrides = [*overrides, _folder(data)]
    config = (
        configs.parse(embedded, "demo", overrides, defaults)
        if path is None
        else configs.load(path, overrides, defaults)
    )
    if folder is None:
        if resume:
            raise UserError("--resume needs --out, the directory of the run to go on with")
        folder = Path("runs") / f"{path.stem if path else 'demo'}-{time.strftime('%Y%m%d-%H%M%S')}"
    began = time.monotonic()
    cells = experiment.cells(config)
    watcher = Watcher(len(cells) * _rounds(config))
    tell = Board(folder / "tensorboard", watcher.tell).tell if tensorboard else watcher.tell
    with stop_requests() as should_stop, watcher:
        results = experiment.run_experiment(
            config,
            folder,
            workers=workers,
            start=start,
            resume=resume,
            watch=tell,
            should_stop=should_stop,
            device=device,
            other_versions=other_versions,
            reuse=reuse,
        )
    show(results, folder, config.split.kind == "one", time.monotonic() - began)


def _folder(data: Path) -> str:
    """The override that says where data sets are, whatever characters its name has."""
    return f"data.folder={json.dumps(str(data), ensure_ascii=False)}"


def _rounds(config: Any) -> int:
    return max(sum(p.rounds for p in m.phases) if m.phases else config.rounds for m in config.methods.values())


@app.command()
def split(
    config: ConfigFile = None,
    picture: Annotated[Path | None, typer.Option(help="also draw clients x classes to this PNG or SVG")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    set: Set = None,
    data: Data = None,
) -> None:
    """Show who gets what: a table of clients x classes, and a picture."""
    from qupel.data import partition
    from qupel.run import config as configs
    from qupel.run import jobs

    overrides = [*(set or []), *([_folder(data)] if data else [])]
    cfg = configs.load(config, overrides) if config else configs.parse(DEMO, "demo", overrides)
    dataset = jobs.data_of(cfg)
    parts = jobs.split_data(cfg, dataset, seed)
    labels = dataset.train.labels
    if dataset.classes is None or labels is None:
        raise UserError(f"{dataset.name} has no class labels to count")
    counts = partition.table(parts, labels, dataset.classes)
    few = dataset.classes <= MOST_CLASSES
    head = ["client", *(map(str, range(dataset.classes)) if few else ["classes"]), "train", "valid", "test"]
    body = []
    for i, (row, part) in enumerate(zip(counts, parts, strict=True)):
        cells = [str(n) if n else "·" for n in row] if few else [str(sum(n > 0 for n in row))]
        sizes = (len(part.train_rows), len(part.validation_rows), len(part.test_rows))
        body.append([str(i), *cells, *map(str, sizes)])
    out.print(number_table(head, body))
    if picture is not None:
        from qupel.report.figures import split_picture

        split_picture(counts, dataset.labels, picture)
        out.print(f"drawn to {shown(picture)}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories; several are compared in one page")],
    open: Annotated[bool, typer.Option("--open", help="show the page in the browser")] = False,
    folder: Annotated[
        Path | None, typer.Option("--out", help="folder (default: RUN/report; RUN/comparison for several)")
    ] = None,
) -> None:
    """Make a page to look at, with its figures (PNG, SVG) and tables (Markdown, LaTeX, CSV)."""
    from qupel.paper.forms import FORMS
    from qupel.report.write import write_report

    target = write_report(runs, folder, FORMS)
    out.print(f"written to {target}", highlight=False, soft_wrap=True, markup=False)
    if open:
        webbrowser.open(target.resolve().as_uri())


for _command, _name in (
    (lists.methods, "methods"),
    (lists.datasets, "datasets"),
    (lists.models, "models"),
    (lists.new, "new"),
    (adapt, "adapt"),
    (compare, "compare"),
    (leaderboard, "leaderboard"),
    (keep, "keep"),
    (deploy.export, "export"),
    (deploy.inspect, "inspect"),
    (deploy.predict, "predict"),
    (deploy.evaluate_file, "eval"),
    (plan, "plan"),
    (theory, "theory"),
):
    app.command(_name)(_command)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(flower.app, name="flower")


def _fail(text: str) -> None:
    err.print(plain(text, 2000), style="red", highlight=False, soft_wrap=True, markup=False)


def _ended(e: Exception) -> int:
    """The exit code of a run that could not go on; torch is loaded here only, so that help and completion are quick."""
    from qupel.engine.rounds import Failed, Stopped
    from qupel.engine.workers import WorkerDied

    if isinstance(e, Stopped):
        err.print(f"{shown(e)}; go on with --resume and the same --out", highlight=False, soft_wrap=True)
        return 130
    if not isinstance(e, Failed | WorkerDied):
        raise e
    _fail(f"error: {e}")
    return 1


def main() -> None:
    """User errors: one line, exit code 2. A stop on request: 130. Tracebacks only for bugs."""
    speak_plainly()
    try:
        app(standalone_mode=True)
    except BrokenPipeError:  # whoever read this has seen enough, as `head`
        leave_quietly()
    except UserError as e:
        _fail(f"error: {e}")
        sys.exit(2)
    except OSError as e:  # a full disk, a folder that may not be written: the last checkpoint is intact
        where = f" ({e.filename})" if e.filename else ""
        _fail(f"error: {e.strerror or e}{where}")
        sys.exit(2)
    except Exception as e:
        sys.exit(_ended(e))
    except KeyboardInterrupt:
        err.print("stopped at once; the last checkpoint is intact: go on with --resume and the same --out")
        sys.exit(130)


if __name__ == "__main__":
    main()
