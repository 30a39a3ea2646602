"""What an ALFWorld room holds, read from a PDDL problem file: the world, its goal and the state that play changes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

# Facts of a problem file that no rule reads; their arguments still take part in the numbering of names.
IDLE_FACTS = {"moveable", "ison", "checked", "examined", "full", "isreceptacleobjectfull"}


@dataclass(frozen=True)
class Goal:
    """What wins: ``count`` objects of a type in one receptacle of a type, or one held under a lamp that was used.

    Types are lower-case and without their suffix, e.g. ``"mug"``. ``state`` is ``"clean"``, ``"hot"``, ``"cool"`` or
    empty. ``receptacle`` is empty in look-at-in-light games, ``lamp`` in all others.
    """

    object: str
    receptacle: str = ""
    lamp: str = ""
    state: str = ""
    count: int = 1


@dataclass
class State:
    """What changes during play. Everything is named by its id in the problem file, lower-cased."""

    location: str
    held: str | None
    inside: dict[str, set[str]]
    """Objects in each receptacle."""
    opened: set[str]
    placed: set[tuple[str, str]]
    """Pairs (object, location); slicing asks for the pair, not for the receptacle."""
    taken: set[tuple[str, str]]
    """Pairs (object, receptacle) ended by a take and not renewed since; ``look`` reports them."""
    clean: set[str]
    hot: set[str]
    cool: set[str]
    sliced: set[str]
    toggled: set[str]

    def copy(self) -> State:
        """A copy that can be changed without changing this one."""
        return replace(
            self,
            inside={receptacle: set(objects) for receptacle, objects in self.inside.items()},
            opened=set(self.opened),
            placed=set(self.placed),
            taken=set(self.taken),
            clean=set(self.clean),
            hot=set(self.hot),
            cool=set(self.cool),
            sliced=set(self.sliced),
            toggled=set(self.toggled),
        )


@dataclass(frozen=True)
class World:
    """What never changes during play."""

    name: Mapping[str, str]
    """Shown names, e.g. ``"cabinet 3"``."""
    kind: Mapping[str, str]
    """Types of receptacles and objects, e.g. ``"countertop"``."""
    location: Mapping[str, str]
    """Location of each receptacle; iterates in the order of ids."""
    here: Mapping[str, tuple[str, ...]]
    """Receptacles at each location, in the order of ids."""
    fits: frozenset[tuple[str, str]]
    """(receptacle type, object type) pairs of what may be put where."""
    contents: Mapping[str, tuple[str, ...]]
    """What bowls, cups, boxes, ... held at the start; a key for every such object, in the order of ids."""
    openable: frozenset[str]
    pickupable: frozenset[str]
    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    toggleable: frozenset[str]
    sliceable: frozenset[str]
    goal: Goal
    start: State


@dataclass
class _Facts:
    """Facts of an :init section: arguments by predicate, in the order of the file."""

    by_predicate: dict[str, list[list[str]]] = field(default_factory=lambda: defaultdict(list))

    def ids(self, predicate: str) -> frozenset[str]:
        return frozenset(arguments[0] for arguments in self.by_predicate.pop(predicate, ()))

    def pairs(self, predicate: str) -> list[tuple[str, str]]:
        """Sorted pairs without repetition."""
        rows = self.by_predicate.pop(predicate, [])
        if any(len(row) != 2 for row in rows):
            raise ValueError(f"every {predicate} fact needs two arguments")
        return sorted({(first, second) for first, second in rows})


@lru_cache(maxsize=64)
def parse_world(problem: str) -> World:
    """Read a PDDL problem of the ALFRED domain. Raises ValueError, in one line, for one this engine cannot play."""
    text = re.sub(r";[^\n]*", "", problem).lower()
    _, init, rest = text.partition("(:init")
    init, goal, rest = rest.partition("(:goal")
    if not goal:
        raise ValueError("the problem has no (:init ...) followed by (:goal ...)")
    facts = _Facts()
    for predicate, arguments in re.findall(r"\(([\w-]+)\s+([^()=]*)\)", init):
        if predicate != "distance":
            facts.by_predicate[predicate].append(arguments.split())
    name = shown_names({symbol for rows in facts.by_predicate.values() for row in rows for symbol in row})

    locations = facts.pairs("receptacleatlocation")
    here: dict[str, list[str]] = defaultdict(list)
    for receptacle, location in locations:
        here[location].append(receptacle)
    inside: dict[str, set[str]] = {receptacle: set() for receptacle, _ in locations}
    for o, receptacle in facts.pairs("inreceptacle"):
        if receptacle not in inside:
            raise ValueError(f"{o} is in {receptacle}, which has no location")
        inside[receptacle].add(o)
    containers = facts.ids("isreceptacleobject")
    nested = sorted((outer, inner) for inner, outer in facts.pairs("inreceptacleobject"))
    starts = facts.pairs("atlocation")
    if len(starts) != 1:
        raise ValueError(f"the agent must start at one location, found {len(starts)}")
    kinds = dict(facts.pairs("receptacletype") + facts.pairs("objecttype"))
    for symbol in sorted(set().union(inside, *inside.values())):
        if symbol not in kinds:
            raise ValueError(f"{symbol} has no type")
    start = State(
        location=starts[0][1],
        held=None,
        inside=inside,
        opened=set(facts.ids("opened")),
        placed=set(facts.pairs("objectatlocation")),
        taken=set(),
        clean=set(facts.ids("isclean")),
        hot=set(facts.ids("ishot")),
        cool=set(facts.ids("iscool")),
        sliced=set(facts.ids("issliced")),
        toggled=set(facts.ids("istoggled")),
    )
    world = World(
        name=name,
        kind={symbol: kind.removesuffix("type") for symbol, kind in kinds.items()},
        location=dict(locations),
        here={location: tuple(receptacles) for location, receptacles in here.items()},
        fits=frozenset((r.removesuffix("type"), o.removesuffix("type")) for r, o in facts.pairs("cancontain")),
        contents={o: tuple(inner for outer, inner in nested if outer == o) for o in sorted(containers)},
        openable=facts.ids("openable"),
        pickupable=facts.ids("pickupable"),
        cleanable=facts.ids("cleanable"),
        heatable=facts.ids("heatable"),
        coolable=facts.ids("coolable"),
        toggleable=facts.ids("toggleable"),
        sliceable=facts.ids("sliceable"),
        goal=parse_goal(rest),
        start=start,
    )
    for predicate in sorted(facts.by_predicate.keys() - IDLE_FACTS):
        raise ValueError(f"the initial state has facts this engine does not know: {predicate}")
    return world


def shown_names(ids: set[str]) -> dict[str, str]:
    """Names the player sees, e.g. ``"apple 2"``: the first id of a kind, in sorted order, gets the highest number.

    Ids without a position get no number and end in a blank; they are never shown.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    names = {}
    for symbol in sorted(ids):
        base, positioned, _ = symbol.partition("_bar_")
        if positioned:
            groups[base + "basin" if "basin" in symbol else base].append(symbol)
        else:
            names[symbol] = f"{symbol} "
    for base, members in groups.items():
        names.update({symbol: f"{base} {len(members) - place}" for place, symbol in enumerate(members)})
    return names


def parse_goal(text: str) -> Goal:
    """Read a lower-case :goal section of one of the six task kinds. Raises ValueError for any other goal."""
    objects = dict(re.findall(r"\(objecttype\s+\?(\w+)\s+(\w+?)type\s*\)", text))
    receptacles = set(re.findall(r"\(receptacletype\s+\?\w+\s+(\w+?)type\s*\)", text))
    for word in ("inreceptacleobject", "issliced", "forall"):
        if word in text:
            raise ValueError(f"goals with {word} are not supported")
    if "istoggled" in text:
        held = re.search(r"\(holds\s+\?\w+\s+\?(\w+)\s*\)", text)
        if held is None or len(objects) != 2 or held.group(1) not in objects:
            raise ValueError("the goal uses a lamp but does not ask for a held object")
        wanted = objects.pop(held.group(1))
        return Goal(object=wanted, lamp=next(iter(objects.values())))
    if len(set(objects.values())) != 1 or len(receptacles) != 1:
        raise ValueError("the goal must name one object type and one receptacle type")
    states = [state for state in ("clean", "hot", "cool") if f"(is{state}" in text]
    if len(states) > 1:
        raise ValueError(f"the goal asks for several states: {', '.join(states)}")
    return Goal(
        object=next(iter(objects.values())),
        receptacle=receptacles.pop(),
        state=states[0] if states else "",
        count=len(objects),
    )
