"""What commands share on a terminal: consoles, text from outside, tables of numbers, progress, requests to stop."""

from __future__ import annotations

import codecs
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN = {"±": "+-", "·": ".", "…": "...", "−": "-", "–": "-", "×": "x", "≤": "<=", "≥": ">=", "→": "->"}


def _plainly(e: UnicodeError) -> tuple[str, int]:
    """What a terminal cannot show, in letters that it can: a run does not end for want of a sign."""
    assert isinstance(e, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in e.object[e.start : e.end]), e.end


codecs.register_error("qupel-plain", _plainly)


def speak_plainly() -> None:
    """Let the standard streams do so."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="qupel-plain")


def leave_quietly() -> NoReturn:
    """End as a program whose reader has gone: nothing more is said, also not when Python closes its streams."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    sys.exit(141)  # 128 + SIGPIPE


out = Console()
err = Console(stderr=True)


def plain(text: object, most: int = 300) -> str:
    """Text that came from outside (a file, a config, a client, the system) as one line of at most `most` characters
    that only prints: control characters, line ends and bidirectional marks are shown as escapes."""
    line = str(text)
    line = line if len(line) <= most else line[: most - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def shown(text: object, most: int = 300) -> str:
    """The same for a string with markup, as `Console.print` takes: brackets in it mean themselves."""
    return escape(plain(text, most))


def number_table(head: list[str], body: list[list[str]], title: str = "") -> Table:
    """A table that fits 80 columns: no frame, one blank between columns. The first column is text and may wrap, the
    rest are numbers and never do; a header wider than its numbers breaks at its blanks."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    head, body = [plain(name) for name in head], [[plain(cell) for cell in cells] for cells in body]
    for k, name in enumerate(head):
        if k and len(name) > max(len(cells[k]) for cells in body):
            name = name.replace(" ", "\n")
        table.add_column(Text(name), justify="right" if k else "left", no_wrap=k > 0)
    for cells in body:
        table.add_row(*map(Text, cells))
    return table


class Watcher:
    """A progress bar on a terminal, one line that changes in a notebook, plain lines elsewhere.

    rounds: in all; 0: as many as the first that is told says. lines: whether there are plain lines; live: a bar.
    """

    def __init__(self, rounds: int, lines: bool = True, live: bool = True) -> None:
        self.rounds, self.lines = rounds, lines
        self.live, self.notebook = live and out.is_terminal, live and out.is_jupyter
        self.done: dict[str, int] = {}
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()]
        self.bar = Progress(*columns, TimeRemainingColumn(), console=out, transient=True)

    def __enter__(self) -> Watcher:
        if self.live:
            self.bar.start()
            self.task = self.bar.add_task("starting", total=self.rounds or None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()
        if self.notebook and self.done:
            print()

    def both(self, cell: Any, watch: Callable[[Any], None]) -> Callable[[Any], None]:
        """What tells here and there."""

        def tell(progress: Any) -> None:
            self.tell(cell, progress)
            watch(progress)

        return tell

    def tell(self, cell: Any, progress: Any) -> None:
        self.done[cell.name] = progress.round
        line = progress.line
        for refusal in progress.refused:
            err.print(f"round {progress.round}: refused {shown(refusal)}", highlight=False)
        for note in progress.notes:
            err.print(f"round {progress.round}: {shown(note, 1000)}", highlight=False, soft_wrap=True)
        if self.live or self.notebook:
            loss = losses_text(progress.loss, progress.loss_quantized, 3)
            text = f"{cell.label}, seed {cell.seed}{loss}{_score_text(line, 1)}"
            done, total = sum(self.done.values()), self.rounds or progress.rounds
            if self.live:
                self.bar.update(self.task, completed=done, total=total, description=shown(text, 46))
            else:
                print(f"\r{plain(text, 60):60} {done}/{total}", end="", flush=True)
        elif line and self.lines:
            sent = f"  {line['upload_bytes'] / 1e6:.2f} MB sent per client" if line["upload_bytes"] else ""
            head = f"{shown(cell.label)}, seed {cell.seed}: round {progress.round}/{progress.rounds}"
            loss = losses_text(line.get("train_loss", math.nan), line.get("train_loss_quantized", math.nan))
            out.print(f"{head}{loss}{_score_text(line, 2, '  test')}{privacy_text(line)}{sent}", highlight=False)
        if line and progress.round == progress.rounds and line.get("never_took_part"):
            err.print(f"{shown(cell.label)}, seed {cell.seed}: {never_text(line)}", highlight=False)


def _score_text(line: dict[str, Any] | None, digits: int, before: str = " ") -> str:
    """The mean score of a line of metrics, where there is one: a share in percent, another number as it is."""
    if not line or "test" not in line:
        return ""
    score, told = line["test"], line.get("over_clients", {}).get("test")
    percent = told["percent"] if told else score != line.get("test_loss")
    return f"{before} {100 * score:.{digits}f} %" if percent else f"{before} {score:.4g}"


def losses_text(x: float, quantized: float, digits: int = 4) -> str:
    """The training losses that were evaluated: f(x), and f(Q(x)) behind it."""
    parts = [("  loss ", x), ("  quantized loss " if math.isnan(x) else " (quantized ", quantized)]
    text = "".join(f"{name}{v:.{digits}f}" for name, v in parts if not math.isnan(v))
    return f"{text})" if "(" in text else text


def privacy_text(line: dict[str, Any]) -> str:
    """What a private run has cost so far."""
    told = line.get("privacy")
    return f"  epsilon {told['epsilon']:.3g}, delta {told['delta']:g}" if told else ""


def never_text(line: dict[str, Any]) -> str:
    count = line["never_took_part"]
    return f"{count} clients never took part" if count > 1 else "1 client never took part"


@contextmanager
def stop_requests() -> Iterator[Any]:
    """The first Ctrl-C or SIGTERM asks the run to stop after its round, with a checkpoint; the second one ends it."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        err.print("stopping after this round; once more to stop at once")

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
