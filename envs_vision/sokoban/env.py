"""Sokoban as an agent environment: panels, prompts, parser, expert, scripted analysis."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

from gymnasium.error import ResetNeeded

from envs_vision.sokoban.drawing import draw_room
from envs_vision.sokoban.levels import VERSION, make_level
from envs_vision.sokoban.rules import DIRECTIONS, STILL, Room, State, format_room, move, parse_room, pushes, solve, step
from harness.contracts import (
    AgentEnv,
    EnvCard,
    Episode,
    FreeText,
    HarnessError,
    Observation,
    Panel,
    Prompt,
    Task,
    View,
    digest,
    observations,
    unknown,
)
from harness.parsers import parse_tags, write_tags

NOTHING = "none"
"""The action an unreadable response gives: the player stands still."""
GOAL = "push every box onto a target."
SEEDS = {"train": range(2**16 - 1), "eval": range(2**16, 2**17)}
SIZES = {"train": 2000, "eval": 128}

PAPER_PROMPT = """\
You are an expert player of the puzzle game Sokoban. Your goal is to {goal}
The picture shows the room as it is now: <image>
The green alien is you, the player. A yellow crate is a box. A black tile with a red outline is a target. Brick tiles \
are walls: neither you nor a box can enter them.
You push a box by walking into it; boxes cannot be pulled, and only one can be pushed at a time.
Possible actions: {actions}.
Now it's your turn to make one move.
First think about the situation step by step, between <think> and </think>.
Then give exactly one of the possible actions between <action> and </action>."""

COMPACT_HEAD = "Push every box onto a target.\n"
COMPACT_TAIL = "\nup down left right"


class Sokoban(AgentEnv):
    """Sokoban with generated levels and pictures (PAPER 4.4).

    Args:
        dim: Side of the room in cells, outer walls included.
        boxes: Number of boxes and of targets.
        tile: Side of a cell in pixels.
        max_steps: Step limit; every level can be solved within it.
        search_depth: Longest reverse play of the level generator; larger is harder.
    """

    option_names = ("dim", "boxes", "tile", "max_steps", "search_depth")
    phrases = (
        COMPACT_HEAD,
        COMPACT_TAIL,
        "<think>push</think><action>",
        "<think>walk</think><action>",
        "Push the box",
        ". Do not push the box",
        "The level was solved.",
        "The level was not solved in time.",
        "A push",
        "could not be mended.",
    )

    def __init__(
        self, dim: int = 6, boxes: int = 1, tile: int = 28, max_steps: int = 15, search_depth: int = 30
    ) -> None:
        limits = {"dim": (dim, 5, 20), "boxes": (boxes, 1, 5), "tile": (tile, 8, 128)}
        limits |= {"max_steps": (max_steps, 1, 1000), "search_depth": (search_depth, 1, 1000)}
        for name, (value, low, high) in limits.items():
            if not (isinstance(value, int) and low <= value <= high):
                raise HarnessError(f"Sokoban-v1 option {name}={value!r} is no whole number from {low} to {high}")
        self._generator = (dim, boxes, search_depth, max_steps)
        self._tile = tile
        self._state: State | None = None
        self._task: Task | None = None
        self._steps = 0
        side = dim * tile
        self.action_space = FreeText((*DIRECTIONS, STILL))
        self.observation_space = observations(side)
        self.card = EnvCard(
            id="Sokoban-v1",
            modality="vision",
            max_steps=max_steps,
            history=0,
            success="every target is covered by a box",
            reward="-0.1 per step, +1 for a box pushed onto a target, -1 for one pushed off, +10 when all are covered",
            invalid_action="the player stands still (-0.1) and the step is spent",
            engine=f"native-1 ({tile}-pixel tiles)",
            data=f"{VERSION} ({dim}x{dim}, boxes {boxes}, depth {search_depth}, at most {max_steps} moves)",
            parser="tags-substring-1",
            panels=tuple(SEEDS),
        )

    # ------------------------------------------------------------------------------------------ tasks

    def panel(self, name: str, size: int | None = None) -> Panel:
        if name not in SEEDS:
            raise unknown("panel of Sokoban-v1", name, SEEDS)
        return _panel(name, SIZES[name] if size is None else size, self._generator)

    def task_text(self, observation: Observation) -> str:
        return GOAL

    # ---------------------------------------------------------------------------------------- playing

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        task: Task | None = (options or {}).get("task")
        if task is None:
            train = self.panel("train", 64)
            task = train.tasks[self.np_random.integers(len(train))]
        room = parse_room(task.spec["level"])
        self._task, self._state, self._steps = task, State(room), 0
        return self._observation(room), _info(room, valid=True)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        outcome = step(self._current, action)
        self._state = outcome.state
        self._steps += 1
        truncated = self._steps >= self.card.max_steps and not outcome.won
        room = outcome.state.room
        info = _info(room, valid=action in DIRECTIONS or action == STILL)
        return self._observation(room), outcome.reward, outcome.won, truncated, info

    def render(self) -> Any:
        """The current picture."""
        return draw_room(self._current.room, self._tile)

    @property
    def _current(self) -> State:
        if self._state is None:
            raise ResetNeeded("call reset() before the first step")
        return self._state

    def _observation(self, room: Room) -> Observation:
        return {"text": "", "images": (draw_room(room, self._tile),)}

    # -------------------------------------------------------------------------------------- languages

    def prompt(self, view: View, style: str) -> Prompt:
        if style == "compact":
            return Prompt(f"{COMPACT_HEAD}<image>{COMPACT_TAIL}", view.images)
        return Prompt(PAPER_PROMPT.format(goal=GOAL, actions=", ".join(DIRECTIONS)), view.images)

    def parse(self, response: str) -> tuple[str, bool]:
        """The first direction that occurs in the action tags' text, in the order up, down, left, right, still.

        Without tags nothing is read. Valid needs a <think> pair too; unlike in ALFWorld any script may be used.
        """
        text, valid = parse_tags(response, fallback_chars=0, allow_chinese=True)
        action = next((name for name in (*DIRECTIONS, STILL) if name in text), NOTHING)
        return action, valid and action != NOTHING

    def respond(self, action: str, thought: str = "") -> str:
        return write_tags(action, thought)

    # ----------------------------------------------------------------------------------------- expert

    def plan(self) -> tuple[str, ...] | None:
        """A shortest solution from the current state; None where the box is stuck."""
        return solve(self._current.room)

    def oracle(self) -> str:
        """The first move of the plan; stands still where nothing is left to do."""
        return (self.plan() or (STILL,))[0]

    def thought(self, action: str) -> str:
        """One word about an action: whether it pushes a box."""
        room = self._current.room
        return "push" if action in DIRECTIONS and move(room, action).boxes != room.boxes else "walk"

    def oracle_skill(self) -> str:
        """What :meth:`annotate` would say after a perfect episode of the current task."""
        if self._task is None:
            raise ResetNeeded("call reset() first")
        room = parse_room(self._task.spec["level"])
        return _describe(room, _numbered(room, pushes(room, solve(room) or ())))

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """Which pushes solve the level - the agent's own where it solved it as directly - and, after a failure, the
        first push after which nothing could be mended. The first picture shows all that this needs."""
        room = parse_room(episode.task.spec["level"])
        solution = solve(room)
        if solution is None:
            return None
        actions = tuple(step.action for step in episode.steps)
        planned, own = (_numbered(room, pushes(room, path)) for path in (solution, actions))
        if episode.success:
            return "The level was solved.", _describe(room, own if len(own) <= len(planned) else planned)
        fatal = _fatal_push(room, actions)
        if fatal is None:
            return "The level was not solved in time.", _describe(room, planned)
        summary = f"A push {own[fatal][1]} could not be mended."
        return summary, _describe(room, planned) + _warning(room, own, fatal, planned)


def _info(room: Room, valid: bool) -> dict[str, Any]:
    score = 1.0 if room.solved else room.covered / len(room.targets)
    return {"valid": valid, "success": room.solved, "score": score, "admissible": tuple(DIRECTIONS)}


# ------------------------------------------------------------------------------------------------------ panels


@lru_cache
def _panel(name: str, size: int, generator: tuple[int, int, int, int]) -> Panel:
    tasks = tuple(islice(_tasks(name, generator), size))
    if len(tasks) < size:
        raise HarnessError(f"panel {name!r} of Sokoban-v1 has {len(tasks)} distinct levels, not {size}")
    return Panel(name, tasks)


def _tasks(name: str, generator: tuple[int, int, int, int]) -> Iterator[Task]:
    """Distinct levels in the order of their seeds. A level itself decides on which side of the split it falls (by its
    fingerprint), so that no level is ever in both panels, whatever their sizes and seeds."""
    dim, boxes, search_depth, max_steps = generator
    side = 0 if name == "train" else 1
    seen = set()
    for seed in SEEDS[name]:
        room = make_level(seed, dim, boxes, search_depth, max_steps)
        level = format_room(room)
        fingerprint = digest({"env": "Sokoban-v1", "engine": "native-1", "level": level})
        if int(fingerprint[-1], 16) % 2 != side or fingerprint in seen:
            continue
        seen.add(fingerprint)
        count = len(pushes(room, solve(room) or ()))
        kind = {1: "1 push", 2: "2 pushes"}.get(count, "3+ pushes")
        yield Task(f"{name}/{seed:06d}", "Sokoban-v1", name, kind, {"level": level, "seed": seed}, fingerprint)


# ------------------------------------------------------------------------------------------------------ skills


Push = tuple[int, str]
"""Number of a box and the direction in which it is pushed."""


def _numbered(room: Room, found: list[tuple[int, str]]) -> list[Push]:
    """Pushes by box instead of by cell; boxes are numbered in the reading order of ``room``'s picture."""
    number = {box: index for index, box in enumerate(sorted(room.boxes), start=1)}
    named = []
    for cell, direction in found:
        rows, columns = DIRECTIONS[direction]
        number[cell + rows * room.width + columns] = number.pop(cell)
        named.append((number[cell + rows * room.width + columns], direction))
    return named


def _describe(room: Room, found: list[Push]) -> str:
    """E.g. "Push the box right, right, down."; with several boxes "Push box 2 left; box 1 up, up."."""
    runs = [
        f"{_box(room, number)} {', '.join(direction for _, direction in run)}"
        for number, run in groupby(found, key=lambda push: push[0])
    ]
    return f"Push {'; '.join(runs)}."


def _warning(room: Room, own: list[Push], fatal: int, planned: list[Push]) -> str:
    """A second sentence against the fatal push, unless it would read as forbidding a push of the plan."""
    number, direction = own[fatal]
    if fatal > 0 and own[fatal] in planned:
        return ""
    return f" Do not push {_box(room, number)} {direction}{' first' if fatal == 0 else ''}."


def _box(room: Room, number: int) -> str:
    return "the box" if len(room.boxes) == 1 else f"box {number}"


def _fatal_push(room: Room, actions: tuple[str, ...]) -> int | None:
    """Index, among the pushes, of the first after which the level cannot be solved; None where there is none."""
    count = 0
    for action in actions:
        after = move(room, action) if action in DIRECTIONS else room
        if after.boxes != room.boxes:
            if solve(after) is None:
                return count
            count += 1
        room = after
    return None
