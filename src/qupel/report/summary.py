"""RUN/summary.json and summary.md: the comparison that every run leaves, however it was started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from qupel.report import tables
from qupel.report.forms import GAIN
from qupel.report.tables import Result
from qupel.util.files import write_atomic, write_json


def write_summary(results: Sequence[Result], folder: Path, one: bool = False) -> None:
    """one: training in one place, not a federation. Without test data or class labels there are no accuracies to
    compare, and no summary."""
    if not tables.labelled(results) or any("test" not in r["lines"][-1] for r in results):
        return
    rows = tables.rows(results)
    head, body = tables.training_table(rows) if one else tables.federation_table(rows)
    note = results[0]["data_note"]
    said = "" if one else tables.sentence(rows)
    write_json(folder / "summary.json", [asdict(r) for r in rows])
    gain = "" if one else GAIN.format(first=rows[0].label)
    precision = ". ".join(dict.fromkeys(f"Quantized: {r['precision']}" for r in results if "precision" in r))
    texts = (tables.markdown(head, body), *map(tables.markdown_text, (note, said, gain, precision)))
    write_atomic(folder / "summary.md", "\n".join(f"{text.strip()}\n" for text in texts if text))
