"""Progress of the tokeniser: a bar in a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # imported where used: worker processes import this module too, and never print
    from rich.console import Console
    from rich.progress import Progress

LINE_EVERY_SECONDS = 10.0


@dataclass
class Counts:
    """What has been done so far; ``weight`` is in bytes of the source files."""

    tokens: int = 0
    documents: int = 0
    weight: float = 0.0


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``, ``7265`` -> ``2:01:05``."""
    whole = int(seconds + 0.5)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: float) -> str:
    """``81234567`` -> ``81.2M``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


class Reporter:
    """Prints messages and, between :meth:`start` and :meth:`stop`, progress.

    :param console: where to print; the default is stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            from rich.console import Console

            console = Console(highlight=False)
        self.console = console
        self._bar: Progress | None = None
        self._total = 0.0
        self._started = 0.0
        self._printed = 0.0

    def say(self, message: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()

    def start(self, what: str, total: float) -> None:
        """Begin to show progress towards ``total`` bytes of source."""
        self._total, self._started = max(total, 1.0), time.monotonic()
        self._printed = self._started
        self._what = what
        if self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:5.1f}%"),
                TextColumn("{task.fields[detail]}"),
                console=self.console,
            )
            self._task = self._bar.add_task(what, total=self._total, detail="")
            self._bar.start()

    def update(self, counts: Counts, shards: str) -> None:
        """Show the state; cheap enough to be called several times a second."""
        now = time.monotonic()
        elapsed = now - self._started
        if self._bar is None and now - self._printed < LINE_EVERY_SECONDS:
            return
        detail = [f"{shards} shards"]
        if counts.tokens:
            detail.append(f"{count(counts.tokens)} tokens")
            detail.append(f"{count(counts.tokens / elapsed)} tokens/s")
            detail.append(f"{count(counts.documents / elapsed)} documents/s")
        if counts.weight > 0:
            left = elapsed * max(self._total / counts.weight - 1, 0)
            detail.append(f"ETA {duration(left)}")
        text = ", ".join(detail)
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.weight, detail=text)
        else:
            self._printed = now
            self.say(f"{self._what} {100 * min(counts.weight / self._total, 1):5.1f}%: {text}")

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
