"""Engines of our own, against the ones that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from harness.contracts import HarnessError
from harness.perf.measure import Measurement, Report, Result, Settings
from harness.registry import ENVS, make_env, registered


def engine_speed(settings: Settings, report: Report) -> Iterator[Result]:
    """What environments measure of themselves: engines of their own against the ones that they replace."""
    for name in registered(ENVS):
        report(f"engine {name}")
        with closing(make_env(name)) as env:
            try:
                speeds = env.benchmark()
            except HarnessError as error:
                yield f"engine {name} not measured: {error}"
                continue
        for speed in speeds:
            what = f"{name} {speed.what}"
            yield Measurement("engine", what, speed.ours, speed.reference, "/s", speed.goal, "at least")
