"""Areas and thresholds on learning curves, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.reporting import curves


def column(*values: float) -> np.ndarray:
    """(U, 1, 1): one seed, one task."""
    return np.array(values).reshape(-1, 1, 1)


def test_area_of_a_straight_line_over_part_of_its_range() -> None:
    budget, count = np.array([[0.0], [10.0], [20.0]]), np.ones((3, 1, 1))
    total = column(0.0, 0.5, 1.0)
    areas, present = curves.area(budget, total, count, (5.0, 15.0))
    assert areas.item() == pytest.approx(0.5)
    count[1] = 0  # a crashed evaluation is passed over, not taken for a failure
    assert curves.area(budget, total * (count > 0), count, (5.0, 15.0))[0].item() == pytest.approx(0.5)
    assert present.item() == 1
    assert curves.area(budget, total * 0, count * 0, (5.0, 15.0))[1].item() == 0


def test_area_by_hand_for_seeds_whose_evaluations_cost_differently() -> None:
    budget = np.array([[0.0, 0.0], [10.0, 20.0], [30.0, 40.0]])
    total = np.array([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]])
    areas, _ = curves.area(budget, total, np.ones((3, 2, 2)), (0.0, 30.0))
    assert areas[0] == pytest.approx([(5 + 20) / 30, (10 + 10) / 30])
    assert areas[1] == pytest.approx([(10 + 10) / 30, (10 + 2.5) / 30])


def test_common_range_is_what_all_curves_cover() -> None:
    first, second = np.array([[0.0, 0.0], [100.0, 90.0]]), np.array([[20.0], [120.0]])
    assert curves.common_range([first, second]) == (20.0, 90.0)
    assert curves.common_range([first, second + 80]) is None


def test_outcome_at_a_budget() -> None:
    budget, total, count = np.array([[10.0], [20.0]]), column(0.2, 0.6), np.ones((2, 1, 1))
    found = [curves.at_budget(budget, total, count, spent) for spent in (5.0, 10.0, 15.0, 99.0)]
    assert found[0] is None  # the preparation costs more
    assert [values[0].item() for values in found[1:] if values] == pytest.approx([0.2, 0.4, 0.6])


def test_budget_to_reach() -> None:
    budget, curve = np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.3, 0.7])
    assert curves.budget_to_reach(0.5, budget, curve) == pytest.approx(15.0)
    assert curves.budget_to_reach(0.05, budget, curve) == 0.0
    assert curves.budget_to_reach(0.71, budget, curve) == math.inf


@pytest.mark.parametrize(
    ("ends", "median", "known", "count"),
    [
        ((1.0, 1.0, 1.0), 50.0, True, 3),
        ((1.0, 1.0, 0.4), 50.0, True, 2),  # the third needs more than 100: the median is the larger of the others
        ((1.0, 0.4, 0.4), 100.0, False, 1),
        ((1.0, 0.4), 75.0, False, 1),  # half way between 50 and something above 100
    ],
)
def test_seeds_that_never_get_there_are_censored(
    ends: tuple[float, ...], median: float, known: bool, count: int
) -> None:
    budget = np.tile([[0.0], [100.0]], (1, len(ends)))
    found = curves.reached(0.5, budget, np.array([[0.0] * len(ends), ends]))
    assert found == curves.Reached(median, known, count, len(ends))


def test_a_censored_seed_that_spent_little_does_not_lower_the_median() -> None:
    budget = np.array([[0.0, 0.0, 0.0], [100.0, 200.0, 20.0]])
    found = curves.reached(0.5, budget, np.array([[0.0] * 3, [0.5, 0.5, 0.4]]))
    assert found == curves.Reached(200.0, True, 2, 3)


def test_a_single_evaluation_is_reached_or_not() -> None:
    assert curves.reached(0.5, np.array([[70.0]]), np.array([[0.6]])).median == 70.0
    assert not curves.reached(0.5, np.array([[70.0]]), np.array([[0.4]])).known
