"""What `qupel.fit` and `qupel.adapt` end with: models, numbers about them, and ways to look at them."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from qupel.core.codebook import Codebook, Plan
from qupel.core.layout import Layout
from qupel.data import sources
from qupel.data.batches import Transform, batch, chunks, generator
from qupel.data.partition import by_owner
from qupel.data.sources import Dataset
from qupel.deploy.about import About
from qupel.deploy.feed import described as fed
from qupel.deploy.formats import Format, suffix, write
from qupel.deploy.own import facts
from qupel.deploy.pack import bits_for
from qupel.deploy.packed import Rest, known_as
from qupel.engine.checkpoint import Checkpoints, Since
from qupel.engine.choice import Choice
from qupel.engine.fingerprint import of_job
from qupel.engine.identity import check_identity
from qupel.engine.job import Job
from qupel.engine.rounds import Engine, Failed, Finished, Progress
from qupel.engine.rounds import metrics as line_of
from qupel.run.adapt import FILE, Origin, adapt_clients, write_origin
from qupel.run.config import Config, MethodConfig, SplitConfig
from qupel.run.folder import result_file, write_result
from qupel.run.jobs import Cell
from qupel.tasks.judge import CALIBRATION_SAMPLES, EVALUATION_BATCH, Judge
from qupel.tasks.task import Batch, call
from qupel.tasks.trees import over
from qupel.util.errors import UserError
from qupel.util.files import read_json, write_sealed
from qupel.util.terminal import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 30  # clients that a notebook is shown


@dataclass(frozen=True, repr=False)
class Fit:
    """What a federation ends with: a model and a codebook per client, the global model, and the metrics by round.

    BatchNorm's statistics are measured on each client's training data, the global model's on all clients'.
    `unseen`: the same of the clients that were kept out of training and adapted afterwards.

    >>> import numpy as np, qupel
    >>> from torch import nn
    >>> x, y = np.random.default_rng(0).random((8, 4), np.float32), np.arange(8) % 2
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> done = qupel.fit(net, [(x, y, x, y)] * 2, bits=[2, 3], rounds=5)
    >>> done.quantized
    [{'2.weight': 2}, {'2.weight': 3}]
    >>> [row["bits"] for row in done.table()]
    [2.0, 3.0]
    """

    models: list[nn.Module]
    codebooks: list[Codebook]
    global_model: nn.Module
    metrics: list[dict[str, Any]]
    names: list[str]
    engine: Choice  # whether clients were trained in stacks, and why
    about: About  # what every client's file says
    origin: Origin  # what clients that come later start from
    transforms: Sequence[Transform] = ()  # one a client, where inputs are standardized by each client's own data
    budgets: Sequence[int | None] = ()  # bytes that a client's file may have
    before: Sequence[float | None] = ()  # of adapted clients: the score of the global model as it is
    unseen: Fit | None = None
    run: dict[str, Any] = field(default_factory=dict)  # the config and the result, as a run folder has them

    @property
    def test(self) -> list[float]:
        """Each client's test score at the end: what it is judged by, else accuracy for labels, else the loss."""
        return list(self.metrics[-1]["clients"]["test"])

    @property
    def quantized(self) -> list[dict[str, int]]:
        """Each client's quantized layers and their bits; everything else is full precision."""
        return [{slot.name: bits_for(len(c)) for slot, c in codebook} for codebook in self.codebooks]

    @property
    def left(self) -> list[dict[str, str]]:
        """Each client's parameters at full precision, and why they are."""
        pairs = zip(self.models, self.codebooks, strict=True)
        return [Layout.of(model).left(slot.name for slot in codebook.slots) for model, codebook in pairs]

    # --- files ---

    def save(
        self, folder: str | Path, to: Format = "packed", rest: Rest = "fp32", prefix: str = "client"
    ) -> list[Path]:
        """Write every client's model and return the files.

        to    "packed": read by `load`; the command line runs it if the network is one of `qupel models`.
              "onnx": any network, runs without its code; "coreml": on Apple's devices
        rest  "fp16": what is not quantized in half precision
        """
        paths = [Path(folder) / f"{prefix}-{i:03d}{suffix(to)}" for i in range(len(self.models))]
        for i, path in enumerate(paths):
            self.save_one(i, path, to, rest)
        return paths

    def save_one(self, client: int, path: str | Path, to: Format = "packed", rest: Rest = "fp32") -> int:
        """Write one client's model; its bytes."""
        scores = self.metrics[-1].get("clients", {}).get("test") or [None] * len(self.models)
        allowed = self.budgets[client] if self.budgets else None
        told = {} if scores[client] is None or not self.about.classes else {"test": round(scores[client], 6)}
        told |= {"budget": allowed} if allowed is not None and self.codebooks[client] else {}
        about = replace(self.about, client=plain(self.names[client]), extra={**self.about.extra, **told})
        if self.transforms:
            about = replace(about, **self.transforms[client].scale)
        written = write(path, bare(self.models[client]), self.codebooks[client], about, to, rest)
        if to == "packed" and "budget" in told and written > told["budget"]:
            raise Failed(f"{self.names[client]}: its file has {written} bytes, over its budget of {allowed}")
        return written

    def export(self, to: Format, folder: str | Path, rest: Rest = "fp32") -> list[Path]:
        """Every client's model in another format: `done.export("onnx", "models")`."""
        return self.save(folder, to, rest)

    def report(self, folder: str | Path) -> Path:
        """The page, figures and tables of `qupel report`; returns the page."""
        from qupel.report.write import write_report  # with matplotlib and scipy, which take their time to load

        if "result" not in self.run:
            raise UserError("report: there is one of a federation, not of adapted clients; see table() and plot()")
        result = dict(self.run["result"])
        with tempfile.TemporaryDirectory(prefix="qupel-report-") as made:
            here = Path(made) / "fit"
            done = result_file(here, Cell(result["label"], result["seed"]))
            result["files"] = [path.stat().st_size for path in self.save(done.parent / "models")]
            write_sealed(here / "config.json", self.run["config"])
            write_result(done, result)
            return write_report([here], Path(folder))

    # --- later ---

    def adapt(self, clients: Any, **options: Any) -> Fit:
        """`qupel.adapt` from this federation: small personal models for clients that were not there."""
        from qupel.run.api import adapt

        return adapt(self, clients, **options)

    # --- to look at ---

    def table(self) -> list[dict[str, Any]]:
        """A row a client: its name, mean bits of a quantized weight, bytes of its model, test score; of adapted clients
        also the score of the global model as it is. `pandas.DataFrame(done.table())` takes it."""
        told = self.metrics[-1]["clients"]
        rows = [
            {"client": name, "bits": bits, "bytes": size, "test": test}
            for name, bits, size, test in zip(self.names, told["bits"], told["bytes"], told["test"], strict=True)
        ]
        return [{**row, "global": self.before[i]} for i, row in enumerate(rows)] if self.before else rows

    def plot(self) -> Figure:
        """Test score and training losses by round, as a matplotlib figure."""
        from qupel.report.figures import curves_picture

        if "ipykernel" in sys.modules:  # a notebook shows figures once this is loaded
            import matplotlib.pyplot  # noqa: F401
        return curves_picture(self.metrics, "accuracy, %" if self._labelled else "test loss")

    @property
    def _labelled(self) -> bool:
        return self.origin.job.data.classes is not None

    def score(self, value: float | None) -> str:
        """A test score as text: an accuracy in percent, or a loss."""
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self._labelled else f"{value:.4g}"

    def __repr__(self) -> str:
        rows, last = self.table(), self.metrics[-1]
        sizes, bits = [row["bytes"] for row in rows], sorted({round(row["bits"], 1) for row in rows})
        what = "adapted" if self.before else f"{last['round']} rounds"
        text = f"Fit: {len(rows)} client{'s' * (len(rows) != 1)}, {plain(self.origin.label)}, {what}"
        scores = [row["test"] for row in rows if row["test"] is not None]
        if scores:
            worst = min(scores) if self._labelled else max(scores)
            text += f"; test {self.score(sum(scores) / len(scores))} (worst {self.score(worst)})"
        known = [score for score in self.before if score is not None]
        if known:
            text += f", the global model {self.score(sum(known) / len(known))}"
        text += f"; {' and '.join(f'{b:g}' for b in bits)} bits, {sum(sizes) / len(sizes) / 1e3:.1f} kB a model"
        return text if self.unseen is None else f"{text}\nunseen: {self.unseen!r}"

    def _repr_html_(self) -> str:
        rows = self.table()
        shown = [{**row, "bits": f"{row['bits']:g}", "bytes": f"{row['bytes']:,}"} for row in rows[:MOST_ROWS]]
        for row in shown:
            row |= {key: self.score(row[key]) for key in ("test", "global") if key in row}
        head = "".join(f"<th>{escape(key)}</th>" for key in shown[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(plain(cell))}</td>" for cell in row.values()) + "</tr>" for row in shown
        )
        more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
        said = escape(repr(self)).replace("\n", "<br>")
        return f"<p>{said}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


# --- made of a job that has run ---


def collect(job: Job, engine: Engine, finished: Finished, choice: Choice, origin: Origin) -> Fit:
    judge, models, codebooks = Judge(job.module, job.loss), [], []
    for client in range(len(job.parts)):
        deployed = engine.deployed(job.rounds - 1, finished.w, client)
        models.append(copy.deepcopy(judge.load(deployed.x, job.calibration(client))).cpu())
        codebooks.append(deployed.cpu().codebook)
    whole = copy.deepcopy(judge.load(finished.w[0], _everybody(job))).cpu()
    about = _about(job, whole, origin.label)
    if origin.standardize == "auto" and job.standardized:
        for model in (*models, whole):
            model.register_forward_pre_hook(Unit(job.transform))
    return Fit(models, codebooks, whole, finished.lines, list(job.names), choice, about, origin, job.transforms)


@dataclass(frozen=True)
class Unit:
    """Inputs of a model as its clients have them -> as it was trained on them: a hook before `forward`."""

    transform: Transform

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.transform.apply(inputs[0]), *inputs[1:])


def bare(model: nn.Module) -> nn.Module:
    """The model as it was trained, for files, which say themselves how inputs are scaled."""
    if not any(isinstance(hook, Unit) for hook in model._forward_pre_hooks.values()):
        return model
    model = copy.deepcopy(model)
    model._forward_pre_hooks.clear()
    return model


def _everybody(job: Job) -> Iterator[Batch]:
    """Training data of all clients together for the global model's BatchNorm, drawn from its own address."""
    rows = np.concatenate([p.train_rows for p in job.parts])
    some = generator(job.seed, "calibrate all").permutation(len(rows))[:CALIBRATION_SAMPLES]
    batches = -(-len(some) // EVALUATION_BATCH)
    size = -(-len(some) // batches)
    if not job.transforms:
        yield from chunks(job.data.train.take(rows[some]), size, job.transform)
        return
    owner = np.repeat(np.arange(len(job.parts)), [len(p.train_rows) for p in job.parts])  # (rows,)
    for start in range(0, len(some), size):
        part = some[start : start + size]
        each = [batch(job.data.train, rows[part][owner[part] == k], job.transforms[k]) for k in np.unique(owner[part])]
        yield Batch(*over(lambda *leaf: torch.cat(leaf), *map(tuple, each)))


def _about(job: Job, module: nn.Module, label: str) -> About:
    """What the files say: enough to feed the model, and its name where it is one of ours. module: on the CPU."""
    data, shape = job.data, job.data.shape
    first = over(lambda leaf: leaf.cpu(), data.train.read(slice(0, 1)).inputs)
    with torch.inference_mode():
        inputs = job.transform_of(0).apply(first)
        outputs = call(module, inputs)
    classes = outputs.shape[1] if data.classes is not None and isinstance(outputs, Tensor) and outputs.ndim == 2 else 0
    how = "client" if job.transforms else "shared"
    told = {"standardize": how} if job.standardized else {}
    return About(
        model=known_as(module, shape, classes) if classes else "",
        **fed(inputs),
        classes=classes,
        labels=data.labels if len(data.labels) == classes else (),
        mean=data.mean,
        std=data.std,
        extra={"method": label, "seed": job.seed, **told},
    )


def adapted_fit(
    origin: Origin,
    data: Dataset,
    plans: Sequence[Plan],
    sizes: Sequence[int] | None,
    strict: bool,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Fit:
    """data: of these clients, its owners. strict: a client whose steps diverge is an error; else it stays as it was."""
    names = list(data.owners)
    done = adapt_clients(origin, data, by_owner(data), plans, names, watch)
    if strict and done.faults:
        client, why = next(iter(done.faults.items()))
        raise Failed(f"{names[client]}: {why}; its data may be of another kind than the federation's")
    job, told, judge = done.job, done.told(), Judge(done.job.module, done.job.loss)
    models = [copy.deepcopy(judge.load(m.x, job.calibration(i))) for i, m in enumerate(done.models)]
    whole = copy.deepcopy(judge.load(origin.w[0], _everybody(job)))
    line = line_of(job, job.rounds - 1, done.judged, Since(refused=list(done.faults.values())), 0, 0)
    line["seconds"] = told["seconds"]
    about = _about(job, whole, origin.label)
    if origin.model:  # as the run's own files name it
        about = replace(about, **facts(origin.model, dict(origin.args or {})))
    if origin.standardize == "auto" and job.standardized:
        for model in (*models, whole):
            model.register_forward_pre_hook(Unit(job.transform))
    return Fit(
        models,
        [m.codebook for m in done.models],
        whole,
        [line],
        names,
        Choice(False, "each client adapts for itself"),
        about,
        origin,
        transforms=job.transforms,
        budgets=sizes or (),
        before=told["global"],
        run={} if strict else {"unseen": told},
    )


# --- its run directory ---


def described(job: Job, label: str) -> dict[str, Any]:
    """The config of a fit, as `qupel run` writes it."""
    split = SplitConfig(kind="one" if len(job.parts) == 1 else "groups", clients=len(job.parts))
    names = ("local_steps", "batch", "sample", "weighted", "evaluate_every", "evaluate_sample", "upload_bound")
    same: dict[str, Any] = {name: getattr(job, name) for name in names}
    own = {label: MethodConfig(phases=tuple(job.phases))}
    config = Config(seeds=(job.seed,), split=split, rounds=job.rounds, methods=own, **same)
    described: dict[str, Any] = json.loads(config.model_dump_json())
    described["data"]["name"], described["model"]["name"] = job.data.name, ""
    return described


def open_out(out: Path, job: Job, cell: Cell) -> tuple[Path, Checkpoints]:
    """The run directory of a fit: what `qupel run` writes first. A fit of other settings is refused."""
    key, known = of_job(job), out / "config.json"
    if not known.exists():
        write_sealed(known, {**described(job, cell.label), "fingerprint": key})
    check_identity(out, job.data.name, sources.identity(job.data), other_versions=True)
    if read_json(known).get("fingerprint") != key:
        raise UserError(f"{out} was made by a run with other settings; give another out, or the same settings")
    folder = result_file(out, cell).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder, Checkpoints(folder, key)


def leave(out: Path, cell: Cell, found: Fit) -> Fit:
    """What `qupel run` leaves: the cell's models, the shared one, the result, and the summary."""
    from qupel.report.runs import read_result
    from qupel.report.summary import write_summary  # with scipy, which takes its time to load

    done, result = result_file(out, cell), found.run["result"]
    result["files"] = [path.stat().st_size for path in found.save(done.parent / "models")]
    if found.unseen is not None:
        saved = found.unseen.save(done.parent / "models", prefix="unseen")
        result["unseen"]["files"] = [path.stat().st_size for path in saved]
    write_origin(done.parent / FILE, found.origin)
    write_result(done, result)
    if result["classes"] is not None:
        write_summary([read_result(done)], out, one=len(found.models) == 1)
    return found
