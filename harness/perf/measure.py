"""What the parts of ``harness perf`` share: measurements and their table, cells of the recipe, clocks."""

from __future__ import annotations

import gc
import multiprocessing
import pkgutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cell import Session
from harness.config import CellConfig, TrainConfig
from harness.perf import PARTS, USUAL
from harness.recipes import expand, load_recipe
from harness.store import cell_dir

RECIPE = "quick"
REPEATS = 3


@dataclass(frozen=True)
class Settings:
    """What the user chose: the policy that is measured and how many episodes are in flight."""

    policy: str
    episodes: int


@dataclass(frozen=True)
class Measurement:
    """One ratio, ``ours / reference``, and its goal; None where it is told for orientation."""

    part: str
    what: str
    ours: float
    reference: float
    unit: str
    goal: float | None
    direction: Literal["at least", "at most"]

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def met(self) -> bool:
        if self.goal is None:
            return True
        return self.ratio >= self.goal if self.direction == "at least" else self.ratio <= self.goal


Result = Measurement | Table | str
"""A ratio, a table of what stands behind it, or a line about what was measured or could not be."""
Report = Callable[[str], None]
Part = Callable[[Settings, Report], Iterator[Result]]


def main(part: str | None, policy: str, episodes: int, console: Console) -> int:
    """Measure one part, or the usual ones, and print tables; 1 where a goal is missed.

    Raises HarnessError where the policy cannot be loaded or trained.
    """
    torch.set_num_threads(1)
    settings = Settings(policy, episodes)
    results: list[Result] = []
    with console.status("measuring") as status:
        for name in [part] if part else USUAL:
            measure: Part = pkgutil.resolve_name(PARTS[name])
            results += measure(settings, status.update)
    measured = [result for result in results if isinstance(result, Measurement)]
    console.print(results_table(measured))
    for other in results:
        if not isinstance(other, Measurement):
            console.print(other, soft_wrap=True)
    return 0 if all(one.met for one in measured) else 1


def results_table(measured: Sequence[Measurement]) -> Table:
    """The measurements for the terminal."""
    table = Table("", "", "measured", "ours", "reference", "ratio", "goal", box=None)
    for one in measured:
        mark = Text() if one.goal is None else Text("✓", "green") if one.met else Text("✗", "red")
        values = [f"{value:,.4g} {one.unit}" for value in (one.ours, one.reference)]
        sign = "≥" if one.direction == "at least" else "≤"
        goal = "" if one.goal is None else f"{sign} {one.goal:g}"
        table.add_row(mark, one.part, one.what, *values, f"{one.ratio:,.3g}", goal)
    return table


def quick_cells(settings: Settings, method: str) -> list[CellConfig]:
    """The recipe's cells of one method, one per environment."""
    group = load_recipe(RECIPE).train.group
    tasks = max(1, settings.episodes // group)
    overrides = [f"methods=[{method}]", "baselines=[]", "seeds=[0]", f"train.tasks={tasks}"]
    recipe = load_recipe(RECIPE, overrides).model_copy(update={"policy": settings.policy})
    return [cell for cell in expand(recipe) if cell.method is not None]


@contextmanager
def opened(config: CellConfig) -> Iterator[Session]:
    """A session that journals into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="harness-perf-") as scratch:
        cell = cell_dir(Path(scratch), config)
        cell.path.mkdir(parents=True)
        session = Session.open(config, cell, lambda progress: None, workers=1)
        try:
            yield session
        finally:
            session.pool.close()
            session.env.close()


def train_config(config: CellConfig) -> TrainConfig:
    """The training settings of a training cell."""
    if config.train is None:
        raise ValueError(f"{config.title} does not train")
    return config.train


def cpu_seconds() -> float:
    """CPU time so far of this process and of the environment workers that are alive."""
    workers = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    return time.process_time() + sum(float(times.user + times.system) for times in workers)


def peak_megabytes(work: Callable[[], None]) -> float:
    """By how much the resident memory rises at most while ``work`` runs, looked at a thousand times a second."""
    gc.collect()
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return float(peak - before) / 1e6
