"""Averages and intervals against scipy and rliable, by hand, and against what they promise in simulation."""

from __future__ import annotations

import importlib.util
import math
import sys
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from harness.reporting import statistics as st
from harness.reporting.statistics import Outcomes


@pytest.fixture(scope="module")
def rliable() -> ModuleType:
    """rliable's bootstrap, which needs ``arch.bootstrap``: arch < 8 as a whole does not load beside pandas 3."""
    spec = importlib.util.find_spec("arch")
    assert spec
    sys.modules.setdefault("arch", importlib.util.module_from_spec(spec))
    from rliable import library

    return library


def outcomes(values: np.ndarray, kinds: tuple[str, ...] | None = None) -> Outcomes:
    """One counted episode per seed and task."""
    return Outcomes(values.astype(float), np.ones(values.shape), kinds or ("kind",) * values.shape[1])


def interval(given: Outcomes, key: str = "test") -> st.Estimate:
    seeds = st.seed_draws(len(given.total), f"{key} seeds")
    tasks = st.task_draws(given.kinds, f"{key} tasks")
    return st.interval(st.micro(given), st.micro_replicates(given, seeds, tasks))


@pytest.mark.parametrize(("wins", "n"), [(0, 10), (1, 10), (43, 64), (127, 128), (140, 140)])
def test_wilson_equals_scipy(wins: int, n: int) -> None:
    expected = stats.binomtest(wins, n).proportion_ci(method="wilson")
    found = st.wilson(wins, n)
    assert (found.value, found.low, found.high) == pytest.approx((wins / n, expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("n", [1, 3, 4, 6, 9, 40])
def test_interquartile_mean_equals_trimmed_mean(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    assert st.iqm(values.tolist()) == pytest.approx(stats.trim_mean(values, 0.25))


def test_probability_of_improvement_equals_mann_whitney() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 8, 7) / 8, rng.integers(0, 8, 5) / 8
    expected = stats.mannwhitneyu(ours, theirs).statistic / (7 * 5)
    assert st.probability_of_improvement(ours.tolist(), theirs.tolist()) == pytest.approx(expected)


def test_averages_over_environments_equal_rliables() -> None:
    from rliable import metrics

    rng = np.random.default_rng(2)
    ours, theirs = rng.random((7, 4)), rng.random((5, 4))  # runs x environments
    assert st.iqm(ours.ravel().tolist()) == pytest.approx(metrics.aggregate_iqm(ours), abs=1e-6)
    chances = [st.probability_of_improvement(a.tolist(), b.tolist()) for a, b in zip(ours.T, theirs.T, strict=True)]
    assert np.mean(chances) == pytest.approx(metrics.probability_of_improvement(ours, theirs), abs=1e-6)


def percentiles(rliable: ModuleType, runs: np.ndarray, **options: bool) -> tuple[float, float]:
    bootstrap = rliable.StratifiedBootstrap(runs, seed=np.random.default_rng(0), **options)
    np.random.seed(0)  # rliable draws from the global generator  # noqa: NPY002
    low, high = bootstrap.conf_int(lambda drawn: np.array([drawn.mean()]), 4000, method="percentile").ravel()
    return float(low), float(high)


def test_bootstrap_over_seeds_of_several_environments_equals_rliables(rliable: ModuleType) -> None:
    runs = np.random.default_rng(4).random((6, 3))  # one task per environment: only seeds are drawn, within each
    replicates = []
    for number, column in enumerate(runs.T):
        of_env = outcomes(column[:, None])
        replicates.append(st.micro_replicates(of_env, st.seed_draws(6, f"env {number}"), np.ones((st.DRAWS, 1))))
    found = st.interval(float(runs.mean()), np.mean(replicates, axis=0))
    assert (found.low, found.high) == pytest.approx(percentiles(rliable, runs), abs=0.015)


def test_bootstrap_over_tasks_equals_rliables(rliable: ModuleType) -> None:
    values = np.random.default_rng(6).random((1, 50))
    found = interval(outcomes(values))
    assert (found.low, found.high) == pytest.approx(percentiles(rliable, values, task_bootstrap=True), abs=0.015)


def test_one_seed_interval_equals_scipys_bootstrap() -> None:
    values = np.random.default_rng(3).random((1, 60)) < 0.4
    expected = stats.bootstrap((values[0],), np.mean, n_resamples=20_000, method="percentile", rng=0)
    found = interval(outcomes(values))
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.02)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.02)


def test_interval_is_deterministic_and_depends_on_its_key() -> None:
    values = outcomes(np.random.default_rng(1).random((3, 40)) < 0.5)
    assert interval(values) == interval(values)
    assert interval(values) != interval(values, "other")


def test_interval_covers_the_truth_over_seeds_and_tasks() -> None:
    """Three seeds that differ by 5 points, 64 tasks of unequal difficulty: what the report's ± promises."""
    rng = np.random.default_rng(0)
    covered = 0
    seeds, tasks = st.seed_draws(3, "s", 400), st.task_draws(("k",) * 64, "t", 400)
    for _ in range(300):
        chance = 0.5 + rng.normal(0, 0.2, 64)[None] + rng.normal(0, 0.05, (3, 1))
        found = outcomes(rng.random((3, 64)) < chance)
        estimate = st.interval(st.micro(found), st.micro_replicates(found, seeds, tasks))
        covered += estimate.low <= 0.5 <= estimate.high
    assert covered / 300 >= 0.93


def test_seeds_widen_the_interval() -> None:
    apart, alike = np.zeros((2, 50)), np.zeros((2, 50))
    apart[0, :40], apart[1, :10] = 1, 1
    alike[:, :25] = 1
    assert interval(outcomes(apart)).margin > 1.5 * interval(outcomes(alike)).margin


def test_micro_and_macro_average() -> None:
    given = outcomes(np.array([[1, 1, 1, 0, 0]]), ("a", "a", "a", "a", "b"))
    assert st.micro(given) == pytest.approx(0.6)
    assert st.macro(given) == pytest.approx((0.75 + 0) / 2)
    seeds, tasks = st.seed_draws(1, "s"), st.task_draws(given.kinds, "t")
    assert (tasks[:, :4].sum(1) == 4).all()  # every kind keeps its size
    assert st.macro_replicates(given, seeds, tasks).mean() == pytest.approx(0.375, abs=0.01)


def test_excluded_episodes_do_not_count() -> None:
    given = Outcomes(np.array([[1.0, 0, 0], [1, 1, 0]]), np.array([[1.0, 1, 0], [1, 1, 0]]), ("a", "a", "b"))
    assert st.micro(given) == 0.75
    assert st.macro(given) == 0.75  # nobody played kind b
    assert given.per_seed.tolist() == [0.5, 1.0]
    assert math.isnan(given.per_task[2])
    assert given.played == 2


def test_all_alike_falls_back_on_wilson() -> None:
    given = outcomes(np.ones((2, 64)))
    found = st.success_interval(1.0, st.micro_replicates(given, np.ones((5, 2)), np.ones((5, 64))), given.played)
    assert found == st.wilson(64, 64)
