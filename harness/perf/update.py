"""Update: what SEED costs beside GRPO, where each second goes, and how near the arithmetic is to the machine's peak.

Both methods update from the same weights on the same episodes, by turns. The share of the peak is the floating-point
operations of matrix products and attention, counted by torch, over CPU seconds, over what one large product reaches in
the same process with the same threads.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from harness.cell import Session
from harness.perf.measure import Measurement, Report, Result, Settings, opened, quick_cells, train_config
from harness.perf.phases import Phases
from harness.preparation import local
from harness.trainer import Trainer
from harness.training import Training

UPDATE_GOAL = 1.25
UPDATES = 5
"""Of each method; the first warms up and does not count."""
PHASES = ("collect", "analyse", "re-score", "reference", "optimise", "write")
SIDE = 1024
"""Of the square matrices whose product is the peak."""


def update_cost(settings: Settings, report: Report) -> Iterator[Result]:
    """CPU seconds of a whole update: SEED's against GRPO's from the same weights on the same episodes."""
    seconds = Table("", "", *PHASES, "all", title="CPU seconds of an update", title_justify="left", box=None)
    shares = Table("", "GRPO", "GFLOP", "GFLOP/s", "of peak", title_justify="left", box=None)
    peak = matmul_peak()
    shares.title = f"Arithmetic; peak: {peak / 1e9:,.0f} GFLOP/s in a product of {SIDE} x {SIDE} matrices"
    notes = []
    for seed_config, grpo_config in zip(*(quick_cells(settings, name) for name in ("seed", "grpo")), strict=True):
        env_id = seed_config.env.id
        with opened(seed_config) as first, opened(grpo_config) as second:
            updaters = [Updater(first), Updater(second)]
            for number in range(1, UPDATES + 1):
                report(f"update {env_id}: {number} of {UPDATES}")
                for updater in updaters:
                    updater.update(number)
            metrics = [session.cell.records("metrics.jsonl") for session in (first, second)]
            played = {(session.ledger.env_steps, session.ledger.sampled_tokens) for session in (first, second)}
            flops = updaters[1].flops(UPDATES)
        if len(played) > 1:
            raise RuntimeError(f"the two methods did not play the same episodes: {played}")
        spent = [updater.phases.medians() for updater in updaters]
        ours, reference = (updater.phases.total() for updater in updaters)
        yield Measurement("update", env_id, ours, reference, "s", UPDATE_GOAL, "at most")
        for name, found, total in zip(("seed", "grpo"), spent, (ours, reference), strict=True):
            seconds.add_row(env_id, name, *(f"{found.get(phase, 0.0):.3f}" for phase in PHASES), f"{total:.3f}")
        for phase, count in flops.items():
            if not count:  # no task told good attempts from bad ones
                continue
            rate = count / spent[1][phase]
            shares.add_row(env_id, phase, f"{count / 1e9:.2f}", f"{rate / 1e9:.1f}", f"{rate / peak:.0%}")
        rows, others = (median(record["rows"] for record in records) for records in metrics)
        usable = median(record["skill/parse_rate"] for record in metrics[0])
        notes.append(
            f"update {env_id}: the same {settings.episodes} episodes; seed learns from {rows:,.0f} steps, grpo from "
            f"{others:,.0f}; {usable:.0%} of the skills are usable"
        )
    yield seconds
    yield shares
    yield from notes


class Updater:
    """Updates of one method that all start from the same weights."""

    def __init__(self, session: Session) -> None:
        policy, method, train = local(session.policy), session.config.method, train_config(session.config)
        if method is None:
            raise ValueError(f"{session.config.title} does not train")
        self.policy, self.start, self.phases = policy, policy.clone(), Phases()
        self.training = Training(session, method, policy, train)
        self.trainer = Trainer(policy, method, train, seed=0, reference=self.start)
        self.trainer.steps = 1  # as in the middle of a run: before the first step the reference need not be scored
        self.phases.watch(session, "play", "collect")
        self.phases.watch(self.training, "_skills", "analyse")
        self.phases.watch(self.trainer, "update", "optimise")
        self.phases.watch(self.trainer, "_score_reference", "reference")
        for name in ("_score_teacher", "_score_watched"):
            self.phases.watch(self.trainer, name, "re-score")

    def update(self, number: int) -> None:
        """Update ``number``, timed: collect, analyse, re-score, optimise, write down."""
        self.policy.copy_weights_from(self.start)
        gc.collect()
        with self.phases.update("write"):
            self.training.update(self.trainer, number)

    def flops(self, number: int) -> dict[str, int]:
        """Operations of optimising and of scoring the reference in update ``number``, played again."""
        self.policy.copy_weights_from(self.start)
        with counted(self.trainer, "_optimise") as trained, counted(self.trainer, "_score_reference") as scored:
            self.training.update(self.trainer, number)
        return {"optimise": sum(trained), "reference": sum(scored)}


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """Count the floating-point operations of every call of an object's method."""
    function: Callable[..., Any] = getattr(owner, name)
    found: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = function(*arguments, **options)
        found.append(counter.get_total_flops())
        return result

    setattr(owner, name, counting)
    try:
        yield found
    finally:
        setattr(owner, name, function)


def matmul_peak() -> float:
    """Operations a CPU second of one large float32 product, the best of ten."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    best = float("inf")
    for _ in range(10):
        begin = time.process_time()
        torch.mm(left, right)
        best = min(best, time.process_time() - begin)
    return 2 * SIDE**3 / best
