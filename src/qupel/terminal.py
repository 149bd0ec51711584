"""What commands share on a terminal: consoles, text from outside, tables of numbers, progress, requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

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
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.live = out.is_terminal
        self.done: dict[str, int] = {}
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()]
        self.bar = Progress(*columns, TimeRemainingColumn(), console=out, transient=True)

    def __enter__(self) -> Watcher:
        if self.live:
            self.bar.start()
            self.task = self.bar.add_task("starting", total=self.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()

    def tell(self, cell: Any, progress: Any) -> None:
        self.done[cell.name] = progress.round
        line = progress.line
        for refusal in progress.refused:
            err.print(f"round {progress.round}: refused {shown(refusal)}", highlight=False)
        if self.live:
            seen = f"  {100 * line['test']:.1f} %" if line else ""
            text = f"{cell.label}, seed {cell.seed}  loss {progress.loss:.3f}{seen}"
            self.bar.update(self.task, completed=sum(self.done.values()), description=shown(text, 46))
        elif line:
            sent = f"  {line['upload_bytes'] / 1e6:.2f} MB sent per client" if line["upload_bytes"] else ""
            head = f"{shown(cell.label)}, seed {cell.seed}: round {progress.round}/{progress.rounds}"
            out.print(f"{head}  loss {line['loss']:.4f}  test {100 * line['test']:.2f} %{sent}", highlight=False)


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
