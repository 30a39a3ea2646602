"""Generated households in the official file format: deterministic by seed, solvable by construction.

A game is drawn in two steps: :func:`draw` decides what stands where (an :class:`Arrangement`), :func:`generate` writes
it down as PDDL. Object ids carry an instance number instead of coordinates, so two arrangements are equal exactly when
their texts are; the split of an arrangement is a function of its content, so splits are disjoint at every size.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from envs_text.alfworld import house
from envs_text.alfworld.games import LAYOUT, TASK_KINDS, Game, Rules
from harness.contracts import digest, unknown

T = TypeVar("T")

VERSION = "generated-1"

SPLITS = ("train", "eval", "demo")
"""``demo`` is for demonstrations: a policy trained on it has seen no game of the other two."""

SIZES = {
    "small": ((7, 9), (9, 12)),
    "medium": ((11, 14), (15, 20)),
    "full": ((21, 26), (26, 34)),
}
"""Least and most receptacles, least and most objects."""

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("SinkBasin", house.CLEANABLE, "isClean", "cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", house.HEATABLE, "isHot", "heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", house.COOLABLE, "isCool", "coolable"),
}
"""Task type -> (receptacle type that treats, object types it treats, state it gives, property it needs)."""

SENTENCES = {
    "pick_and_place_simple": ("put a {obj} in {place}", "put some {obj} on {place}"),
    "look_at_obj_in_light": ("look at {obj} under the {place}", "examine the {obj} with the {place}"),
    "pick_clean_then_place_in_recep": ("put a clean {obj} in {place}", "clean some {obj} and put it in {place}"),
    "pick_heat_then_place_in_recep": ("put a hot {obj} in {place}", "heat some {obj} and put it in {place}"),
    "pick_cool_then_place_in_recep": ("put a cool {obj} in {place}", "cool some {obj} and put it in {place}"),
    "pick_two_obj_and_place": ("put two {obj} in {place}", "find two {obj} and put them in {place}"),
}
"""The official wordings of each task type; ``place`` is the target receptacle or the lamp."""

ROOMS_FOR = {
    "pick_and_place_simple": tuple(house.ROOMS),
    "look_at_obj_in_light": ("bedroom", "living room"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": tuple(house.ROOMS),
}


@dataclass(frozen=True)
class Arrangement:
    """What stands where.

    Attributes:
        kind: Task type.
        obj: Object type the task asks for.
        place: Receptacle type it must come to, or the lamp type it must be looked at under.
        receptacles: Receptacle types, sorted; equal types are numbered in this order.
        things: (object type, index of its receptacle), sorted.
    """

    kind: str
    obj: str
    place: str
    receptacles: tuple[str, ...]
    things: tuple[tuple[str, int], ...]

    @property
    def split(self) -> str:
        """The only split this arrangement may appear in; its wording does not matter."""
        content = [self.kind, self.obj, self.place, self.receptacles, self.things]
        return SPLITS[int(digest(content)[:8], 16) % len(SPLITS)]


def generate(seed: int, split: str, size: str, rules: Rules = "current") -> Game:
    """Game number ``seed`` of a split, of task type ``seed % 6``: the same in every process and on every machine.

    Raises HarnessError for an unknown split or size.
    """
    if split not in SPLITS:
        raise unknown("split of generated games", split, SPLITS)
    if size not in SIZES:
        raise unknown("size of generated games", size, SIZES)
    # random() is the one method of random.Random whose stream Python promises to keep.
    rng = random.Random(int.from_bytes(hashlib.sha256(f"{split}/{size}/{seed}".encode()).digest()))
    arrangement = None
    while arrangement is None or arrangement.split != split:
        arrangement = draw(rng, TASK_KINDS[seed % len(TASK_KINDS)], size)
    words = {"obj": arrangement.obj.lower(), "place": arrangement.place.lower()}
    lamp = arrangement.place if arrangement.kind == "look_at_obj_in_light" else ""
    return Game(
        name=f"{split}/{size}/{seed:06d}",
        problem=problem(arrangement),
        task=_pick(rng, SENTENCES[arrangement.kind]).format(**words) + ".",
        kind=arrangement.kind,
        params={
            "mrecep_target": "",
            "object_target": arrangement.obj,
            "parent_target": "" if lamp else arrangement.place,
            "toggle_target": lamp,
        },
        rules=rules,
    )


def draw(rng: random.Random, kind: str, size: str) -> Arrangement | None:
    """Furnish a room, choose a task that is possible in it and lay the things out; None if no task is."""
    (least_places, most_places), (least_things, most_things) = SIZES[size]
    room = house.ROOMS[_pick(rng, ROOMS_FOR[kind])]
    spare = list(room.extra)
    receptacles = list(room.core)
    for _ in range(_between(rng, least_places, most_places) - len(room.core)):
        receptacles.append(spare.pop(_below(rng, len(spare))))
    receptacles.sort()
    tasks = _possible_tasks(kind, room, receptacles)
    if not tasks:
        return None
    obj, place = _pick(rng, tasks)
    # The goal must be false at the start: where nothing has to be done to the object, none may lie at the target.
    banned = place if kind not in TREATMENTS else ""
    things: list[tuple[str, int]] = []
    copies = (2 if kind == "pick_two_obj_and_place" else 1) + (rng.random() < 0.3)
    for thing in [obj] * copies + ([place] if place in house.LAMPS else []):
        things.append((thing, _lay(rng, thing, receptacles, banned)))
    fillers = [t for t in room.things if t not in (obj, place) and _holders(t, receptacles)]
    for _ in range(_between(rng, least_things, most_things) - len(things)):
        thing = _pick(rng, fillers)
        things.append((thing, _lay(rng, thing, receptacles)))
    return Arrangement(kind, obj, place, tuple(receptacles), tuple(sorted(things)))


def _possible_tasks(kind: str, room: house.Room, receptacles: Sequence[str]) -> list[tuple[str, str]]:
    """All (object type, target) the room allows, in a fixed order."""
    present = sorted(set(receptacles))
    movable = [t for t in room.things if _holders(t, receptacles)]
    if kind == "look_at_obj_in_light":
        lamps = [lamp for lamp in house.LAMPS if _holders(lamp, receptacles)]
        return [(thing, lamp) for thing in movable for lamp in lamps]
    if kind in TREATMENTS:
        tool, treatable, _, _ = TREATMENTS[kind]
        return [(t, p) for t in movable if t in treatable for p in present if p in house.PLACES[t] and p != tool]
    return [(t, p) for t in movable for p in present if p in house.PLACES[t] and _holders(t, receptacles, p)]


def _holders(thing: str, receptacles: Sequence[str], banned: str = "") -> list[int]:
    """Indices of the receptacles that can hold a thing."""
    return [i for i, kind in enumerate(receptacles) if kind in house.PLACES[thing] and kind != banned]


def _lay(rng: random.Random, thing: str, receptacles: Sequence[str], banned: str = "") -> int:
    """Index of the receptacle a thing is laid into: first its type by habit, then any of that type."""
    holders = _holders(thing, receptacles, banned)
    kinds = sorted({receptacles[i] for i in holders})
    kind = _pick(rng, [k for k in kinds for _ in range(house.PLACES[thing][k])])
    return _pick(rng, [i for i in holders if receptacles[i] == kind])


def _below(rng: random.Random, limit: int) -> int:
    return int(rng.random() * limit)


def _between(rng: random.Random, least: int, most: int) -> int:
    return least + _below(rng, most - least + 1)


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


# ------------------------------------------------------------------------------------------------ PDDL


def problem(arrangement: Arrangement) -> str:
    """The arrangement as a PDDL problem (``initial_state.pddl``)."""
    places = _ids(arrangement.receptacles)
    things = _ids([thing for thing, _ in arrangement.things])
    locations = [f"loc_bar_{i}_bar_0_bar_0_bar_0" for i in range(len(places) + 1)]  # the agent starts at the first
    place_kinds = sorted(set(arrangement.receptacles) | {"SinkBasin", "Sink", "Microwave", "Fridge"})
    thing_kinds = sorted({thing for thing, _ in arrangement.things} | house.KNIVES)
    facts = [f"(atLocation agent1 {locations[0]})"]
    for place, kind, location in zip(places, arrangement.receptacles, locations[1:], strict=True):
        facts += [f"(receptacleType {place} {kind}Type)", f"(receptacleAtLocation {place} {location})"]
        if kind in house.OPENABLE:
            facts.append(f"(openable {place})")
    for thing, (kind, at) in zip(things, arrangement.things, strict=True):
        facts += [f"(objectType {thing} {kind}Type)", f"(inReceptacle {thing} {places[at]})"]
        facts.append(f"(objectAtLocation {thing} {locations[at + 1]})")
        facts += [f"({name} {thing})" for name, kinds in _PROPERTIES if kind in kinds]
        facts.append(f"({'toggleable' if kind in house.LAMPS else 'pickupable'} {thing})")
    for thing in sorted({kind for kind, _ in arrangement.things}):
        facts += [
            f"(canContain {place}Type {thing}Type)"
            for place in sorted(set(arrangement.receptacles))
            if place in house.PLACES[thing]
        ]
    declared = ["agent1 - agent"]
    for ids, kind in (
        ([f"{k}Type" for k in thing_kinds], "otype"),
        ([f"{k}Type" for k in place_kinds], "rtype"),
        (things, "object"),
        (places, "receptacle"),
        (locations, "location"),
    ):
        declared += [f"{i} - {kind}" for i in ids]
    lines = ["(define (problem household)", "(:domain alfred)", "(:objects", *declared, ")", "(:init", *facts, ")"]
    return "\n".join([*lines, "(:goal", _goal(arrangement), ")", ")", ""])


_PROPERTIES = (
    ("isReceptacleObject", house.RECEPTACLE_OBJECTS),
    ("sliceable", house.SLICEABLE),
    ("cleanable", house.CLEANABLE),
    ("heatable", house.HEATABLE),
    ("coolable", house.COOLABLE),
)


def _ids(kinds: Sequence[str]) -> list[str]:
    """PDDL ids for entities of these types: type, ``_bar_``, three coordinates, the first of which counts up."""
    seen: Counter[str] = Counter()
    ids = []
    for kind in kinds:
        seen[kind] += 1
        # The text layer recognises a basin by its suffix: a sink basin is a part of a sink.
        whole, part = (kind.removesuffix("Basin"), f"_bar_{kind}") if kind.endswith("Basin") else (kind, "")
        ids.append(f"{whole}_bar__plus_{seen[kind]:02d}_dot_00_bar__plus_00_dot_00_bar__plus_00_dot_00{part}")
    return ids


def _goal(arrangement: Arrangement) -> str:
    obj, place = f"{arrangement.obj}Type", f"{arrangement.place}Type"
    if arrangement.kind == "look_at_obj_in_light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location)"
            f" (and (objectType ?ot {place}) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l)"
            " (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
            f" (exists (?o - object ?a - agent) (and (objectType ?o {obj}) (holds ?a ?o))))"
        )
    if arrangement.kind == "pick_two_obj_and_place":
        return (
            f"(and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {obj})"
            f" (receptacleType ?r {place}) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2))"
            f" (objectType ?o2 {obj}) (receptacleType ?r {place}) (inReceptacle ?o2 ?r)))))))"
        )
    state = ""
    if arrangement.kind in TREATMENTS:
        _, _, reached, needed = TREATMENTS[arrangement.kind]
        state = f" ({needed} ?o) ({reached} ?o)"
    return (
        f"(and (exists (?r - receptacle) (exists (?o - object) (and{state} (objectType ?o {obj})"
        f" (receptacleType ?r {place}) (inReceptacle ?o ?r)))))"
    )


# ----------------------------------------------------------------------------------------- official files


def write_game(game: Game, directory: Path) -> Path:
    """Write a game as the official packages read it; returns its folder, which lies in the official layout.

    The folder ``directory/json_2.1.1/<split>/<size>/<number>`` gets ``game.tw-pddl`` (domain, grammar, problem),
    ``initial_state.pddl`` and ``traj_data.json``. Needs the alfworld package for the domain and the grammar.
    """
    from envs_text.alfworld.official import official_rules

    domain, grammar = official_rules(game.rules)
    data = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL.", game.task),
        "pddl_problem": game.problem,
        "solvable": True,
    }
    trajectory = {"task_type": game.kind, "pddl_params": {**game.params, "object_sliced": False}}
    folder = directory / LAYOUT / game.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "game.tw-pddl").write_text(json.dumps(data))
    (folder / "traj_data.json").write_text(json.dumps(trajectory))
    (folder / "initial_state.pddl").write_text(game.problem)
    return folder
