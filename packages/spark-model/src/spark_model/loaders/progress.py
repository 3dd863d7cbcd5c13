"""How much of a checkpoint has been taken, and a bar that shows it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

ProgressReport = Callable[[int, int], None]
"""Called with the bytes taken so far and the bytes in all."""


class Consumed:
    """Counts the stored bytes of the tensors that were taken, each tensor once, and reports them."""

    def __init__(self, total_bytes: int, report: ProgressReport | None) -> None:
        self.total_bytes = total_bytes
        self.bytes = 0
        self._taken: set[str] = set()
        self._report = report

    def take(self, name: str, size: int) -> None:
        if name in self._taken:
            return
        self._taken.add(name)
        self.bytes += size
        if self._report is not None:
            self._report(self.bytes, self.total_bytes)


class RateColumn(ProgressColumn):
    """Gigabytes a second since the bar began."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished_time is not None else task.elapsed
        return Text(f"{task.completed / seconds / 1e9:.2f} GB/s" if seconds else "- GB/s")


@contextmanager
def terminal_progress(label: str) -> Iterator[ProgressReport | None]:
    """A bar on stderr while the block runs, for `open_weights(progress=...)`; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), RateColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
