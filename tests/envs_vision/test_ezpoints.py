"""EZPoints: rules against the reference's values, deals, expert, pictures, languages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs_vision.ezpoints import EZPoints
from envs_vision.ezpoints.drawing import draw_table
from envs_vision.ezpoints.rules import (
    ACTIONS,
    RANKS,
    SUITS,
    Card,
    State,
    draw_ranks,
    evaluate,
    parse_cards,
    solve,
    step,
)
from harness.contracts import Episode, HarnessError, Prompt, Response, Step, StopReason, Task, View


def task_of(cards: str) -> Task:
    return Task("t", "EZPoints-v1", "train", "", {"cards": cards}, "")


def play(env: EZPoints, task: Task, actions: list[str]) -> Episode:
    """Take the actions (or, with none given, the oracle's) until the episode ends or they run out."""
    observation, info = env.reset(options={"task": task})
    episode = Episode(task, 0, env.task_text(observation))
    queue = iter(actions)
    while True:
        action = next(queue, "none") if actions else env.oracle()
        text = env.respond(action, env.thought(action))
        shown = observation
        observation, reward, terminated, truncated, info = env.step(action)
        episode.steps.append(
            Step(shown, Prompt("<image>", shown["images"]), Response(text), action, info["valid"], reward)
        )
        if terminated or truncated:
            over = StopReason.FAILURE if terminated else StopReason.MAX_STEPS
            episode.stop_reason = StopReason.SUCCESS if info["success"] else over
            episode.score = info["score"]
            return episode


# ----------------------------------------------------------------------------------------------------- rules


def test_rules_equal_the_reference(golden: Callable[[str], Any]) -> None:
    for case in golden("ezpoints")["cases"]:
        state = State(tuple(case["cards"]))
        for i, (action, expected) in enumerate(zip(case["actions"], case["steps"], strict=True)):
            outcome = step(state, action)
            state = outcome.state
            where = f"{case['id']} step {i}"
            assert outcome.reward == expected["reward"], where
            assert (outcome.done, outcome.stuck, outcome.won) == (
                expected["terminated"],
                expected["truncated"],
                expected["won"],
            ), where
            assert list(state.formula) == expected["formula"], where
            assert list(state.used) == expected["used"], where


def test_parser_equals_the_reference(golden: Callable[[str], Any]) -> None:
    env = EZPoints()
    for case in golden("action_parsers")["ezpoints"]:
        action, valid = env.parse(case["input"])
        index = ACTIONS.index(action) if valid else -1
        assert (index, int(valid)) == (case["expected"]["action_index"], case["expected"]["valid"]), case["id"]


def test_formulas_are_arithmetic() -> None:
    assert evaluate(("+", "2", "*", "*", "3")) == 8
    assert evaluate(("1", "2")) == 12
    assert evaluate(("2", "*")) is None
    assert evaluate(()) is None


# ----------------------------------------------------------------------------------------------------- deals


def test_pair_frequencies_equal_the_reference(golden: Callable[[str], Any]) -> None:
    """Chi-square over the 13 pairs; the 99.9 % point at 12 degrees of freedom is 32.9."""
    draws = 20_000
    rng = np.random.default_rng(0)
    seen = Counter(tuple(min(rank, 10) for rank in draw_ranks(rng)) for _ in range(draws))
    expected = {
        tuple(f["cards"]): f["frequency"] * draws for f in golden("ezpoints")["generator_pair_frequencies_200k"]
    }
    assert set(seen) == set(expected)
    assert sum((seen[pair] - n) ** 2 / n for pair, n in expected.items()) < 32.9


def test_panels_are_disjoint_and_keep_the_frequencies() -> None:
    env = EZPoints()
    train, evaluation = env.panel("train"), env.panel("eval", 1024)
    assert not {task.fingerprint for task in train} & {task.fingerprint for task in evaluation}
    assert len({task.id for task in (*train, *evaluation)}) == 2000 + 1024
    assert env.panel("eval").tasks == evaluation.tasks[:128]
    for panel in (train, evaluation):
        tens = sum(10 in (card.value for card in parse_cards(task.spec["cards"])) for task in panel)
        assert abs(tens / len(panel) - 0.375) < 0.05
        assert len({task.spec["cards"] for task in panel}) > 130


def test_deals_do_not_depend_on_the_process() -> None:
    code = "from envs_vision.ezpoints import EZPoints; print(EZPoints().panel('train').hash)"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == EZPoints().panel("train").hash


def test_bad_input_fails_in_one_line() -> None:
    with pytest.raises(HarnessError, match="max_steps=0"):
        EZPoints(max_steps=0)
    with pytest.raises(HarnessError, match="did you mean 'train'"):
        EZPoints().panel("training")
    with pytest.raises(HarnessError, match="65536 tasks"):
        EZPoints().panel("eval", 70_000)


# ---------------------------------------------------------------------------------------------------- expert


def test_oracle_wins_every_deal_and_mends_detours() -> None:
    env = EZPoints()
    for cards in {task.spec["cards"] for task in env.panel("eval")}:
        episode = play(env, task_of(cards), [])
        assert episode.success
        assert (episode.reward, episode.score, len(episode.steps)) == (10.0, 1.0, 4)
    assert solve(State((2, 6), ("+",))) == ("2", "*", "6", "=")
    assert solve(State((2, 6), ("2", "6"))) is None


def test_steps_run_out() -> None:
    env = EZPoints()
    env.reset(options={"task": task_of("3S 4H")})
    for _ in range(7):
        assert env.step("none")[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step("3")
    assert (reward, terminated, truncated, info["success"], info["valid"]) == (0.0, False, True, False, True)


# -------------------------------------------------------------------------------------------------- pictures


def test_pictures_show_the_state() -> None:
    every = [Card(rank, suit) for rank in RANKS for suit in SUITS]
    tables = [(card, Card(2, "S")) for card in every] + [(Card(2, "S"), card) for card in every[1:]]
    assert len({draw_table(table, ()).tobytes() for table in tables}) == len(tables)
    formulas = [(), *((action,) for action in ACTIONS[:-1]), ("3", "+"), ("3", "+", "4"), ("+",) * 6]
    assert len({draw_table(tables[0], formula).tobytes() for formula in formulas}) == len(formulas)


def test_ranks_and_entries_fill_one_square_each() -> None:
    """Squares of 50 pixels are one visual token each at 168 x 168: nothing spills into a neighbour."""
    tables = [draw_table((Card(rank, "S"), Card(2, "S")), ()) for rank in RANKS]
    changed = (np.stack(tables) != tables[0]).any(axis=(0, 3))
    assert {(int(r) // 50, int(c) // 50) for r, c in np.argwhere(changed)} == {(1, 1)}
    entry = (draw_table((Card(2, "S"), Card(10, "S")), ("10",)) != draw_table((Card(2, "S"), Card(10, "S")), ())).any(2)
    assert {(int(r) // 50, int(c) // 50) for r, c in np.argwhere(entry)} == {(4, 0)}


# ------------------------------------------------------------------------------------------------- languages


def test_prompts(golden: Callable[[str], Any]) -> None:
    env = EZPoints()
    for case in golden("prompts_structure")["ezpoints"]:
        view = View("", 1, (), " ".join(case["formula"]), (np.zeros((300, 300, 3), np.uint8),), ACTIONS)
        text = env.prompt(view, "paper").text
        assert text.startswith("<image>")
        assert f"The current formula is: {case['shown_formula']}\n" in text
        parts = ("<image>", "expert", "equals 12", "card from 2", "Every action", "Reward", "The current formula")
        places = [text.index(part) for part in (*parts, "Choose the next", '"thoughts"', 'second is "action"')]
        assert places == sorted(places)
        compact = env.prompt(view, "compact").text
        assert compact == f"<image>\nformula: {' '.join(case['formula'])}".strip()


def test_answers_read_as_written() -> None:
    env = EZPoints()
    for action in ACTIONS:
        assert env.parse(env.respond(action, 'the "action": 3 and 4')) == (action, True)
    assert env.respond("3", "3 4") == '{"thoughts": "3 4", "action": "3"}'


def test_annotations() -> None:
    env = EZPoints()
    task = task_of("3S 4H")
    env.reset(options={"task": task})
    skill = "The cards are 3 and 4: play 3 * 4 =."
    assert env.oracle_skill() == skill
    assert env.thought("*") == "3 4"
    assert env.annotate(play(env, task, [])) == ("3 * 4 made 12.", skill)
    assert env.annotate(play(env, task, ["4", "+", "3", "="])) == ("4 + 3 did not make 12.", skill)
    assert env.annotate(play(env, task, ["4", "+"])) == ("4 + was not finished.", skill)
    assert env.annotate(play(env, task, ["="])) == ("No formula was built.", skill)


def test_gymnasium_accepts_it() -> None:
    check_env(EZPoints(), skip_render_check=True)
