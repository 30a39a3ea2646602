"""A report of a large run: its pages, its memory and its time stay within bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.perf import report
from harness.records import read_episodes, read_traces
from harness.reporting import site_episodes
from harness.reporting.frames import read_cells
from harness.reporting.site_episodes import most_per_cell, read_told, shown


def test_all_episodes_of_a_usual_run_are_shown() -> None:
    assert shown(np.array([True, False, False]), 3).tolist() == [0, 1, 2]
    assert most_per_cell([3000, 100, 4000]) == 4000


def test_room_of_small_cells_goes_to_large_ones() -> None:
    assert most_per_cell([10, 100, 100], 110) == 50
    assert most_per_cell([100, 100], 100) == 50
    assert most_per_cell([]) == 0


def test_detailed_episodes_come_first_and_all_are_drawn_evenly() -> None:
    detailed = np.arange(1000) % 10 == 0
    rows = shown(detailed, 90)
    assert len(rows) == 90
    assert detailed[rows].sum() == 60
    assert np.diff(rows[detailed[rows]]).max() == 20
    assert np.diff(rows[~detailed[rows]]).max() < 40
    assert detailed[shown(detailed, 300)].sum() == 100  # all of them fit
    assert detailed[shown(~detailed, 950)].sum() == 100  # there are few others


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight cells of 7,000 episodes."""
    directory = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "SEEDS", range(1))
        report.write_run(directory, report.Size(updates=40, evaluations=10, panel=188))
    return directory


def test_only_the_chosen_episodes_are_read(run: Path) -> None:
    cell = next(cell for cell in read_cells(run)[0] if cell.config.method and cell.config.method.writes_skills)
    told, everything = read_told(cell, 500), read_episodes(cell.store)
    assert (len(told.episodes), told.recorded) == (500, 7000)
    rows = shown(everything["detail"].to_numpy(bool), 500)
    assert told.episodes["trace"].tolist() == everything["trace"].iloc[rows].tolist()
    assert read_traces(cell.store, np.array([0, 6999])) == everything["trace"].iloc[[0, 6999]].tolist()
    assert 0 < len(told.credit) < 8 * 40 * report.STEPS
    assert set(told.credit["task"]) <= set(told.episodes["task"])


def test_report_is_bounded(run: Path) -> None:
    cost = report.reporting_cost(run)
    assert cost.gibibytes < 0.8
    assert cost.cpu < 60  # a million take 31 s; this bound is for slow machines
    pages = list((run / "report" / "episodes").glob("*.html"))
    assert len(pages) == 8
    assert "6,250 of 7,000 recorded episodes" in pages[0].read_text()
    index = next((run / "report" / "data").glob("*.episodes.js")).read_text()
    value = json.loads("[" + index.removeprefix("harness.receive(").removesuffix(");\n") + "]")[1]
    assert len(value["steps"]) == site_episodes.MOST_SHOWN // 8
