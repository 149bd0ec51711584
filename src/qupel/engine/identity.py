"""What a run began with besides its settings: the data themselves, and the packages that its bits depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qupel.util.errors import UserError, warn
from qupel.util.files import read_json, write_sealed
from qupel.util.machine import versions

RECORD = "identity.json"


def check_identity(folder: Path, name: str, data: str, other_versions: bool) -> None:
    """Compare with <folder>/identity.json, made here where there is none. Other data are another run; other versions
    may give other bits, and are taken where the user says so."""
    path = folder / RECORD
    here: dict[str, Any] = {"data": data, "versions": versions()}
    began = read_json(path) if path.exists() else None
    if began is None:
        write_sealed(path, here)
        return
    if began["data"] != data:
        raise UserError(f"{folder} began with other data ({name}); give it the same, or another --out")
    if began["versions"] != here["versions"]:
        then, now = (", ".join(f"{k} {v}" for k, v in each["versions"].items()) for each in (began, here))
        if not other_versions:
            raise UserError(
                f"{folder} began with {then}; here is {now}: add --other-versions to go on, maybe to other bits"
            )
        warn(f"{folder} began with {then}; going on with {now}")
        write_sealed(path, {**here, "before": [*began.get("before", []), began["versions"]]})
