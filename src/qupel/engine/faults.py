"""What went wrong in another process, as plain data, and raised again here: the one protocol of workers and ranks."""

from __future__ import annotations

import traceback
from typing import Any

from qupel.util.errors import UserError


def told(error: Exception) -> dict[str, Any]:
    """An error as JSON: the user's own, one of the disk, or a bug with its traceback."""
    if isinstance(error, UserError):
        return {"kind": "wrong", "text": str(error)}
    if isinstance(error, OSError):
        return {"kind": "disk", "error": [error.errno, error.strerror, error.filename and str(error.filename)]}
    return {"kind": "bug", "text": "".join(traceback.format_exception(error))}


def raise_told(answer: dict[str, Any], who: str, name_user_errors: bool = False) -> None:
    """Raise what `told` told, if it is that. name_user_errors: say who met the user's error, where they may differ."""
    kind = answer["kind"]
    if kind == "wrong":
        raise UserError(f"{who}: {answer['text']}" if name_user_errors else answer["text"])
    if kind == "disk":
        raise OSError(*answer["error"])
    if kind == "bug":
        raise RuntimeError(f"{who} failed:\n{answer['text']}")
