"""ALFWorld games as data, and the reader of the official directory layout.

The layout is the one the official download leaves under ``ALFWORLD_DATA``::

    json_2.1.1/<split>/<task directory>/<trial>/{game.tw-pddl, traj_data.json, initial_state.pddl}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from harness.contracts import HarnessError, unknown

Rules = Literal["2.1.1", "current"]
"""``"2.1.1"``: rules inside the distributed games ("put X in/on Y"); ``"current"``: those packaged with alfworld 0.4
("move X to Y")."""

TASK_KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six official task types, in the official order."""

SPLIT_SIZES = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
"""Playable games in the full distribution."""

LAYOUT = "json_2.1.1"

LACKING = "lacking "
UNCHECKED = "never checked for a solution"
NAMED = 3
"""How many damaged games a panel's note names."""


@dataclass(frozen=True)
class Game:
    """One game: everything either engine needs to play it.

    Attributes:
        name: Stable name, e.g. ``"valid_seen/pick_and_place_simple-.../trial_..."``.
        problem: PDDL problem text (initial state and goal).
        task: The task sentence with its full stop, e.g. ``"put a clean mug in desk."``.
        kind: One of `TASK_KINDS`.
        params: The official ``pddl_params``: ``object_target``, ``parent_target``, ``toggle_target``,
            ``mrecep_target``; empty strings where unused.
        rules: Which version of the rules it is played in.
    """

    name: str
    problem: str
    task: str
    kind: str
    params: Mapping[str, str]
    rules: Rules


def read_game(trial: Path, rules: Rules | None = None) -> Game:
    """Read one official trial directory; ``rules`` overrides the version that the game file carries.

    The versions share their task sentences (the same two templates per task type), so the game keeps its own.

    Raises:
        HarnessError: a file is missing, is not JSON, or lacks what a game must have.
    """
    game_file, trajectory_file = trial / "game.tw-pddl", trial / "traj_data.json"
    data, trajectory = _read_json(game_file), _read_json(trajectory_file)
    problem, grammar = _text(data, "pddl_problem", game_file), _text(data, "grammar", game_file)
    sentence = re.search(r'"Your task is to: ([^"\n]+)"', grammar)
    if sentence is None:
        raise HarnessError(f"{game_file}: the grammar states no task (expected 'Your task is to: ...')")
    params = trajectory.get("pddl_params")
    if not isinstance(params, dict):
        raise HarnessError(f"{trajectory_file}: no 'pddl_params'")
    return Game(
        name="/".join(trial.parts[-3:]),
        problem=problem,
        task=sentence.group(1),
        kind=_kind(trajectory, trajectory_file),
        params={key: value for key, value in params.items() if isinstance(value, str)},
        rules=check_rules(rules) if rules is not None else _carried_rules(grammar),
    )


def check_rules(name: str) -> Rules:
    """A rules version by name; raises HarnessError for an unknown one."""
    for rules in get_args(Rules):
        if name == rules:
            return rules  # type: ignore[no-any-return]
    raise unknown("ALFWorld rules version", name, get_args(Rules))


def official_split(root: Path, split: str) -> tuple[list[Path], tuple[str, ...]]:
    """Trial directories of a split that the official package plays, sorted by name, and notes on what it leaves out.

    Like the package it leaves out games with movable receptacles or sliced objects, games of other task types, and
    games not marked solvable. The order depends on names alone, not on the file system. The notes say how many games
    are left out for which reason, name those that a whole download would not lack, and state where the number of
    playable games is not the official one.

    Raises:
        HarnessError: the root or the split does not exist, holds no playable game, or a file is not JSON.
    """
    base = root / LAYOUT
    if not base.is_dir():
        raise HarnessError(f"no ALFWorld games at {root}: expected a directory {LAYOUT} (set ALFWORLD_DATA)")
    if not (base / split).is_dir():
        raise unknown(f"split of {base}", split, [path.name for path in base.iterdir() if path.is_dir()])
    playable: list[Path] = []
    skipped: dict[str, list[Path]] = {}
    for trial in sorted(path for path in (base / split).glob("*/*") if path.is_dir()):
        reason = _why_skipped(trial)
        if reason:
            skipped.setdefault(reason, []).append(trial)
        else:
            playable.append(trial)
    if not playable:
        raise HarnessError(f"{base / split} holds no playable game ({sum(map(len, skipped.values()))} left out)")
    return playable, _notes(split, len(playable), skipped)


def _why_skipped(trial: Path) -> str:
    """Why the official package leaves a trial out; empty if it plays it."""
    directory = trial.parent.name
    if "movable" in directory:
        return "with a movable receptacle"
    if "Sliced" in directory:
        return "with sliced objects"
    for name in ("traj_data.json", "game.tw-pddl"):
        if not (trial / name).is_file():
            return LACKING + name
    if _read_json(trial / "traj_data.json").get("task_type") not in TASK_KINDS:
        return "of another task type"
    solvable = _read_json(trial / "game.tw-pddl").get("solvable")
    if solvable is None:
        return UNCHECKED
    return "" if solvable else "without a solution"


def _notes(split: str, playable: int, skipped: Mapping[str, Sequence[Path]]) -> tuple[str, ...]:
    notes = []
    full = SPLIT_SIZES.get(split, playable)
    if playable != full:
        notes.append(f"{playable} playable games; the full {split} split has {full}")
    for reason, trials in sorted(skipped.items()):
        note = f"left out: {len(trials)} {reason}"
        if reason == UNCHECKED or reason.startswith(LACKING):
            more = f" and {len(trials) - NAMED} more" if len(trials) > NAMED else ""
            note += f" ({', '.join('/'.join(trial.parts[-2:]) for trial in trials[:NAMED])}{more})"
        notes.append(note)
    return tuple(notes)


def _carried_rules(grammar: str) -> Rules:
    return "current" if "move {o} to {r}" in grammar else "2.1.1"


def _kind(trajectory: Mapping[str, Any], path: Path) -> str:
    kind = trajectory.get("task_type")
    if kind not in TASK_KINDS:
        raise HarnessError(f"{path}: task type {kind!r} is not one of {', '.join(TASK_KINDS)}")
    return str(kind)


def _text(data: Mapping[str, Any], key: str, path: Path) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise HarnessError(f"{path}: no {key!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise HarnessError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HarnessError(f"{path} is not a JSON object")
    return value
