"""Figures, drawn without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qupel.errors import UserError


def split_picture(counts: np.ndarray, labels: Sequence[str], path: Path) -> None:
    """Clients x classes: the area of a dot is the number of training samples."""
    from matplotlib.figure import Figure

    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise UserError(f"cannot draw {path}: allowed are .png, .svg and .pdf")
    clients, classes = counts.shape
    figure = Figure(figsize=(1.2 + 0.45 * classes, 1 + 0.24 * clients), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    i, c = np.nonzero(counts)
    axes.scatter(c, i, s=140 * counts[i, c] / counts.max(), color="#3b6fb6")
    names = list(labels) or [str(k) for k in range(classes)]
    axes.set_xticks(range(classes), names, rotation=60 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(range(0, clients, max(1, clients // 20)))
    axes.invert_yaxis()
    axes.set(xlabel="class", ylabel="client", title="training samples per client and class")
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
