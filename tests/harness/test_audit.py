"""The skill audit counts what it says, finds what was planted, and asks the final policy the right question."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from toy_cells import run_toy, toy_config, toy_policy
from toy_envs import Doors

from harness.audit import _run, add_audit, audit, show
from harness.audit_journal import (
    Unmeasurable,
    UpdateAudit,
    audit_updates,
    cluster_mean,
    drifts,
    episode_shifts,
    leaks,
    outcomes,
    written_skills,
)
from harness.audit_policy import shuffle_test
from harness.contracts import HarnessError
from harness.policy.load import load_local
from harness.store import CellDir

SILENT = lambda *_: None  # noqa: E731


class Secretive(Doors):
    """The prize's door is a secret."""

    def secrets(self) -> tuple[str, ...]:
        return (self.oracle(),)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> CellDir:
    """A SEED cell whose updates change next to nothing, so that its final policy is that of every update's start."""
    place = tmp_path_factory.mktemp("audit")
    toy_policy().save(place / "policy")
    config = toy_config(place / "policy", "seed", learning_rate=1e-12, detail=2)
    return run_toy(config, place / "cell")


# ------------------------------------------------------------------------------------------- from the journal


@pytest.mark.parametrize(
    ("text", "known", "leaking"),
    [
        ("Open the left door.", "You have opened right", True),
        ("Open the left door.", "You have opened left", False),
        ("Open the right door.", "You have opened middle", False),
        ("", "", False),
    ],
)
def test_a_leak_names_a_secret_that_the_episode_never_showed(text: str, known: str, leaking: bool) -> None:
    assert leaks(text, known, ("left",)) is leaking


def test_updates_are_audited_one_by_one() -> None:
    with closing(Secretive()) as env:
        panel = env.panel("train", 2)
        env.reset(options={"task": panel.tasks[0]})
        prize = env.oracle()
        rows = [  # update, text, usable, what the author knew
            (-1, "Open drawer 3.", True, "drawer 3"),
            (-1, "Open drawer 3.", True, "drawer 4"),
            (1, "Open drawer 3.", True, ""),
            (1, f"Open the {prize} door now.", True, ""),
            (1, "", False, ""),
        ]
        skills = pd.DataFrame(rows, columns=["update", "text", "usable", "known"])
        skills = skills.assign(task=panel.tasks[0].id, shown=skills["known"])
        shifts = pd.DataFrame({"update": [1, 1], "shift": [1.0, 0.0], "tokens": [2, 2]})
        first, second = audit_updates(skills, shifts, env, panel)
    assert first == UpdateAudit(-1, 2, 1.0, 3.0, 0.5, 0.0, 0.5, 0.0, None)
    assert second == UpdateAudit(1, 3, pytest.approx(2 / 3), 4.0, 0.0, 0.5, 0.0, 0.5, 0.25)


def test_a_task_that_is_gone_is_named_and_no_skills_are_no_audit() -> None:
    with closing(Doors()) as env:
        row = {"update": 1, "text": "a", "usable": True, "known": "", "shown": "", "task": "train/99"}
        with pytest.raises(HarnessError, match="no training task 'train/99' any more"):
            audit_updates(pd.DataFrame([row]), pd.DataFrame(), env, env.panel("train", 2))
        with pytest.raises(Unmeasurable, match="writes no skills"):
            audit_updates(pd.DataFrame(), pd.DataFrame(), env, env.panel("train", 2))


def test_drift_compares_the_ends_of_rl_and_leaves_stage_1_out() -> None:
    audits = [
        UpdateAudit(update, 8, 1.0, float(words), 0.0, 0.0, 0.0, None, 0.1) for update, words in enumerate(range(9), -1)
    ]
    found = {drift.quantity: (drift.first, drift.last) for drift in drifts(audits[:1] + audits[2:])}
    assert found["words"] == (2.5, 7.5)
    assert "leaks" not in found
    with pytest.raises(Unmeasurable, match="takes three"):
        drifts(audits[:3])


def test_sign_agreement_and_gap_are_what_was_planted() -> None:
    shift = [2.0, 1.0, -1.0, -3.0, 0.0]
    shifts = pd.DataFrame(
        {"shift": shift, "tokens": 2, "success": [True, True, True, False, False], "task": list("aabbc"), "update": 1}
    )
    success, failure, both = outcomes(shifts)
    assert (success.episodes, success.agreement.value) == (3, pytest.approx(2 / 3))
    assert (failure.episodes, failure.agreement.value) == (2, 0.5)  # no shift at all agrees with nothing
    assert both.agreement.value == 0.6
    assert both.gap.value == pytest.approx(np.mean(shift) / 2)
    assert both.gap.low <= both.gap.value <= both.gap.high
    with pytest.raises(Unmeasurable, match=r"train\.detail"):
        outcomes(shifts[:0])


def test_intervals_know_that_episodes_of_a_task_belong_together() -> None:
    rng = np.random.default_rng(0)
    per_task = rng.normal(size=20)
    values = np.repeat(per_task, 8) + 0.01 * rng.normal(size=160)
    together = cluster_mean(list(values), list(np.repeat(np.arange(20), 8).astype(str)), "x")
    alone = cluster_mean(list(values), [str(n) for n in range(160)], "x")
    assert together.value == alone.value == pytest.approx(values.mean())
    assert together.margin > 2 * alone.margin
    assert together.margin == pytest.approx(1.96 * per_task.std() / 20**0.5, rel=0.15)
    for values_alike, clusters in (([1.0, 2.0], ["a", "a"]), ([1.0, 1.0], ["a", "b"])):
        assert np.isnan(cluster_mean(values_alike, clusters, "x").low)


# ------------------------------------------------------------------------------------------ from the policy


def test_a_cells_skills_belong_to_its_episodes(cell: CellDir) -> None:
    skills = written_skills(cell)
    assert len(skills) == len(cell.records("skills.jsonl"))
    assert all("You have opened" in shown for shown in skills["shown"])
    assert (skills["known"].str.len() > skills["shown"].str.len()).all()


def test_the_shuffle_test_scores_kept_tokens_as_training_did(cell: CellDir) -> None:
    skills, shifts = written_skills(cell), episode_shifts(cell)
    assert len(shifts)
    stranger = {**skills.iloc[-1].to_dict(), "task": "elsewhere", "text": "Avoid the middle door."}
    skills = pd.concat([skills, pd.DataFrame([stranger])], ignore_index=True)
    policy = load_local(str(cell.path))
    found = shuffle_test("final", policy, cell, skills, 1000, 1.0, SILENT)
    assert found.episodes == len(shifts)
    assert found.own.value == pytest.approx((shifts["shift"] / shifts["tokens"]).mean(), abs=1e-4)
    assert found.difference.value == pytest.approx(found.own.value - found.other.value, abs=1e-9)
    assert found.difference.value != 0
    assert shuffle_test("final", policy, cell, skills, 2, 1.0, SILENT).episodes == 2
    with pytest.raises(Unmeasurable, match="about one task, or alike"):
        shuffle_test("final", policy, cell, skills.assign(text="Open the left door."), 8, 1.0, SILENT)
    with pytest.raises(Unmeasurable, match="kept in detail"):
        shuffle_test("final", policy, cell, skills.assign(usable=False), 8, 1.0, SILENT)


def test_the_audit_is_kept_in_the_cell_and_says_what_it_could_not_measure(
    cell: CellDir, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_audit(parser.add_subparsers())
    options = parser.parse_args(["audit", str(cell.path), "--tasks", "3", "--episodes", "4"])
    assert options.run is _run
    assert _run(options) == 0
    found = json.loads((cell.path / "audit.json").read_text())
    assert found["format"] == "skill-audit-1"
    assert [row["update"] for row in found["updates"]] == [-1, 1, 2, 3]
    assert {row["outcome"] for row in found["outcomes"]} <= {"success", "failure", "all"}
    totals = [(row["weights"], row["tasks"]) for row in found["usefulness"] if row["after"] == "all"]
    assert totals == [("start", 3), ("final", 3)]
    unmeasured = {part for part in found if found[part] is None}
    assert set(found["missing"]) == unmeasured
    printed = capsys.readouterr().out
    assert "skills by update" in printed
    assert "audit.json" in printed
    assert audit(cell.path, 4, 3, SILENT) == found  # nothing in it is left to chance


def test_a_cell_without_updates_has_nothing_in_detail(tmp_path: Path) -> None:
    cell = CellDir(tmp_path)
    assert written_skills(cell).empty
    assert episode_shifts(cell).empty


def test_nothing_to_audit_is_refused_in_one_line(tmp_path: Path) -> None:
    evaluation = toy_config("random").model_copy(update={"method": None, "train": None})
    run_toy(evaluation, tmp_path)
    with pytest.raises(HarnessError, match="nothing was trained"):
        audit(tmp_path, 4, 4, SILENT)


def test_parts_that_are_missing_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parts = dict.fromkeys(("updates", "drift", "outcomes", "shuffle", "usefulness"))
    show({**parts, "missing": {"shuffle": "no [reason]"}}, Console())
    assert capsys.readouterr().out.strip() == "not measured: shuffle: no [reason]"
