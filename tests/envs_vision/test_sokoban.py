"""Sokoban: rules against the reference's values, levels, expert, pictures, languages."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs_vision.sokoban import Sokoban
from envs_vision.sokoban.drawing import draw_room
from envs_vision.sokoban.levels import make_level
from envs_vision.sokoban.rules import DIRECTIONS, Room, State, format_room, move, parse_room, solve, step
from harness.contracts import Episode, HarnessError, Prompt, Response, Step, StopReason, Task, View

ACTIONS = ("still", "up", "down", "left", "right")
CORRIDOR = "#######/#@$  .#/#######"


def room_of(fixed: list[list[int]], state: list[list[int]]) -> Room:
    def where(grid: list[list[int]], *codes: int) -> frozenset[int]:
        return frozenset(i for i, code in enumerate(itertools.chain(*grid)) if code in codes)

    (player,) = where(state, 5)
    return Room(len(fixed), len(fixed[0]), where(fixed, 0), where(fixed, 2), where(state, 3, 4), player)


def codes_of(room: Room) -> str:
    return format_room(room).replace("/", "").translate(str.maketrans("# .*$@+", "0123455"))


def play(env: Sokoban, task: Task, actions: list[str]) -> Episode:
    """Take the actions (or, with none given, the oracle's) until the episode ends."""
    observation, info = env.reset(options={"task": task})
    episode = Episode(task, 0, env.task_text(observation))
    queue = iter(actions)
    while True:
        action = next(queue) if actions else env.oracle()
        text = env.respond(action, env.thought(action))
        shown = observation
        observation, reward, terminated, truncated, info = env.step(action)
        episode.steps.append(
            Step(shown, Prompt("<image>", shown["images"]), Response(text), action, info["valid"], reward)
        )
        if terminated or truncated:
            episode.stop_reason = StopReason.SUCCESS if info["success"] else StopReason.MAX_STEPS
            episode.score = info["score"]
            return episode


def task_of(level: str) -> Task:
    return Task("t", "Sokoban-v1", "train", "", {"level": level}, "")


# ----------------------------------------------------------------------------------------------------- rules


def test_rules_equal_the_reference(golden: Callable[[str], Any]) -> None:
    for case in golden("sokoban")["cases"]:
        state = State(room_of(case["room_fixed"], case["room_state"]))
        for i, code in enumerate(case["actions"]):
            outcome = step(state, ACTIONS[code])
            state = outcome.state
            where = f"{case['id']} step {i}"
            assert codes_of(state.room) == case["states"][i], where
            assert outcome.reward == pytest.approx(case["rewards"][i], abs=1e-9), where
            assert outcome.won == case["won"][i], where
            assert outcome.effective == case["effective"][i], where
            assert state.counted == case["boxes_on_target"][i], where
            assert state.moves == case["num_env_steps"][i], where
            done = code != 0 and (outcome.won or state.moves == case["max_steps"])
            assert done == case["done"][i], where


def test_parser_equals_the_reference(golden: Callable[[str], Any]) -> None:
    env = Sokoban()
    for case in golden("action_parsers")["sokoban"]:
        action, valid = env.parse(case["input"])
        code = 0 if action == "none" else ACTIONS.index(action)
        assert (code, int(valid)) == (case["expected"]["action"], case["expected"]["valid"]), case["id"]


def test_push_and_pull_back_nets_zero() -> None:
    room = parse_room("######/#@$. #/#    #/######")
    onto = step(State(room), "right")
    assert onto.reward == pytest.approx(10.9)
    off = step(onto.state, "right")
    assert off.reward == pytest.approx(-1.1)


# ---------------------------------------------------------------------------------------------------- levels


def test_levels_are_solvable_and_as_hard_as_the_reference(golden: Callable[[str], Any]) -> None:
    def length(room: Room) -> int:
        solution = solve(room)
        assert solution
        return len(solution)

    for boxes in (1, 2):
        ours = [length(make_level(seed, 6, boxes, 30, 15)) for seed in range(300)]
        reference = [
            length(room_of(*([[int(c) for c in case[key]][r : r + 6] for r in range(0, 36, 6)] for key in KEYS)))
            for case in golden("sokoban")["generated_rooms_6x6_depth30"]
            if case["num_boxes"] == boxes
        ]
        assert max(ours) <= 15
        error = np.std(reference) / len(reference) ** 0.5
        assert abs(np.mean(ours) - np.mean(reference)) < 2 * error


KEYS = ("room_fixed", "room_state")


def test_impossible_options_fail_in_one_line() -> None:
    with pytest.raises(HarnessError, match="fewer boxes"):
        make_level(0, 5, 5, 1, 1)
    with pytest.raises(HarnessError, match="boxes=0"):
        Sokoban(boxes=0)
    with pytest.raises(HarnessError, match="did you mean 'eval'"):
        Sokoban().panel("evaluation")


def test_panels_are_disjoint_and_nested() -> None:
    env = Sokoban()
    train, evaluation = env.panel("train", 300), env.panel("eval", 200)
    fingerprints = [task.fingerprint for task in (*train, *evaluation)]
    assert len(set(fingerprints)) == 500
    assert env.panel("eval", 50).tasks == evaluation.tasks[:50]
    assert {task.kind for task in evaluation} == {"1 push", "2 pushes", "3+ pushes"}


def test_levels_do_not_depend_on_the_process() -> None:
    code = "from envs_vision.sokoban import Sokoban; print(Sokoban().panel('eval', 40).hash)"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == Sokoban().panel("eval", 40).hash


# ---------------------------------------------------------------------------------------------------- expert


def test_solutions_are_shortest() -> None:
    """Against brute force: no shorter list of moves solves the level, and this one does."""

    def solves(room: Room, actions: tuple[str, ...]) -> bool:
        for action in actions:
            room = move(room, action)
        return room.solved

    for seed in range(12):
        room = make_level(seed, 6, 1 + seed % 2, 30, 6)
        solution = solve(room)
        assert solution is not None
        assert solves(room, solution)
        for length in range(min(len(solution), 6)):
            assert not any(solves(room, actions) for actions in itertools.product(DIRECTIONS, repeat=length))


def test_oracle_solves_and_stuck_boxes_are_known() -> None:
    env = Sokoban()
    for task in env.panel("eval", 32):
        assert play(env, task, []).success
    env.reset(options={"task": task_of("#####/#$ .#/#@  #/#####")})
    assert env.plan() is None
    assert env.oracle() == "still"


def test_steps_run_out() -> None:
    env = Sokoban(max_steps=3)
    env.reset(options={"task": task_of(CORRIDOR)})
    for _ in range(2):
        assert env.step("none")[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step("jump")
    assert (reward, terminated, truncated) == (-0.1, False, True)
    assert not info["valid"]
    assert not info["success"]


# -------------------------------------------------------------------------------------------------- pictures


def test_pictures_show_the_state() -> None:
    rooms = [make_level(seed, 6, 1, 30, 15) for seed in range(20)]
    rooms += [move(room, direction) for room in rooms for direction in DIRECTIONS]
    pictures = {draw_room(room, 28).tobytes() for room in rooms}
    assert len(pictures) == len(set(rooms))
    looks = ["#####/#@$ .#/#####", "#####/#@ $.#/#####", "#####/#  $+#/#####", "#####/#  @*#/#####"]
    assert len({draw_room(parse_room(look), 28).tobytes() for look in looks}) == 4
    assert draw_room(rooms[0], 28).shape == (168, 168, 3)


def test_every_tile_is_one_square_of_the_picture() -> None:
    before, after = parse_room(CORRIDOR), move(parse_room(CORRIDOR), "right")
    changed = (draw_room(before, 28) != draw_room(after, 28)).any(axis=2)
    assert {(int(r) // 28, int(c) // 28) for r, c in np.argwhere(changed)} == {(1, 1), (1, 2), (1, 3)}


# ------------------------------------------------------------------------------------------------- languages


@pytest.mark.parametrize("style", ["paper", "compact"])
def test_prompt(style: str) -> None:
    env = Sokoban()
    observation, info = env.reset(seed=1)
    view = View(env.task_text(observation), 1, (), observation["text"], observation["images"], info["admissible"])
    prompt = env.prompt(view, style)
    assert prompt.text == prompt.text.strip()
    assert prompt.images == observation["images"]
    if style == "paper":
        places = [prompt.text.index(part) for part in ("expert", "Your goal is to", "<image>", "Possible", "Now it's")]
        places += [prompt.text.index(part) for part in ("<think>", "<action>")]
        assert places == sorted(places)
        assert "Your goal is to" in prompt.text.split("\n")[0]


def test_answers_read_as_written() -> None:
    env = Sokoban()
    for action in ACTIONS:
        assert env.parse(env.respond(action, "push")) == (action, True)


def test_annotations() -> None:
    env = Sokoban()
    task = task_of(CORRIDOR)
    env.reset(options={"task": task})
    plan = "Push the box right, right, right."
    assert env.oracle_skill() == plan
    assert env.thought("right") == "push"
    assert env.annotate(play(env, task, [])) == ("The level was solved.", plan)
    assert env.annotate(play(env, task, ["left"] * 15)) == ("The level was not solved in time.", plan)
    open_room = task_of("######/#@   #/#  $.#/#    #/######")
    stuck = play(env, open_room, ["down", "down", "right", "right", "up", *["still"] * 10])
    assert env.annotate(stuck) == (
        "A push up could not be mended.",
        "Push the box right. Do not push the box up first.",
    )


def test_several_boxes_are_numbered_in_skills() -> None:
    env = Sokoban(boxes=2)
    env.reset(options={"task": task_of("######/#@$ .#/#  $.#/######")})
    assert env.oracle_skill() in ("Push box 1 right, right; box 2 right.", "Push box 2 right; box 1 right, right.")


def test_gymnasium_accepts_it() -> None:
    check_env(Sokoban(), skip_render_check=True)
