"""What a running cell reports, and how it is shown: live bars on a terminal, rate-limited plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text


@dataclass(frozen=True)
class Progress:
    """Where a cell stands.

    Attributes:
        cell: Title of the cell.
        phase: What it is doing, e.g. ``"stage 1"``, ``"train"`` or ``"eval"``; a new phase starts its own count.
        done: Units finished in this phase (updates, episodes).
        total: Units of this phase.
        success: Latest success rate in [0, 1], where there is one.
        tokens_per_second: Latest throughput, where there is one.
    """

    cell: str
    phase: str
    done: int
    total: int
    success: float | None = None
    tokens_per_second: float | None = None

    @property
    def detail(self) -> str:
        """Success and throughput in words; empty where neither is known."""
        parts = []
        if self.success is not None:
            parts.append(f"success {self.success:.1%}")
        if self.tokens_per_second:  # scripted policies have no tokens
            parts.append(f"{self.tokens_per_second:,.0f} tok/s")
        return "  ".join(parts)


class Board:
    """Shows many cells at once. Use as a context manager; cells are named by key, titles are for the reader.

    Args:
        titles: Title of every cell still to run, by key.
        finished: Cells that were finished before this run.
        console: Where to write.
        interval: Seconds between two plain lines of one cell; unused on a terminal.
    """

    def __init__(self, titles: Mapping[str, str], finished: int, console: Console, interval: float = 15.0) -> None:
        self.titles, self.console, self.interval = titles, console, interval
        self.finished, self.total = finished, finished + len(titles)
        self.live = console.is_terminal
        self.phases: dict[str, str] = {}
        self.seen: dict[str, float] = {}
        self.began: dict[str, tuple[float, int]] = {}
        self.tasks: dict[str, TaskID] = {}
        self.bars = Bars(
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[phase]}", style="cyan", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
            disable=not self.live,
        )
        self.overall = self.bars.add_task("all cells", total=self.total, completed=finished, phase="", detail="")

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def show(self, key: str, progress: Progress) -> None:
        """Show where a cell stands."""
        fresh = self.phases.get(key) != progress.phase
        self.phases[key] = progress.phase
        if self.live:
            self._bar(key, progress, fresh)
        else:
            self._line(key, progress, fresh)

    def note(self, key: str, text: str) -> None:
        """A cell has something to say, once."""
        self.console.print(f"{self.titles[key]}: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def end(self, key: str, error: str = "") -> None:
        """A cell ended, well or with an error."""
        self.finished += 1
        if key in self.tasks:
            self.bars.remove_task(self.tasks.pop(key))
        self.bars.update(self.overall, completed=self.finished)
        mark, tail = (("✗", "red"), f": {error}") if error else (("✓", "green"), "")
        self.console.print(Text.assemble(mark, f" {self.titles[key]}{tail}  ({self.finished}/{self.total})"))

    def _bar(self, key: str, progress: Progress, fresh: bool) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task(self.titles[key], total=None, phase="", detail="")
        elif fresh:
            self.bars.reset(self.tasks[key])  # the ETA of one phase says nothing about the next
        self.bars.update(
            self.tasks[key],
            total=progress.total,
            completed=progress.done,
            phase=progress.phase,
            detail=progress.detail,
        )

    def _line(self, key: str, progress: Progress, fresh: bool) -> None:
        now = time.monotonic()
        if fresh:
            self.began[key] = (now, progress.done)
        elif now - self.seen[key] < self.interval:
            return
        self.seen[key] = now
        start, first = self.began[key]
        left = (
            (progress.total - progress.done) * (now - start) / (progress.done - first)
            if progress.done > first
            else None
        )
        eta = "" if left is None else f"  ETA {left:.0f} s"
        text = f"{self.titles[key]}: {progress.phase} {progress.done}/{progress.total}{eta}  {progress.detail}"
        self.console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)
