"""Runs that are killed: a child that runs a cell and writes its report, and dies at a chosen or a random instant."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toy_cells import find, run_toy, server

from harness.config import CellConfig
from harness.reporting.report import write_report
from harness.runner import _is_current
from harness.store import cell_dir

PHASES = {
    "stage 1": ("harness.preparation:fine_tune",),
    "rollout": ("harness.cell:rollout", "harness.preparation:rollout"),
    "analysis": ("harness.training:analyse",),
    "update": ("harness.trainer:Trainer.update",),
    "evaluation": ("harness.cell:Session.evaluate", "harness.cell:Session.evaluate_only"),
    "checkpoint": ("harness.training:Training._checkpoint",),
    "finish": ("harness.store:CellDir.finish",),
    "report": ("faults:write_report",),
    "cell": ("faults:run_toy",),
}
"""What a run does, and the functions that do it; all but the report are parts of the cell."""
NAMES = list(PHASES)


@dataclass(frozen=True)
class Aim:
    """Die in the first ``phase`` that comes, after this share of the time that it usually takes."""

    phase: str
    share: float


class Shared:
    """What the child tells even if it is killed: the phases it is in, and how long each took the slowest time."""

    def __init__(self) -> None:
        self.inside = server().Array("i", len(PHASES), lock=False)
        self.seconds = server().Array("d", len(PHASES), lock=False)


def run(
    config: CellConfig, directory: Path, shared: Shared, kill: Aim | None = None, report: bool = True
) -> tuple[int, set[str]]:
    """Run a cell and write its report, if told so, in a child process that is killed where told.

    Returns its exit code and the phases it was in when it ended.
    """
    for place in range(len(PHASES)):
        shared.inside[place] = 0
    child = server().Process(target=_child, args=(config.model_dump_json(), directory, shared, kill, report))
    child.start()
    child.join()
    return child.exitcode, {name for name, inside in zip(NAMES, shared.inside, strict=True) if inside}


def _child(config: str, directory: Path, shared: Shared, aim: Aim | None, report: bool) -> None:
    for place, (phase, names) in enumerate(PHASES.items()):
        for name in names:
            owner, function = find(name)
            delay = aim.share * shared.seconds[place] if aim and aim.phase == phase else None
            setattr(owner, function, _watched(getattr(owner, function), place, shared, delay))
    cell = CellConfig(**json.loads(config))
    run_toy(cell, cell_dir(directory, cell).path)
    if report and not _is_current(directory / "report.html"):
        write_report(directory)


def _watched(function: Callable[..., Any], place: int, shared: Shared, delay: float | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        shared.inside[place] += 1
        if delay is not None:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        clock = time.perf_counter()
        result = function(*args, **kwargs)
        shared.seconds[place] = max(shared.seconds[place], time.perf_counter() - clock)
        shared.inside[place] -= 1
        return result

    return call
