"""Run a model file, packed or ONNX, on images and tables: one way in, whatever the format."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qupel.data import checks, npz
from qupel.data.batches import Transform
from qupel.deploy import sessions
from qupel.deploy.about import About
from qupel.deploy.file import load
from qupel.deploy.header import FormatError
from qupel.deploy.memory import peak, reset_peak, resident
from qupel.deploy.own import NOTHING, Allowed
from qupel.deploy.runtime import keep_packed as stay_packed
from qupel.deploy.sandbox import Sandbox
from qupel.deploy.timing import Stretch, stretch
from qupel.tasks.task import call
from qupel.util.errors import UserError

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_NPZ_NAMES = ("inputs", "test_inputs", "x_test", "x")


@dataclass(frozen=True, eq=False)
class Model:
    """A model file that is ready to run.

    run     inputs (n, ...) as the network takes them, already normalized: one array, or several in the order of
            `about.takes` -> outputs (n, classes)
    memory  (bytes of the process that runs it before it was opened, the most since)
    timed   (batch, seconds) -> what runs on zeros cost, measured in that process
    """

    about: About
    kind: str  # "packed" or "onnx"
    bytes: int
    run: Callable[..., np.ndarray]
    memory: Callable[[], tuple[int, int]]
    timed: Callable[[int, float], Stretch]

    def transform(self) -> Transform:
        """From inputs as they are stored to what the model takes."""
        mean, std = self.about.mean, self.about.std
        return Transform(torch.tensor(mean), torch.tensor(std)) if mean else Transform()

    def ready(self, inputs: torch.Tensor) -> np.ndarray:
        """One input as it is stored -> what the model takes."""
        return self.transform().apply(inputs).contiguous().numpy().astype(self.about.dtype, copy=False)


def open_model(
    path: str | os.PathLike[str],
    *,
    keep_packed: bool = False,
    threads: int | None = None,
    trust: bool = False,
    allowed: Allowed = NOTHING,
) -> Model:
    """A packed file (of a network of ours, or of the one that is allowed) or an ONNX file.

    keep_packed  weights are decoded in every run: less memory, more time
    threads      of ONNX Runtime; torch's are those of the process
    trust        an ONNX file with any operators and sizes, in this process; without it one of networks as we and torch
                 export them (`graphs`), in a process of its own with little memory and time (`sandbox`)
    allowed      which network of the user's own a packed file may name (`own`)
    """
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    reset_peak()
    before = resident()
    if str(path).endswith(".onnx"):
        if not trust:
            return _confined(path, size, keep_packed, threads)
        running = sessions.session(path, keep_packed=keep_packed, threads=threads)
        about = sessions.read_about(running)
        return _here(about, "onnx", size, lambda *x: sessions.run(running, _typed(about, x)), before)
    packed = load(path)
    module = stay_packed(packed, allowed=allowed) if keep_packed else packed.model(allowed)
    names = [i.name for i in packed.about.inputs]

    def run(*inputs: np.ndarray) -> np.ndarray:
        given = [torch.from_numpy(x) for x in _typed(packed.about, inputs)]
        with torch.inference_mode():
            return call(module, dict(zip(names, given, strict=True)) if any(names) else tuple(given)).numpy()

    return _here(packed.about, "packed", size, run, before)


def _here(about: About, kind: str, size: int, run: Callable[..., np.ndarray], before: int) -> Model:
    def timed(batch: int, seconds: float) -> Stretch:
        return stretch(partial(run, *zeros(about, batch)), seconds)

    return Model(about, kind, size, run, lambda: (before, peak()), timed)


def _confined(path: str | os.PathLike[str], size: int, keep_packed: bool, threads: int | None) -> Model:
    box = Sandbox(path)
    try:
        about = sessions.about_of(box.open(keep_packed=keep_packed, threads=threads), path)
    except FormatError:
        box.close()
        raise

    def timed(batch: int, seconds: float) -> Stretch:
        return box.stretch(zeros(about, batch), seconds)

    return Model(about, "onnx", size, lambda *x: box.run(*_typed(about, x)), box.memory, timed)


def _typed(about: About, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Inputs of the types that the file tells; float32 where it does not."""
    types = [i.dtype for i in about.takes] or ["float32"] * len(inputs)
    if len(types) != len(inputs):
        raise UserError(f"the model takes {len(types)} inputs ({', '.join(about.input_names)}), not {len(inputs)}")
    return [np.ascontiguousarray(x, dtype) for x, dtype in zip(inputs, types, strict=True)]


# --- inputs ---


def read_inputs(path: str | os.PathLike[str], model: Model) -> tuple[list[str], np.ndarray]:
    """Names and normalized inputs (n, *input_shape) from an image, a folder of images, a .npz or a .csv file."""
    path, shape = Path(path), model.about.input_shape
    if model.about.inputs:
        names_needed = ", ".join(model.about.input_names)
        raise UserError(f"the model takes several inputs ({names_needed}); `open_model` runs it from Python")
    if not shape:
        raise UserError("the model file does not say what its inputs look like (about.input_shape)")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGES)
        if not files:
            raise UserError(f"{path}: no images in this folder; known are {', '.join(sorted(_IMAGES))}")
        names, values = [p.name for p in files], np.stack([_image(p, shape) for p in files])
    elif not path.is_file():
        raise UserError(f"{path} cannot be read: no such file or folder")
    elif path.suffix.lower() == ".npz":
        values = _npz(path, shape)
        names = [f"row {i}" for i in range(len(values))]
    elif path.suffix.lower() == ".csv":
        values = _csv(path, shape)
        if model.about.mean and "standardize" not in model.about.extra:  # made for pixels: numbers from 0 to 255
            values = values / np.float32(255)
        names = [f"row {i}" for i in range(len(values))]
    else:
        names, values = [path.name], _image(path, shape)[None]
    return names, model.ready(torch.from_numpy(values))


def _image(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 (C, H, W), scaled to the size that the model takes."""
    from PIL import Image

    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(f"{path}: the model takes inputs of shape {shape}, not images; give a .npz or .csv file")
    try:
        with Image.open(path) as image:
            ready = image.convert("L" if shape[0] == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not an image that can be read ({error})") from None
    if ready.size != (shape[2], shape[1]):
        ready = ready.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
    pixels = np.asarray(ready, np.uint8)
    return pixels[None].copy() if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()


def _npz(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    def wanted(held: list[str]) -> list[str]:
        found = next((n for n in _NPZ_NAMES if n in held), held[0] if len(held) == 1 else None)
        if found is None:
            raise UserError(f"holds {', '.join(held[:20])}; needed is one of {', '.join(_NPZ_NAMES)}")
        return [found]

    ((name, held),) = npz.read(path, wanted).items()
    return _shaped(path, checks.inputs(f"{path}: {name}", held).numpy(), shape)


def _csv(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A row is an input, flattened; a first row that is not numbers is taken for names."""
    rows = []
    try:
        with path.open(newline="") as file:
            for number, cells in enumerate(csv.reader(file), 1):
                if not cells:
                    continue
                try:
                    rows.append([float(cell) for cell in cells])
                except ValueError:
                    if number > 1:
                        raise UserError(f"{path} line {number}: not numbers: {','.join(cells)[:40]!r}") from None
                if rows and len(rows[-1]) != len(rows[0]):
                    raise UserError(f"{path} line {number}: {len(rows[-1])} numbers, the first row has {len(rows[0])}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a readable table ({error})") from None
    return _shaped(path, checks.inputs(str(path), np.array(rows, np.float32)).numpy(), shape)


def _shaped(path: Path, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values[0].size != int(np.prod(shape)):
        raise UserError(f"{path}: inputs of shape {values.shape[1:]}; the model takes {shape}")
    return values.reshape(len(values), *shape)


# --- outputs ---


def probabilities(outputs: np.ndarray, classes: int = 0) -> np.ndarray:
    """Softmax of the outputs (n, classes); 0: any number of classes."""
    if outputs.ndim != 2 or outputs.shape[1] != (classes or outputs.shape[1]) or not outputs.shape[1]:
        raise UserError(f"the model has outputs of shape {outputs.shape[1:]}; needed is one number for each class")
    e = np.exp(outputs - outputs.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def accuracy(model: Model, inputs: torch.Tensor, targets: torch.Tensor, batch: int = 256) -> float:
    """The fraction of samples whose largest output is their label; inputs as they are stored, not normalized."""
    right, classes = 0, int(targets.max()) + 1
    for start in range(0, len(inputs), batch):
        outputs = model.run(model.ready(inputs[start : start + batch]))
        if outputs.ndim != 2 or outputs.shape[1] < classes:
            raise UserError(f"the data has {classes} classes; the model has outputs of shape {outputs.shape[1:]}")
        right += int((outputs.argmax(1) == targets[start : start + batch].numpy()).sum())
    return right / len(inputs)


def zeros(about: About, batch: int) -> list[np.ndarray]:
    return [np.zeros((batch, *i.shape), i.dtype) for i in about.takes]
