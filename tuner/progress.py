"""Progress on stderr: a bar with the time left on a terminal, one plain line a step elsewhere. stdout is for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """Says what a long command is doing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True)
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        if self.console.is_terminal:
            self.console.print(text, style="dim", highlight=False)
        else:
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def steps(self, text: str, total: int) -> Iterator[Step]:
        """A step of `total` parts."""
        if not self.console.is_terminal:
            self.say(text)
            yield Step(None, 0)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield Step(bar, int(bar.add_task(text, total=total)))


class Step:
    """One running step."""

    def __init__(self, bar: Progress | None, task: int) -> None:
        self._bar, self._task = bar, task

    def advance(self, count: int = 1) -> None:
        """`count` parts are done."""
        if self._bar is not None:
            self._bar.advance(self._task, count)  # type: ignore[arg-type]

    def at(self, done: int) -> None:
        """`done` parts are done in all."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)  # type: ignore[arg-type]
