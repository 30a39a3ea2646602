"""ALFWorld as the field plays it: official splits, whole or damaged; micro and macro averages; official experts."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs_text.alfworld import ALFWorld
from envs_text.alfworld.games import SPLIT_SIZES, TASK_KINDS, official_split
from envs_text.alfworld.generator import generate, write_game
from harness.cli import main
from harness.contracts import HarnessError

needs_official = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason="alfworld is not installed")


def write_split(root: Path, split: str, count: int) -> list[Path]:
    """Trials with the little that decides whether a game is in a split."""
    trials = [root / "json_2.1.1" / split / f"pick-{n:03d}" / f"trial_{n:03d}" for n in range(count)]
    for n, trial in enumerate(trials):
        trial.mkdir(parents=True)
        (trial / "traj_data.json").write_text(json.dumps({"task_type": TASK_KINDS[n % 6]}))
        (trial / "game.tw-pddl").write_text('{"solvable": true}')
    return trials


def message(call: Callable[[], object]) -> str:
    """The one line with which a call refuses."""
    with pytest.raises(HarnessError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ splits


def test_the_seen_split_is_the_canonical_one(alfworld_data: Path) -> None:
    env = ALFWorld(data=str(alfworld_data))
    panel = env.panel("valid_seen")
    assert panel.notes == (
        "left out: 34 with a movable receptacle",
        "left out: 30 with sliced objects",
        "left out: 47 without a solution",
    )
    assert Counter(task.kind for task in panel) == dict(zip(TASK_KINDS, (35, 13, 27, 16, 25, 24), strict=True))
    assert len({task.fingerprint for task in panel}) == len(panel) == 140
    assert not {t.fingerprint for t in panel} & {t.fingerprint for t in env.panel("train")}


@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_a_whole_split_needs_no_note_and_one_that_is_not_says_so(split: str, tmp_path: Path) -> None:
    full = SPLIT_SIZES[split]
    trials = write_split(tmp_path, split, full)
    assert official_split(tmp_path, split) == (trials, ())
    for number, trial in enumerate(trials[:4]):
        (trial / ("game.tw-pddl" if number else "traj_data.json")).unlink()
    (trials[4] / "game.tw-pddl").write_text("{}")
    (trials[5] / "game.tw-pddl").write_text('{"solvable": false}')
    (trials[6] / "traj_data.json").write_text('{"task_type": "juggle"}')
    trials[7].parent.rename(trials[7].parent.with_name("pick-movable"))
    assert official_split(tmp_path, split)[1] == (
        f"{full - 8} playable games; the full {split} split has {full}",
        "left out: 3 lacking game.tw-pddl (pick-001/trial_001, pick-002/trial_002, pick-003/trial_003)",
        "left out: 1 lacking traj_data.json (pick-000/trial_000)",
        "left out: 1 never checked for a solution (pick-004/trial_004)",
        "left out: 1 of another task type",
        "left out: 1 with a movable receptacle",
        "left out: 1 without a solution",
    )


def test_many_damaged_games_are_counted_and_a_few_named(tmp_path: Path) -> None:
    for trial in write_split(tmp_path, "valid_seen", 140)[:20]:
        (trial / "game.tw-pddl").unlink()
    assert official_split(tmp_path, "valid_seen")[1][1].endswith("pick-002/trial_002 and 17 more)")


@needs_official
def test_damaged_files_are_named_in_one_line(tmp_path: Path) -> None:
    trial = write_game(generate(0, "eval", "small"), tmp_path)
    (tmp_path / "json_2.1.1" / "eval").rename(tmp_path / "json_2.1.1" / "valid_seen")
    trial = tmp_path / "json_2.1.1" / "valid_seen" / trial.relative_to(tmp_path / "json_2.1.1" / "eval")

    def panel(name: str = "valid_seen") -> str:
        from envs_text.alfworld.env import _trials

        _trials.cache_clear()
        return message(lambda: ALFWorld(data=str(tmp_path)).panel(name))

    assert panel("valid_sen") == "unknown panel of ALFWorld-v1 'valid_sen'; did you mean 'valid_seen'?"
    assert panel("valid_unseen") == f"unknown split of {tmp_path}/json_2.1.1 'valid_unseen'; did you mean 'valid_seen'?"
    whole = (trial / "game.tw-pddl").read_text()
    (trial / "game.tw-pddl").write_text(whole[:-20])
    assert panel().startswith(f"{trial / 'game.tw-pddl'} is not valid JSON: ")
    (trial / "game.tw-pddl").write_text(json.dumps({**json.loads(whole), "pddl_problem": "(define (problem"}))
    assert f"cannot load ALFWorld game valid_seen/small/{trial.name}: " in panel()
    (trial / "game.tw-pddl").write_text(whole)
    (trial / "traj_data.json").write_text(json.dumps({"task_type": TASK_KINDS[0]}))
    assert panel() == f"{trial / 'traj_data.json'}: no 'pddl_params'"
    (trial / "game.tw-pddl").unlink()
    assert "holds no playable game (1 left out)" in panel()


def test_eval_averages_over_games_and_over_the_six_types(
    alfworld_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["eval", "--policy", "oracle", "--env", "ALFWorld-v1", "--panel", "valid_seen", "--panel-size", "24"]
    arguments += ["--env-option", f"data={alfworld_data}", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f" {row} " in shown for row in (*TASK_KINDS, "micro average", "macro average"))
    assert " 6 kinds " in shown
    assert "panel: left out: 47 without a solution" in shown


# ----------------------------------------------------------------------------------------------------------- experts


def play(env: ALFWorld, task: Any, others: float = 0.0) -> tuple[list[str], bool]:
    """Commands of an episode in which someone else gives a share of the commands, and whether it was won."""
    rng = random.Random(0)
    _, info = env.reset(options={"task": task})
    commands, over, won = [], False, False
    while not over:
        wish = env.oracle()
        assert wish in info["admissible"]
        commands.append(wish if rng.random() >= others else rng.choice(info["admissible"]))
        _, _, won, truncated, info = env.step(commands[-1])
        over = won or truncated
    assert env.oracle()  # asked once more after the end, an expert does no harm
    return commands, won


@needs_official
@pytest.mark.parametrize("rules", ["current", "2.1.1"])
def test_the_official_experts_win(rules: str) -> None:
    for expert in ("handcoded", "planner"):
        env = ALFWorld(engine="textworld", expert=expert, rules=rules, max_steps=50)
        for task in env.panel("eval", 3):
            assert play(env, task)[1], (expert, task.id)
        env.close()


@needs_official
def test_the_handcoded_expert_repeats_itself_and_bears_with_others() -> None:
    env = ALFWorld(engine="textworld", expert="handcoded", max_steps=25)
    state = random.getstate()
    task = env.panel("eval", 6).tasks[5]
    assert play(env, task, others=0.5) == play(env, task, others=0.5)
    assert random.getstate() == state
    env.close()


@needs_official
def test_the_handcoded_expert_is_the_package_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command for command what alfworld's own wrapper says, given the same draws."""
    monkeypatch.setenv("ALFWORLD_DATA", os.environ.get("ALFWORLD_DATA", ""))
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert, AlfredInfos
    from textworld.envs.pddl.pddl import PddlEnv

    task = ALFWorld().panel("eval", 3).tasks[2]
    ours = ALFWorld(engine="textworld", expert="handcoded", max_steps=50)
    theirs = AlfredExpert(AlfredInfos(AlfredDemangler(PddlEnv())))
    ours.reset(options={"task": task})
    theirs.load(str(write_game(generate(2, "eval", "small"), tmp_path) / "game.tw-pddl"))
    state = theirs.reset()
    for number in range(1, 50):
        command = ours.oracle()
        assert state["extra.expert_plan"] == [command]
        _, _, won, _, _ = ours.step(command)
        if won:
            break
        random.seed(f"{task.id} {number}")
        state, _, _ = theirs.step(command)
    assert won
    ours.close()


def test_an_official_expert_needs_the_official_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set engine=textworld" in message(lambda: ALFWorld(expert="handcoded"))
    monkeypatch.setattr("envs_text.alfworld.official.find_spec", lambda name: None)
    assert message(lambda: ALFWorld(engine="textworld", expert="handcoded")) == (
        "the official ALFWorld engine is not installed: pip install 'seed-harness[alfworld]'"
    )
