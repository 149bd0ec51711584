"""Checkpoints of a run: a folder per checkpoint, complete or absent, and a log of metrics that fits it.

checkpoints/round-000040/   meta.json   rounds done, the job's fingerprint, what the next line of metrics needs
                            w.bin       the server's model, float32
                            shard-*.bin, shard-*.json   the clients' states (`store`)
metrics.jsonl               one line per evaluated round
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qupel.errors import UserError
from qupel.files import new_folder, write_atomic, write_json


@dataclass(frozen=True)
class Since:
    """What the rounds since the last line of metrics leave for the next one."""

    losses: list[float] = field(default_factory=list)  # f(x)
    refused: list[str] = field(default_factory=list)
    quantized_losses: list[float] = field(default_factory=list)  # f(Q(x))


class Checkpoints:
    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder / "checkpoints"
        self.log = folder / "metrics.jsonl"
        self.fingerprint = fingerprint

    def save(self, rounds: int, w: Tensor, since: Since, save_states: Callable[[Path], None]) -> None:
        """Write the checkpoint after `rounds` rounds; older ones go when it is complete."""
        final = self.folder / f"round-{rounds:06d}"
        if final.exists():
            return
        with new_folder(final) as folder:
            save_states(folder)
            write_atomic(folder / "w.bin", w.cpu().numpy().tobytes())
            meta = {"rounds": rounds, "fingerprint": self.fingerprint, **asdict(since)}
            write_json(folder / "meta.json", meta)
        for other in self.folder.iterdir():
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def newest(self) -> Path | None:
        found = sorted(self.folder.glob("round-*")) if self.folder.exists() else []
        return found[-1] if found else None

    def load(self, size: int) -> tuple[int, Tensor, Since, Path] | None:
        """(rounds done, w, since, folder with the states) of the newest checkpoint, None if there is none."""
        folder = self.newest()
        if folder is None:
            return None
        meta = json.loads((folder / "meta.json").read_text())
        if meta["fingerprint"] != self.fingerprint:
            raise UserError(f"{folder} was made by a run with other settings; give another --out, or the same settings")
        w = torch.from_numpy(np.fromfile(folder / "w.bin", dtype=np.float32))
        if len(w) != size:
            raise UserError(f"{folder} holds a model of {len(w)} parameters, this one has {size}")
        return meta["rounds"], w, Since(*(meta.get(f.name, []) for f in fields(Since))), folder

    def append(self, line: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self, rounds: int, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The metrics of the first `rounds` rounds; later lines, of rounds that will run again, are dropped.

        A log that does not exist yet begins with the lines `before`. The run takes its folder over: what a killed one
        left half-written is taken away.
        """
        for temporary in self.log.parent.glob(".*.tmp"):
            temporary.unlink(missing_ok=True)
        kept = [] if self.log.exists() else list(before)
        for text in self.log.read_text().splitlines() if self.log.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break  # cut short by a crash
            if line["round"] <= rounds:
                kept.append(line)
        write_atomic(self.log, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
