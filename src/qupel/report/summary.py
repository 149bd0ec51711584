"""RUN/summary.json and summary.md: the comparison that every run leaves, however it was started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from qupel.files import write_atomic, write_json
from qupel.report import tables
from qupel.report.tables import Result


def write_summary(results: Sequence[Result], folder: Path, one: bool = False) -> None:
    """one: training in one place, not a federation. Without test data there is nothing to compare, and no summary."""
    if any("test" not in r["lines"][-1] for r in results):
        return
    rows = tables.rows(results)
    head, body = tables.training_table(rows) if one else tables.federation_table(rows)
    note = results[0]["data_note"]
    said = "" if one else tables.sentence(rows, max(max(r.model_bytes, r.upload_bytes) for r in rows)) + "\n"
    write_json(folder / "summary.json", [asdict(r) for r in rows])
    write_atomic(folder / "summary.md", tables.markdown(head, body) + (f"\n{note}\n" if note else "") + f"\n{said}")
