"""Learning curves: success against a budget, U evaluations x S seeds x T tasks.

Areas and values at a budget come per seed and task, so that they have the same intervals and tests as final scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.reporting.statistics import Floats, ratio


def common_range(budgets: Sequence[Floats]) -> tuple[float, float] | None:
    """The stretch of budget that all curves cover; None where there is none. Each entry: (U, S) rising along U."""
    low = max(float(np.max(budget[0])) for budget in budgets)
    high = min(float(np.min(budget[-1])) for budget in budgets)
    return (low, high) if low < high else None


def area(budget: Floats, total: Floats, count: Floats, within: tuple[float, float]) -> tuple[Floats, Floats]:
    """Area under each task's learning curve within a budget range, divided by the length of the range.

    Args:
        budget: (U, S) budget spent at each evaluation, rising along U.
        total, count: (U, S, T) as in ``Outcomes``; evaluations without a counted episode are passed over.

    Returns:
        (S, T) areas in units of the outcome, and (S, T) 1 where there is a curve and 0 where there is none: together
        the ``total`` and ``count`` of an ``Outcomes``, so that areas have the same intervals as final scores.
    """
    low, high = within
    outcome = ratio(total, count)
    areas = np.full(total.shape[1:], np.nan)
    for seed, x in enumerate(budget.T):
        grid = np.array([low, *x[(x > low) & (x < high)], high])
        areas[seed] = np.trapezoid(_on_lines(grid, x, outcome[:, seed]), grid, axis=0) / (high - low)
    return np.nan_to_num(areas), np.isfinite(areas).astype(float)


def _on_lines(grid: Floats, budget: Floats, outcome: Floats) -> Floats:
    """(G, T) outcome of each task at (G,) budgets, on straight lines between the (U, T) evaluations with an outcome."""
    values = np.full((len(grid), outcome.shape[1]), np.nan)
    patterns, pattern = np.unique(np.isfinite(outcome), axis=1, return_inverse=True)
    for number, seen in enumerate(patterns.T):
        if seen.any():
            unit = np.eye(int(seen.sum()))
            weights = np.stack([np.interp(grid, budget[seen], row) for row in unit], axis=1)
            tasks = pattern.ravel() == number
            values[:, tasks] = weights @ outcome[np.ix_(seen, tasks)]
    return values


def budget_to_reach(threshold: float, budget: Floats, outcome: Floats) -> float:
    """Budget at which a curve, drawn straight between evaluations, first reaches a threshold; infinity if never.

    Args:
        budget, outcome: (U,) each.
    """
    reached = np.flatnonzero(outcome >= threshold)
    if not len(reached):
        return math.inf
    after = int(reached[0])
    if after == 0:
        return float(budget[0])
    before = after - 1
    share = (threshold - outcome[before]) / (outcome[after] - outcome[before])
    return float(budget[before] + share * (budget[after] - budget[before]))


def at_budget(budget: Floats, total: Floats, count: Floats, spent: float) -> tuple[Floats, Floats] | None:
    """Each task's outcome when a budget has been spent, on straight lines between evaluations.

    A curve that ends earlier keeps its last value: nothing was trained after it. Arguments and result are those of
    :func:`area`; None where some seed's curve starts later, i.e. its preparation costs more than the budget.
    """
    if float(np.max(budget[0])) > spent:
        return None
    outcome = ratio(total, count)
    values = np.concatenate([_on_lines(np.array([spent]), x, outcome[:, seed]) for seed, x in enumerate(budget.T)])
    return np.nan_to_num(values), np.isfinite(values).astype(float)


@dataclass(frozen=True)
class Reached:
    """Budget until a threshold, over the seeds of a method.

    Attributes:
        median: Median budget; where half of the seeds or more never got there, a lower bound of it.
        known: Whether it is the median and not a bound.
        count, seeds: How many seeds got there, of how many.
    """

    median: float
    known: bool
    count: int
    seeds: int


def reached(threshold: float, budget: Floats, outcome: Floats) -> Reached:
    """When the seeds' curves first reach a threshold; ``budget`` and ``outcome``: (U, S).

    A seed that never gets there is censored: it needs more than all it spent. Where more than half of the seeds got
    there the median does not depend on how much more.
    """
    needed = np.array([budget_to_reach(threshold, budget[:, s], outcome[:, s]) for s in range(budget.shape[1])])
    median = float(np.median(needed))
    known = math.isfinite(median)
    bound = float(np.median(np.minimum(needed, budget[-1])))
    return Reached(median if known else bound, known, int(np.isfinite(needed).sum()), len(needed))
