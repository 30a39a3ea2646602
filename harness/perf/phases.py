"""CPU seconds of updates, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from harness.perf.measure import cpu_seconds


class Phases:
    """A clock for updates. What is called under another phase's name is taken out of the phase that calls it."""

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self._open: list[str] = []
        self._last = 0.0

    def begin(self, rest: str) -> None:
        """Start an update; what no phase claims counts as ``rest``."""
        self.updates.append({})
        self._open = [rest]
        self._last = cpu_seconds()

    def end(self) -> None:
        self._charge()
        self._open = []

    @contextmanager
    def update(self, rest: str) -> Iterator[None]:
        """Time one update."""
        self.begin(rest)
        yield
        self.end()

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Charge an object's method to a phase while an update is timed."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if not self._open:
                return function(*arguments, **options)
            self._charge()
            self._open.append(phase)
            try:
                return function(*arguments, **options)
            finally:
                self._charge()
                self._open.pop()

        setattr(owner, name, timed)

    def medians(self) -> dict[str, float]:
        """Of each phase over the updates that count."""
        phases = dict.fromkeys(phase for spent in self._counted for phase in spent)
        return {phase: median(spent.get(phase, 0.0) for spent in self._counted) for phase in phases}

    def total(self) -> float:
        """Median of the whole updates."""
        return median(sum(spent.values()) for spent in self._counted)

    @property
    def _counted(self) -> list[dict[str, float]]:
        """The first update warms up, where there are more."""
        return self.updates[1:] or self.updates

    def _charge(self) -> None:
        now = cpu_seconds()
        spent = self.updates[-1]
        spent[self._open[-1]] = spent.get(self._open[-1], 0.0) + now - self._last
        self._last = now
