"""The page of a cell: its tables and charts against numbers worked out by hand, and cells that lack some of them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from synthetic_run import METHODS, credit, write_cell

from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.methods import Advantage, GatedNLL, Method, Rehearsal, Teacher
from harness.reporting import charts, frames
from harness.reporting.frames import Cell
from harness.reporting.site_cells import Section, curves, kinds_table, method_table, sections
from harness.reporting.site_distillation import outcome_table, token_charts, token_frame
from harness.reporting.statistics import Estimate


def made(directory: Path, method: str = "seed", **change: object) -> tuple[Cell, pd.DataFrame]:
    """A finished cell and its evaluations."""
    point = METHODS[method].model_copy(update=change)
    config = CellConfig(env=EnvConfig(id="ALFWorld-v1"), method=point, train=TrainConfig(updates=40))
    write_cell(directory, config, {0: 0.2, 20: 0.5, 40: 0.7}, 16, "Look first.")
    return frames.read_cells(directory)[0][0], frames.evaluations(directory)


def by_id(cell: Cell, evaluations: pd.DataFrame) -> dict[str, Section]:
    return {section.id: section for section in sections(cell, evaluations)}


# --------------------------------------------------------------------------------------------------- tables


def test_kinds_are_counted_and_averaged_both_ways(tmp_path: Path) -> None:
    _, evaluations = made(tmp_path)
    last = evaluations[evaluations["update"] == 40]
    rows = {row[1]: row for row in kinds_table(evaluations).rows}
    assert list(rows) == ["pick", "look", "clean", "heat", "all (micro)", "all (macro over kinds)"]
    assert rows["all (micro)"][2] == 16
    micro = rows["all (micro)"][3]
    assert isinstance(micro, Estimate)
    assert micro.value == last["success"].mean()
    assert rows["all (macro over kinds)"][3] == pytest.approx(last.groupby("kind")["success"].mean().mean())
    assert rows["look"][7] == 0


def test_both_kinds_of_prompt_are_shown_with_the_star_explained(tmp_path: Path) -> None:
    cell, evaluations = made(tmp_path, "grpo", evaluation=("plain", "library"))
    table = kinds_table(evaluations)
    assert {row[0] for row in table.rows} == {"grpo", "grpo*"}
    assert table.notes[-1].startswith("*")
    assert "grpo*" in by_id(cell, evaluations)["result"].charts[0].legend


def test_every_axis_of_a_method_is_named_once() -> None:
    method = Method(
        name="m",
        summary="s",
        start="hindsight_sft",
        advantage=Advantage(estimator="gigpo"),
        teacher=Teacher(weights="update_start", context="own_skill"),
        signal=GatedNLL(centred=True),
        rehearsal=Rehearsal(),
    )
    rows = {str(axis): value for axis, value, _ in method_table(method).rows}
    assert rows["signal.centred"] == "true"
    assert rows["advantage.gamma"] == "0.95"
    assert rows["rehearsal.samples"] == "16"
    assert all(meaning for _, _, meaning in method_table(method).rows)
    plain = {str(axis): value for axis, value, _ in method_table(METHODS["grpo"]).rows}
    assert plain["teacher"] == "none"
    assert "advantage.gamma" not in plain


def test_the_ledger_tells_preparation_from_updates(tmp_path: Path) -> None:
    cell, evaluations = made(tmp_path)
    table = by_id(cell, evaluations)["ledger"].tables[0]
    assert [column.name for column in table.columns] == ["Spent", "total", "preparation", "per update"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["episodes"] == (128 * 40 + 256, 256, 128)
    plain, evaluated = made(tmp_path / "plain", "grpo")
    assert "preparation" not in [c.name for c in by_id(plain, evaluated)["ledger"].tables[0].columns]


# --------------------------------------------------------------------------------------------- distillation


def test_gap_and_gate_by_outcome_are_those_of_the_tokens() -> None:
    rows = [row for attempt in (0, 1) for row in credit(3, attempt, "x")]
    episodes = pd.DataFrame(
        {"phase": "train", "update": 3, "task": "train/000017", "attempt": [0, 1], "success": [False, True]}
    )
    tokens = token_frame(pd.DataFrame(rows), episodes)
    assert len(tokens) == 10
    found = {row[0]: row[1:] for row in outcome_table(tokens).rows}
    assert found["failure"][:2] == (5, pytest.approx(np.mean([-0.1, 0, 0.1, -0.1, 0])))
    assert found["success"][1] == pytest.approx(np.mean([-0.05, 0.05, 0.15, -0.05, 0.05]))
    assert found["success"][2] == pytest.approx(3 / 5)
    assert found["success"][3] == pytest.approx(
        np.mean([1 / (1 + math.exp(-5 * d)) for d in (-0.05, 0.05, 0.15, -0.05, 0.05)])
    )
    assert next(chart.title for chart in token_charts(tokens)) == "Gate of a token (% of tokens)"


def test_credit_without_a_teacher_or_without_a_gate_is_no_error() -> None:
    episodes = pd.DataFrame(
        {"phase": "train", "update": 3, "task": "train/000017", "attempt": [0, 1], "success": [False, True]}
    )
    untaught = pd.DataFrame([{**row, "teacher": None, "gate": None} for row in credit(3, 1, "x")])
    assert token_frame(untaught, episodes).empty
    ungated = pd.DataFrame([{**row, "gate": None} for row in credit(3, 1, "x")])
    tokens = token_frame(ungated, episodes)
    assert [chart.title for chart in token_charts(tokens)] == ["Teacher gap D by outcome (nats)"]
    assert outcome_table(tokens).rows[0][-1] is None


def test_a_cell_of_before_credit_says_so(tmp_path: Path) -> None:
    cell, evaluations = made(tmp_path)
    (cell.store.path / "credit.parquet").unlink()
    section = by_id(cell, evaluations)["distillation"]
    assert "No credit" in section.notes[0]
    assert section.tables == ()
    (cell.store.path / "episodes.parquet").unlink()
    assert by_id(cell, evaluations)["distillation"].charts


# --------------------------------------------------------------------------------------------------- charts


def test_shares_are_drawn_in_percent_and_what_repeats_success_is_not() -> None:
    updates = pd.DataFrame({"update": [1, 2], "success": [0.25, 0.5], "score": [0.25, 0.5], "entropy": [1.0, None]})
    drawn = curves(updates, {"success": "Success (%)", "score": "Score (%)", "entropy": "Entropy", "absent": "No"})
    assert [chart.title for chart in drawn] == ["Success (%)", "Entropy"]
    assert "update 2: 50" in drawn[0].svg
    assert drawn[1].svg.count("<circle") == 1


def test_points_lie_where_their_numbers_say() -> None:
    svg = ElementTree.fromstring(charts.lines("rate", [charts.Series("a", [0, 1, 2], [0.0, None, 1.0])], percent=True))
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in svg.iter("circle")]
    grid = {text.text: float(text.get("y", "")) - 3.5 for text in svg.iter("text") if text.get("text-anchor") == "end"}
    assert [y for _, y in dots] == pytest.approx([grid["0"], grid["100"]], abs=0.1)
    assert dots[1][0] - dots[0][0] == pytest.approx(charts.WIDTH - charts.LEFT - charts.RIGHT)
    assert not list(svg.iter("polyline"))  # no line over a point that is missing


def test_a_later_line_that_begins_earlier_stays_within_the_plot() -> None:
    drawn = [charts.Series("a", [5, 9], [1.0, 2.0]), charts.Series("b", [1, 9], [1.0, 2.0])]
    places = [float(dot.get("cx", "")) for dot in ElementTree.fromstring(charts.lines("x", drawn)).iter("circle")]
    assert min(places) == charts.LEFT
    assert max(places) == charts.WIDTH - charts.RIGHT


def test_nothing_to_draw_is_nothing_drawn_and_names_are_escaped() -> None:
    assert charts.lines("x", [charts.Series("a", [1], [math.nan])]) == ""
    assert charts.histogram("x", [0, 1], [0], "y") == ""
    assert charts.bar("x", [("a", 0.0)]) == ""
    assert charts.stacked("x", ["a"], [], [[]]) == ""
    for drawn in (
        charts.bar("<b>", [("<script>", 1.0), ("&", 3.0)]),
        charts.legend(["<script>"]),
        charts.stacked("<b>", ["<script>"], [1.0], [[1.0]]),
    ):
        assert "<script>" not in drawn
        ElementTree.fromstring(drawn)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0, 60, [0, 20, 40, 60]), (0.46, 0.53, [0.475, 0.5, 0.525]), (3, 3, [3])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high, 4) == pytest.approx(expected)
