"""RUN/summary.json and summary.md: the comparison that every run leaves, however it was started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qupel.report import later, networks, tables
from qupel.report.forms import OVER, UNSEEN, gain_text
from qupel.report.measure import main_measure, told_metrics
from qupel.report.tables import Result
from qupel.util.files import write_atomic, write_json


def write_summary(results: Sequence[Result], folder: Path, one: bool = False) -> None:
    """one: training in one place, not a federation. Without test data there are no scores to compare, and no
    summary."""
    if any("test" not in r["lines"][-1] for r in results):
        return
    rows, measure = tables.rows(results), main_measure(results)
    head, body = tables.training_table(rows, measure) if one else tables.federation_table(rows, measure=measure)
    note = results[0]["data_note"]
    said = "" if one else tables.sentence(rows, measure)
    write_json(folder / "summary.json", tables.told_rows(results))
    gain = "" if one else gain_text(rows[0].label, measure)
    unseen = f"{UNSEEN}." if "unseen" in head else ""
    precision = ". ".join(dict.fromkeys(f"Quantized: {r['precision']}" for r in results if "precision" in r))
    more = [tables.markdown(*tables.metrics_table(results, one))] if told_metrics(results) else []
    over = f"{OVER}." if more and not one else ""
    words = map(tables.markdown_text, (note, said, gain, unseen, precision, tables.privacy(results)))
    late = later.with_late(results)
    joined = (tables.markdown(*later.table(late)), tables.markdown_text(later.legend(late))) if late else ()
    several = networks.with_networks(results)
    by = (tables.markdown(*networks.table(results)), tables.markdown_text(networks.legend(results))) if several else ()
    texts = (tables.markdown(head, body), *words, *more, over, *by, *joined)
    write_atomic(folder / "summary.md", "\n".join(f"{text.strip()}\n" for text in texts if text))
