"""Statistics against scipy, against hand computation, and against what they promise in simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from harness import statistics as st
from harness.statistics import Outcomes


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


def test_sign_flip_is_mcnemars_exact_test_for_single_episodes() -> None:
    differences = np.array([1.0] * 9 + [-1.0] * 2 + [0.0] * 50)
    assert st.sign_flip_p(differences) == pytest.approx(stats.binomtest(2, 11).pvalue)


def test_sign_flip_equals_scipys_permutation_test() -> None:
    differences = np.random.default_rng(5).integers(-3, 5, 12) / 6
    expected = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert st.sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_sign_flip_without_any_difference() -> None:
    assert st.sign_flip_p(np.zeros(7)) == 1.0


def test_holm_on_a_worked_example() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.8, 0.9]) == [1.0, 1.0]


def test_paired_comparison_uses_common_tasks_and_is_tighter_than_unpaired() -> None:
    rng = np.random.default_rng(0)
    chance = rng.random(200)
    hard = rng.random((1, 200)) < chance
    better = hard | (rng.random((1, 200)) < 0.1)
    ours, theirs = outcomes(better), outcomes(hard)
    theirs = Outcomes(theirs.total, theirs.count * (np.arange(200) > 9), theirs.kinds)
    tasks = st.task_draws(ours.kinds, "t")
    one = st.seed_draws(1, "s")
    found = st.paired(ours, theirs, (one, one, tasks))
    assert found.tasks == 190
    assert found.difference.value == pytest.approx(better[0, 10:].mean() - hard[0, 10:].mean())
    assert found.difference.low > 0
    assert found.p == pytest.approx(2 * 0.5**6)  # six tasks differ, all in our favour
    unpaired = st.interval(0, st.micro_replicates(ours, one, tasks) - st.micro_replicates(theirs, one, tasks[::-1]))
    assert found.difference.margin < 0.6 * unpaired.margin


def test_panels_that_differ_cannot_be_paired() -> None:
    draws = (np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 2)))
    with pytest.raises(ValueError, match="one panel"):
        st.paired(outcomes(np.ones((1, 2))), outcomes(np.ones((1, 2)), ("x", "y")), draws)


def test_detectable_difference_is_found_with_its_power() -> None:
    detectable = st.minimal_detectable_difference(1.0)
    found = np.abs(np.random.default_rng(0).normal(detectable, 1.0, 20_000)) > stats.norm.ppf(0.975)
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_area_of_a_straight_line_over_part_of_its_range() -> None:
    budget = np.array([[0.0], [10.0], [20.0]])
    total, count = np.array([0.0, 0.5, 1.0]).reshape(3, 1, 1), np.ones((3, 1, 1))
    areas, present = st.area(budget, total, count, (5.0, 15.0))
    assert areas.item() == pytest.approx(0.5)
    count[1] = 0  # a crashed evaluation is passed over, not taken for a failure
    assert st.area(budget, total * (count > 0), count, (5.0, 15.0))[0].item() == pytest.approx(0.5)
    assert present.item() == 1


def test_common_range_is_what_all_curves_cover() -> None:
    first, second = np.array([[0.0, 0.0], [100.0, 90.0]]), np.array([[20.0], [120.0]])
    assert st.common_range([first, second]) == (20.0, 90.0)
    assert st.common_range([first, second + 80]) is None


def test_budget_to_reach() -> None:
    budget, curve = np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.3, 0.7])
    assert st.budget_to_reach(0.5, budget, curve) == pytest.approx(15.0)
    assert st.budget_to_reach(0.05, budget, curve) == 0.0
    assert st.budget_to_reach(0.71, budget, curve) == math.inf
