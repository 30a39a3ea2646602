"""Whole training cells: killed and resumed, silent distillation, overflowing prompts, and input that cannot work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from toy_cells import LIBRARY_SKILL, everything, run_in_child, run_toy, toy_config, toy_library, toy_policy
from toy_envs import Doors

from harness.contracts import HarnessError
from harness.methods import SEED, Advantage, Method, get_method
from harness.recipes import vary
from harness.seed import oracle_skill
from harness.store import CellDir

WEIGHTS = "policy/model.safetensors"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("toy") / "teacher"
    toy_policy(seed=1).save(place)
    return place


@pytest.fixture(scope="module")
def grpo(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> CellDir:
    return run_toy(toy_config(policy), tmp_path_factory.mktemp("grpo"))


def trained_episodes(cell: CellDir) -> list[dict[str, Any]]:
    table = pyarrow.parquet.read_table(cell.path / "episodes.parquet").to_pylist()
    return [episode for episode in table if episode["phase"] == "train"]


# ------------------------------------------------------------------------------------------------ kill and resume

VARIANTS = {"seed-rehearsed": vary(SEED, {"rehearsal": {"samples": 4}}, "")}

KILLS = {
    "seed": [
        ("torch.nn.utils:clip_grad_norm_", 5),  # in stage 1, while it learns
        ("torch:save", 1),  # in checkpoint 0
        ("harness.trainer:Trainer._optimise", 2),  # in update 1, between two optimizer steps
        ("harness.cell:Session.evaluate", 1),  # in update 2: metrics are written, the evaluation is not
        ("pathlib:Path.rename", 1),  # checkpoint 2 is complete, but not yet in its place
        ("harness.training:Training.update", 2),  # between checkpoint 2 and update 3
        ("harness.store:replace_tree", 1),  # all is done, but not yet closed
    ],
    "grpo": [
        ("harness.trainer:Trainer._optimise", 3),  # in update 2
        ("harness.cell:Session.journal", 2),  # in update 3, between the evaluation's record and its episodes
    ],
    "opd-teacher": [
        ("torch:save", 3),  # in checkpoint 2
    ],
    "sft-teacher": [
        ("torch.nn.utils:clip_grad_norm_", 2),  # while it imitates
    ],
    "skill-grpo": [
        ("harness.cell:Session.journal", 2),  # between the start's two evaluations
        ("harness.training:Training.update", 3),
    ],
    "seed-rehearsed": [
        ("harness.training:Training.update", 2),  # its pairs of stage 1 are read again
    ],
}
"""For every method, where its run is killed, one after the other; each goes on where the one before stopped."""


@pytest.mark.slow
@pytest.mark.parametrize("method", KILLS)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    policy: Path, teacher: Path, tmp_path: Path, method: str
) -> None:
    config = toy_config(policy, VARIANTS.get(method, method), teacher, mini_batches=2)
    whole = run_toy(config, tmp_path / "whole", workers=2)
    killed = CellDir(tmp_path / "killed")
    for place in KILLS[method]:
        assert run_in_child(config, killed.path, dies_at=place) == -9, f"never came to {place}"
        assert not killed.finished
        if (killed.path / "metrics.jsonl").is_file():
            with (killed.path / "metrics.jsonl").open("a") as file:
                file.write('{"update": 9, "succ')  # as if the kill had torn a line
    assert run_in_child(config, killed.path) == 0
    expected, found = everything(whole), everything(killed)
    updates = 0 if method == "sft-teacher" else 3
    assert len(expected["metrics.jsonl"]) == updates
    assert sorted({record["update"] for record in expected["evals.jsonl"]}) == ([0, 2, 3] if updates else [0])
    for name, value in expected.items():
        assert found[name] == value, name


def test_a_task_that_comes_twice_in_an_update_numbers_its_attempts_on(policy: Path, tmp_path: Path) -> None:
    cell = run_toy(toy_config(policy, updates=1, tasks=4, panel_size=3), tmp_path)
    named = [(episode["task"], episode["attempt"]) for episode in trained_episodes(cell)]
    assert len({task for task, _ in named}) == 3
    assert len(named) == len(set(named)) == 4 * 4
    assert sorted(attempt for _, attempt in named) == sorted([0, 1, 2, 3] * 3 + [4, 5, 6, 7])


def test_a_finished_cell_is_not_run_again(grpo: CellDir, policy: Path) -> None:
    before = (grpo.path / "manifest.json").read_bytes()
    run_toy(toy_config(policy), grpo.path)
    assert (grpo.path / "manifest.json").read_bytes() == before


# ------------------------------------------------------------------------------------------- distillation or none


def without_start(**teacher: Any) -> Method:
    """SEED without stage 1: a policy of random weights writes nothing readable."""
    assert SEED.teacher is not None
    return SEED.model_copy(update={"start": "base", "teacher": SEED.teacher.model_copy(update=teacher)})


def test_unreadable_skills_leave_grpo_and_are_announced(
    policy: Path, grpo: CellDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cell = run_toy(toy_config(policy, without_start()), tmp_path)
    assert (cell.path / WEIGHTS).read_bytes() == (grpo.path / WEIGHTS).read_bytes()
    metrics = cell.records("metrics.jsonl")
    assert [record["skill/parse_rate"] for record in metrics] == [0, 0, 0]
    skills = cell.records("skills.jsonl")
    assert len(skills) == 3 * 8
    assert not any(skill["usable"] for skill in skills)
    assert metrics[-1]["ledger"]["analyzer_tokens"] > 0
    assert metrics[-1]["ledger"]["rescored_tokens"] == 0
    (warning,) = cell.read_json("manifest.json")["warnings"]
    assert "no distillation token was active in updates 1 to 3" in warning
    assert warning in caplog.text


def test_the_announcement_survives_a_kill(policy: Path, tmp_path: Path) -> None:
    config = toy_config(policy, without_start())
    assert run_in_child(config, tmp_path, dies_at=("harness.training:Training.update", 3)) == -9
    assert len(run_toy(config, tmp_path).read_json("manifest.json")["warnings"]) == 1


@pytest.mark.parametrize(
    ("teacher", "same"),
    [({"analyzer": "external"}, False), ({"context": "oracle_skill"}, False), ({"episodes": "failures"}, True)],
    ids=str,
)
def test_whose_skills_are_read(
    policy: Path, grpo: CellDir, tmp_path: Path, teacher: dict[str, Any], same: bool
) -> None:
    """A policy of random weights writes nothing readable; a scripted analyst and the environment do."""
    config = toy_config(policy, vary(without_start(), {"teacher": teacher, "signal": {"coefficient": 1.0}}, ""))
    assert config.analysis is not None
    config = config.model_copy(update={"analysis": config.analysis.model_copy(update={"annotator": "scripted"})})
    cell = run_toy(config, tmp_path)
    assert ((cell.path / WEIGHTS).read_bytes() == (grpo.path / WEIGHTS).read_bytes()) is same
    skills = cell.records("skills.jsonl")
    if teacher == {"analyzer": "external"}:
        assert {skill["author"] for skill in skills} == {"scripted"}
        assert all(skill["usable"] for skill in skills)
    if teacher == {"episodes": "failures"}:
        assert not any(skill["success"] for skill in skills)
    told = {text for text in pyarrow.parquet.read_table(cell.path / "credit.parquet")["skill"].to_pylist() if text}
    assert bool(told) is not same


def test_seed_is_sdar_where_the_library_holds_the_skill_that_would_be_written(
    policy: Path, grpo: CellDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The analyst writes of every episode what the environment knows of its task; so does the library, task by task."""
    monkeypatch.setattr(Doors, "annotate", lambda env, episode: ("", oracle_skill(Doors(), episode.task)))
    loud = {"signal": {"coefficient": 1.0}}
    written = toy_config(policy, vary(without_start(analyzer="external"), loud, ""))
    assert written.analysis is not None
    written = written.model_copy(update={"analysis": written.analysis.model_copy(update={"annotator": "scripted"})})
    known = toy_config(policy, vary(without_start(context="oracle_skill"), loud, ""))
    library = tmp_path / "library.json"
    toy_library(library, {task.id: oracle_skill(Doors(), task) for task in Doors().panel("train", 3)})
    sdar = toy_config(policy, vary(get_method("sdar"), loud, "")).model_copy(update={"library": str(library)})
    cells = [run_toy(config, tmp_path / name) for name, config in (("a", written), ("b", known), ("c", sdar))]
    weights = {(cell.path / WEIGHTS).read_bytes() for cell in cells}
    assert len(weights) == 1
    assert (grpo.path / WEIGHTS).read_bytes() not in weights
    read = [pyarrow.parquet.read_table(cell.path / "credit.parquet")["teacher"].to_pylist() for cell in cells]
    assert read[0] == read[1] == read[2]


def test_rlsd_without_its_scale_is_grpo_to_the_last_bit(policy: Path, grpo: CellDir, tmp_path: Path) -> None:
    """Degenerate groups have no advantage to scale: they are neither re-scored nor trained on."""
    still = vary(get_method("rlsd"), {"signal": {"coefficient": 0.0}}, "")
    cell = run_toy(toy_config(policy, still), tmp_path)
    assert (cell.path / WEIGHTS).read_bytes() == (grpo.path / WEIGHTS).read_bytes()
    spent = cell.records("metrics.jsonl")[-1]["ledger"]
    assert 0 < spent["rescored_tokens"] == grpo.records("metrics.jsonl")[-1]["ledger"]["trained_tokens"]


def test_skills_in_the_prompts_of_training_and_evaluation(policy: Path, grpo: CellDir, tmp_path: Path) -> None:
    cell = run_toy(toy_config(policy, "skill-grpo"), tmp_path)
    evaluations = cell.records("evals.jsonl")
    assert [(record["update"], record["skills"]) for record in evaluations] == [
        (update, context) for update in (0, 2, 3) for context in ("plain", "library")
    ]
    assert evaluations[0]["results"] == grpo.records("evals.jsonl")[0]["results"]  # the same policy, ordinary prompts
    episodes = pyarrow.parquet.read_table(cell.path / "episodes.parquet").to_pylist()
    for episode in episodes:
        if episode["detail"]:
            told = [LIBRARY_SKILL in step["prompt"] for step in json.loads(episode["trace"])]
            assert all(told) if episode["skills"] == "library" else not any(told)
    assert {episode["skills"] for episode in episodes if episode["phase"] == "train"} == {"library"}


def test_the_empty_skill_control_is_grpo_and_silent_on_purpose(policy: Path, grpo: CellDir, tmp_path: Path) -> None:
    cell = run_toy(toy_config(policy, without_start(context="empty_skill")), tmp_path)
    assert (cell.path / WEIGHTS).read_bytes() == (grpo.path / WEIGHTS).read_bytes()
    assert cell.read_json("manifest.json")["warnings"] == []
    assert cell.records("skills.jsonl") == []


# --------------------------------------------------------------------------------------------- episodes left out


def test_overflowing_episodes_have_no_training_weight(policy: Path, tmp_path: Path) -> None:
    keep = Method(name="keep", summary="", advantage=Advantage(degenerate="keep"))
    roomy = toy_config(policy, keep, updates=1)
    config = roomy.model_copy(update={"env": roomy.env.model_copy(update={"max_prompt_tokens": 12})})
    cell = run_toy(config, tmp_path)
    episodes, (metrics,) = trained_episodes(cell), cell.records("metrics.jsonl")
    overflown = [episode for episode in episodes if episode["stop_reason"] == "context_overflow"]
    assert 0 < len(overflown) < len(episodes)
    assert not any(episode["success"] for episode in overflown)
    assert metrics["stop_reasons"]["context_overflow"] == len(overflown)
    assert metrics["rows"] == sum(e["steps"] for e in episodes) - sum(e["steps"] for e in overflown)


# ------------------------------------------------------------------------------------------- input that cannot work


def test_scripted_policies_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="'random' cannot be trained"):
        run_toy(toy_config("random"), tmp_path)


def test_a_teacher_with_other_tokens_is_refused(policy: Path, tmp_path: Path) -> None:
    toy_policy(vocabulary=300).save(tmp_path / "teacher")
    with pytest.raises(HarnessError, match="their vocabularies differ"):
        run_toy(toy_config(policy, "opd-teacher", tmp_path / "teacher"), tmp_path / "cell")


def test_training_on_the_evaluation_panel_is_refused(policy: Path, tmp_path: Path) -> None:
    config = toy_config(policy)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"panel": "train"})})
    with pytest.raises(HarnessError, match="would leak"):
        run_toy(config, tmp_path)
