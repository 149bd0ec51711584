"""Finished cells that outlive their run directory: kept as small files, to be committed, and taken over by later runs.

FOLDER/config.json, ...                    as in RUN, a comparison's run directories and trials included
FOLDER/cells/<label>-s<seed>/result.json   with every client's scores at the end only; scores.npz where there are many
                                           clients. No models, no checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qupel.engine import scores
from qupel.run import adapt
from qupel.run.config import Config
from qupel.run.folder import grown, identity, read_config, result_file, write_result
from qupel.run.jobs import Cell, build_job, cells, fingerprint
from qupel.util.errors import UserError, warn
from qupel.util.files import Damaged, check_files, read_json, write_atomic, write_json, write_sealed
from qupel.util.machine import versions

ONCE, JOINED = ("identity.json", "reproduce.json", "compare.json"), ("search.json", "failed.json")
Result = dict[str, Any]
Known = Mapping[str, Sequence[Path]]  # fingerprint -> results


def keep(run: Path, folder: Path) -> int:
    """Copy all finished cells of a run, or of a comparison, without models. What is there stays: methods and seeds add
    up, other settings are refused. Returns how many cells the run has."""
    found = sorted(run.rglob("cells/*/result.json"))
    if not found:
        raise UserError(f"{run} has no finished cell to keep (cells/*/result.json)")
    for home in dict.fromkeys([run, *(path.parents[2] for path in found)]):
        _keep_beside(home, folder / home.relative_to(run))
    for path in found:
        result, target = _checked(path), folder / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        scores.copy(path.parent, target.parent)
        *before, last = result["lines"]
        lines = [*({k: v for k, v in line.items() if k != "clients"} for line in before), last]
        write_result(target, {**result, "lines": lines})
    return len(found)


def _keep_beside(home: Path, target: Path) -> None:
    """What a run directory says of all its cells."""
    target.mkdir(parents=True, exist_ok=True)
    if (home / "config.json").is_file():
        config = grown(target, read_config(home))
        write_sealed(target / "config.json", json.loads(config.model_dump_json()))
    for name in (name for name in ONCE if (home / name).is_file()):
        write_atomic(target / name, (home / name).read_bytes())
    for name in (name for name in JOINED if (home / name).is_file()):
        before = read_json(target / name) if (target / name).is_file() else {}
        write_json(target / name, {**before, **read_json(home / name)})


def _checked(path: Path) -> Result:
    """A result, if it and all that lies beside it are what they were."""
    result: Result = read_json(path)
    check_files(path.parent, result.pop("checksums", {}))
    return result


def take_over(config: Config, out: Path, others: Sequence[Path]) -> None:
    """Take the cells that one of these folders has, anywhere in it, done with the same settings on the same data, under
    whatever label. Other versions of the packages may have made them: a line says so."""
    if known := _finished(others):
        taken = [_adopt(config, cell, out, known) for cell in cells(config) if not result_file(out, cell).exists()]
        here = versions()
        made = [{k: r["machine"].get(k) for k in here} for r in taken if r is not None and "machine" in r]
        for then in (told for k, told in enumerate(made) if told != here and told not in made[:k]):
            words = (", ".join(f"{k} {v}" for k, v in each.items()) for each in (then, here))
            warn(f"{made.count(then)} cells taken over were made with {next(words)}; here is {next(words)}")


def _finished(others: Sequence[Path]) -> Known:
    known: dict[str, list[Path]] = {}
    for path in (p for other in others for p in sorted(other.rglob("cells/*/result.json"))):
        try:
            known.setdefault(read_json(path).get("fingerprint", ""), []).append(path)
        except Damaged as e:
            warn(f"{e}; it is not taken over")
    return known


def _adopt(config: Config, cell: Cell, out: Path, known: Known) -> Result | None:
    """Take one cell over, with its models where they are there; None: nobody has it. One of the same label is the very
    same cell; of another's it is told whose it was."""
    done, key = result_file(out, cell), fingerprint(config, cell, build_job(config, cell, check=False).phases)
    for path in sorted(known.get(key, ()), key=lambda p: p.parent.name != cell.name):
        try:
            result = _checked(path)
        except Damaged as e:
            warn(f"{e}; {path.parent.name} is not taken over")
            continue
        if result.get("data_identity", identity(config)) != identity(config):
            continue
        done.parent.mkdir(parents=True, exist_ok=True)
        if (path.parent / "models").exists():
            shutil.copytree(path.parent / "models", done.parent / "models", dirs_exist_ok=True)
        for name in ("metrics.jsonl", adapt.FILE):
            if (path.parent / name).exists():
                shutil.copy(path.parent / name, done.parent)
        scores.copy(path.parent, done.parent)
        whose = {} if result["label"] == cell.label else {"taken_from": f"{path.parents[2].name}/{path.parent.name}"}
        write_result(done, {**result, "label": cell.label, **whose})
        return result
    return None
