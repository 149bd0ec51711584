"""TensorBoard event files of a run, written while it goes: RUN/tensorboard/CELL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qupel.util.errors import UserError

if TYPE_CHECKING:
    from qupel.engine.rounds import Progress

# key of a line of metrics -> name on the board; by step, so that schemes with other rounds compare
SCALARS = {
    "train_loss": "loss/train",
    "train_loss_quantized": "loss/train quantized",
    "test_loss": "loss/test",
    "test": "accuracy/test",
    "validation": "accuracy/validation",
    "float_test": "accuracy/before quantization",
    "bits": "model/bits",
    "model_bytes": "model/bytes",
    "dead_centers": "model/dead centers",
}
# of every metric, over clients
OVER = {"mean": "mean", "weighted": "mean by test samples", "worst": "worst tenth", "spread": "spread"}


class Cell(Protocol):
    """One method on one seed, as `experiment.Cell`."""

    @property
    def name(self) -> str: ...


class Board:
    """Writes every evaluated round of every cell. A resumed cell writes a second file; TensorBoard shows the newer
    values of a step that was run twice."""

    def __init__(self, folder: Path, then: Callable[[Any, Progress], None]) -> None:
        """then: the watcher that is told next."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard needs TensorBoard: pip install 'qupel[tensorboard]'") from None
        self.folder, self.then, self.open_writer = folder, then, SummaryWriter
        self.writers: dict[str, Any] = {}

    def tell(self, cell: Cell, progress: Progress) -> None:
        self.then(cell, progress)
        if progress.line is None:
            return
        if cell.name not in self.writers:
            self.writers[cell.name] = self.open_writer(str(self.folder / cell.name))
        writer, line = self.writers[cell.name], progress.line
        over = line.get("over_clients", {})
        score = over["test"]["name"] if "test" in over else "accuracy"
        for key, name in SCALARS.items():
            if key in line:
                writer.add_scalar(name.replace("accuracy/", f"{score}/"), line[key], line["step"])
        for told in over.values():
            for key, name in OVER.items():
                writer.add_scalar(f"{told['name']}/{name}", told[key], line["step"])
        writer.flush()
        if progress.round == progress.rounds:
            writer.close()
