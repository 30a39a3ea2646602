"""What is compared with what: rows, their order, budgets and resolution, on made-up cells of one environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_run import write_cell, write_run

from baselines import grpo, opd_teacher, rloo, sdar, sft_teacher, skill_grpo, skill_prompt, vanilla
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.contracts import HarnessError
from harness.methods import SEED, Method
from harness.reporting import comparison_tables as build
from harness.reporting.comparison import BUDGETS, Comparison, check_budget, compare
from harness.reporting.frames import evaluations_of, read_cells
from harness.reporting.statistics import Estimate, micro
from harness.reporting.tables import Table, Value

CURVE = {0: 0.2, 5: 0.5, 10: 0.7}
VARIANT = SEED.model_copy(update={"name": "seed-no-sft", "start": "base"})
METHODS = {
    vanilla.METHOD: {0: 0.2},
    skill_prompt.METHOD: {0: 0.3},
    sft_teacher.METHOD: {0: 0.6},
    grpo.METHOD: CURVE,
    rloo.METHOD: CURVE,
    skill_grpo.METHOD: CURVE,
    opd_teacher.METHOD: CURVE,
    sdar.METHOD: CURVE,
    SEED: {0: 0.3, 5: 0.7, 10: 0.9},
    VARIANT: CURVE,
}


def cell(method: Method | None, seed: int = 0, policy: str = "tiny") -> CellConfig:
    train = TrainConfig(updates=10) if method else None
    return CellConfig(env=EnvConfig(id="ALFWorld-v1"), policy=policy, method=method, seed=seed, train=train)


def comparison(directory: Path) -> Comparison:
    cells = read_cells(directory)[0]
    return compare(cells, evaluations_of(cells))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """All kinds of methods with two seeds."""
    directory = tmp_path_factory.mktemp("run")
    for seed in (0, 1):
        for method, rates in METHODS.items():
            write_cell(directory, cell(method, seed), rates)
        for policy, rate in (("random", 0.02), ("oracle", 1.0)):
            write_cell(directory, cell(None, seed, policy), {0: rate})
    return comparison(directory)


def column(table: Table, name: str, group: str = "") -> dict[str, Value]:
    """A column by the name of the row: its second text where the first is the environment."""
    place = next(i for i, c in enumerate(table.columns) if (c.name, c.group) == (name, group))
    label = 1 if table.columns[0].name == "Environment" else 0
    return {str(row[label]): row[place] for row in table.rows}


# ---------------------------------------------------------------------------------------------------- rows


def test_rows_stand_in_families_and_a_star_marks_skills_in_the_prompt(whole: Comparison) -> None:
    assert whole.methods == [
        "random", "vanilla", "skill-prompt*", "sft-teacher", "grpo", "rloo", "skill-grpo", "skill-grpo*", "opd-teacher",
        "sdar", "seed", "seed-no-sft", "oracle",
    ]  # fmt: skip
    trained = {arm.method for arm in whole.arms.values() if arm.trained}
    assert not trained & {"random", "vanilla", "skill-prompt*", "oracle"}
    assert "sft-teacher" in trained
    for table in (build.comparison_table(whole), build.kinds_table(whole, whole.settings[0])):
        assert "* Skills are also in the prompt at evaluation." in table.notes


def test_plain_and_starred_rows_hold_the_evaluations_of_their_own_context(whole: Comparison) -> None:
    plain, starred = (whole.arms["ALFWorld-v1", name] for name in ("skill-grpo", "skill-grpo*"))
    assert plain.updates == starred.updates == (0, 5, 10)
    assert plain.n == starred.n == "2 × 48"
    assert plain.final != starred.final


def test_an_evaluation_that_does_not_say_what_its_prompts_held_is_refused(tmp_path: Path) -> None:
    path = write_cell(tmp_path, cell(grpo.METHOD), CURVE) / "evals.jsonl"
    path.write_text(path.read_text().replace('"skills": "plain", ', ""))
    with pytest.raises(HarnessError, match=r"evals\.jsonl, line 1: no 'skills' in it"):
        comparison(tmp_path)


def test_every_average_names_its_kind(whole: Comparison) -> None:
    kinds = build.kinds_table(whole, whole.settings[0])
    assert [c.name for c in kinds.columns if c.group == "Average"] == ["micro", "macro over kinds"]
    assert "micro average" in build.comparison_table(whole).notes[0]
    sizes = {c.group for c in kinds.columns if c.kind == "percent"}
    assert sizes == {"12 tasks each"}  # a heading over several kinds is no sum


def test_methods_are_compared_with_the_untrained_start_and_the_reference(whole: Comparison) -> None:
    verdicts = column(build.paired_table(whole), "verdict", "Trained again")
    assert {label.split(" − ")[1] for label in verdicts} == {"vanilla", "grpo"}
    assert verdicts["seed − vanilla"] == "higher"
    assert verdicts["rloo − grpo"] == "not resolved"
    assert "vanilla − grpo" not in verdicts


def test_without_grpo_the_reference_is_seed_and_nothing_is_compared_with_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "ablation", methods=("opd-teacher", "seed"), tasks=8)
    write_run(tmp_path / "alone", methods=("seed",), tasks=8)
    write_run(tmp_path / "other", methods=("opd-teacher",), tasks=8)
    found = [comparison(tmp_path / name).reference for name in ("ablation", "alone", "other")]
    assert found == ["seed", None, None]
    assert "opd-teacher − seed" in [row[1] for row in build.paired_table(comparison(tmp_path / "ablation")).rows]


def test_with_one_seed_the_question_stays_open(tmp_path: Path) -> None:
    for method in (vanilla.METHOD, grpo.METHOD):
        write_cell(tmp_path, cell(method), METHODS[method])
    table = build.paired_table(comparison(tmp_path))
    assert column(table, "verdict", "Trained again") == {"grpo − vanilla": "open: one seed"}
    (p,) = column(table, "p (Holm)", "These policies").values()
    assert isinstance(p, float)
    assert p < 0.001
    assert "training again" in " ".join(table.notes)


# ------------------------------------------------------------------------------------------------- budgets


def test_every_column_of_the_ledger_is_a_budget(whole: Comparison) -> None:
    arm = whole.arms["ALFWorld-v1", "seed"]
    assert {name for budget in BUDGETS.values() for name in budget.fields} == set(arm.ledgers)
    parts = ("sampled_tokens", "rescored_tokens", "trained_tokens")  # the first includes analysis
    assert arm.spent("all_tokens") == pytest.approx(sum(arm.spent(part) for part in parts))
    assert arm.spent("updates")[:, 0].tolist() == [0, 5, 10]
    with pytest.raises(HarnessError, match=r"unknown budget 'tokens'; did you mean '\w+tokens'"):
        check_budget("tokens")


def test_success_at_the_budget_of_the_cheapest(whole: Comparison) -> None:
    table = build.matched_budget_table(whole, ("episodes",))
    assert {row[1] for row in table.rows} == {"1,280 episodes"}
    place = {str(row[2]): row for row in table.rows}
    grpo_, seed = (whole.arms["ALFWorld-v1", name] for name in ("grpo", "seed"))
    assert place["grpo"][3] == grpo_.final
    # seed has paid 256 episodes for stage 1: at 1280 it is at update 8, between the evaluations after 5 and 10.
    at_five, at_ten = (micro(seed.outcomes(evaluation)) for evaluation in (1, 2))
    shown, difference = place["seed"][3:]
    assert isinstance(shown, Estimate)
    assert isinstance(difference, Estimate)
    assert shown.value == pytest.approx(at_five + 0.6 * (at_ten - at_five))
    assert difference.value == pytest.approx(shown.value - grpo_.final.value)


def test_preparation_that_costs_more_than_the_budget_leaves_a_gap(tmp_path: Path) -> None:
    write_cell(tmp_path, cell(grpo.METHOD), {0: 0.2, 1: 0.5})
    write_cell(tmp_path, cell(SEED), {0: 0.3, 1: 0.5})  # stage 1 alone: 256 episodes; an update: 128
    table = build.matched_budget_table(comparison(tmp_path), ("episodes",))
    assert [row[3] is None for row in table.rows] == [False, True]


def test_a_method_without_updates_has_a_place_in_every_table(whole: Comparison) -> None:
    efficiency = build.efficiency_table(whole, ("updates", "episodes"), 0.5)
    assert column(efficiency, "episodes", "Area under the curve")["sft-teacher"] is None
    assert column(efficiency, "updates", "Budget until 50 % success")["sft-teacher"] == "0"
    assert "sft-teacher" in {row[2] for row in build.matched_budget_table(whole, ("flops",)).rows}
    assert "sft-teacher" in column(build.ledger_table(whole), "episodes")


def test_threshold_that_nobody_reaches_is_censored(whole: Comparison) -> None:
    found = column(build.efficiency_table(whole, ("episodes",), 0.99), "episodes", "Budget until 99 % success")
    assert found["grpo"] == "> 1,280 (0/2)"
    reference = build.efficiency_table(whole, ("episodes",))
    assert column(reference, "episodes", "Budget until grpo's final success")["seed"]


# ---------------------------------------------------------------------------------------------- resolution


def test_what_the_comparison_resolves_stands_under_every_table_that_compares(whole: Comparison) -> None:
    pair = whole.contrast(whole.arms["ALFWorld-v1", "seed"], whole.arms["ALFWorld-v1", "grpo"])
    sentence = f"2 seeds × 48 tasks resolve {100 * pair.detectable:.1f} points (seed − grpo)"
    setting = whole.settings[0]
    for table in (build.comparison_table(whole), build.paired_table(whole), build.kinds_table(whole, setting)):
        assert any(sentence in note for note in table.notes)
    for table in (build.efficiency_table(whole, ("episodes",)), build.matched_budget_table(whole, ("episodes",))):
        assert any("2 seeds × 48 tasks resolve" in note for note in table.notes)


def test_seed_deviation_is_pooled_over_trainings_and_not_over_their_two_evaluations(whole: Comparison) -> None:
    one = {key: arm for key, arm in whole.arms.items() if key[1] in ("grpo", "skill-grpo")}
    both = {key: arm for key, arm in whole.arms.items() if key[1] in ("grpo", "skill-grpo", "skill-grpo*")}
    found = [
        Comparison(whole.settings, arms).contrast(arms["ALFWorld-v1", "grpo"], arms["ALFWorld-v1", "skill-grpo"])
        for arms in (one, both)
    ]
    assert found[0] == found[1]


def test_a_single_method_tells_what_two_like_it_would_resolve(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_cell(tmp_path, cell(grpo.METHOD, seed), CURVE)
    (note,) = (n for n in build.comparison_table(comparison(tmp_path)).notes if n.startswith("Detectable"))
    assert "3 seeds × 48 tasks resolve" in note
    assert "of two methods like grpo" in note
    assert np.isfinite(float(note.split("resolve ")[1].split(" points")[0]))
