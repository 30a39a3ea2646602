"""Scripted experts: the shortest plan, which knows where everything is, and a search that knows only what it saw."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from envs_text.alfworld import house
from envs_text.alfworld.engine import NOTHING_HAPPENS, Engine
from envs_text.alfworld.games import Game
from envs_text.alfworld.hindsight import TREATMENTS, read_task
from harness.contracts import HarnessError

# How an object gets into a state: verb, type of the receptacle that does it.
STATES = {"clean": ("clean", "sinkbasin"), "hot": ("heat", "microwave"), "cool": ("cool", "fridge")}


# ----------------------------------------------------------------------------------------------- the shortest plan


def plan(game: Game) -> list[str]:
    """A shortest list of commands that wins a game. Raises HarnessError if the game has no solution."""
    return plan_from(Engine(game))


def plan_from(engine: Engine) -> list[str]:
    """A shortest list of commands that wins from an engine's present state; empty if it is won.

    Tries every choice of objects, their receptacles, tool and destination. Between those choices nothing can be gained:
    the agent carries one object, doors stay open, and every walk is one command.
    """
    if engine.won:
        return []
    routes = _under_lamp(engine) if engine.world.goal.lamp else _into_receptacle(engine)
    best = min(routes, key=lambda route: len(route.commands), default=None)
    if best is None:
        raise HarnessError(f"ALFWorld game {engine.game.name} has no solution")
    return list(best.commands)


@dataclass(frozen=True)
class _Route:
    """Commands so far and where they lead."""

    engine: Engine
    location: str
    held: str | None
    opened: frozenset[str] = frozenset()
    source: str = ""
    """Where the held object was taken from."""
    commands: tuple[str, ...] = ()

    def at(self, r: str) -> _Route:
        """Stand at a receptacle."""
        world = self.engine.world
        if self.location == world.location[r]:
            return self
        return replace(self, location=world.location[r], commands=(*self.commands, f"go to {world.name[r]}"))

    def reaching(self, r: str) -> _Route:
        """Stand at a receptacle and have it open."""
        world, there = self.engine.world, self.at(r)
        if r not in world.openable or r in self.engine.state.opened or r in self.opened:
            return there
        return replace(there, opened=self.opened | {r}, commands=(*there.commands, f"open {world.name[r]}"))

    def does(self, command: str, *ids: str, held: str | None) -> _Route:
        """Carry out a command, given as a pattern for the names of ``ids``."""
        names = (self.engine.world.name[symbol] for symbol in ids)
        return replace(self, held=held, commands=(*self.commands, command.format(*names)))


def _start(engine: Engine) -> _Route:
    return _Route(engine, engine.state.location, engine.state.held)


def _putting(route: _Route, r: str) -> _Route | None:
    """Put what is held into a receptacle; None if it does not fit."""
    engine = route.engine
    if route.held is None or (engine.world.kind[r], engine.world.kind[route.held]) not in engine.world.fits:
        return None
    return route.reaching(r).does(engine.put_command(route.held, r), held=None)


def _holding(route: _Route, o: str) -> Iterator[_Route]:
    """All ways worth trying to get an object into the hand, which is first emptied if need be."""
    world, state = route.engine.world, route.engine.state
    sources = [r for r, objects in state.inside.items() if o in objects and o in world.pickupable]
    if route.held == o:
        yield route
    elif route.held is None:
        for r in sources:
            yield replace(route.reaching(r), source=r).does("take {} from {}", o, r, held=o)
    else:
        for emptied in _emptied(route, [world.location[r] for r in sources]):
            yield from _holding(emptied, o)


def _emptied(route: _Route, on_the_way: Collection[str]) -> list[_Route]:
    """Ways to put down what is in the way: a quickest one, those in a possible destination, which is open then, and
    those at locations on the way. Any other costs more or leads nowhere better."""
    world = route.engine.world
    puts = [(put, r) for r in world.location if (put := _putting(route, r)) is not None]
    quickest = min(puts, key=lambda pair: len(pair[0].commands), default=None)
    if quickest is None:
        return []
    least = len(quickest[0].commands)
    return [
        put
        for put, r in puts
        if r == quickest[1]
        or put.location in on_the_way
        or (len(put.commands) == least and world.kind[r] == world.goal.receptacle)
    ]


def _treated(route: _Route, o: str) -> Iterator[_Route]:
    """All ways to bring the held object into the state that the goal asks for."""
    world, wanted = route.engine.world, route.engine.world.goal.state
    if not wanted:
        yield route
        return
    able, done = route.engine.treatable(wanted)
    if o in able and o in done:
        yield route
    elif o in able:
        verb, tool = STATES[wanted]
        for r in world.location:
            if world.kind[r] == tool:
                yield route.at(r).does(verb + " {} with {}", o, r, held=o)


def _into_receptacle(engine: Engine) -> Iterator[_Route]:
    """Routes that bring the wanted objects, in the wanted state, into one receptacle."""
    world, goal = engine.world, engine.world.goal
    wanted = [o for o in world.name if world.kind.get(o) == goal.object]
    for r in world.location:
        if world.kind[r] != goal.receptacle:
            continue
        there = engine.matching(r)
        for chosen in permutations([o for o in wanted if o not in there], goal.count - len(there)):
            routes = [_start(engine)]
            for o in chosen:
                treated = [done for route in routes for holding in _holding(route, o) for done in _treated(holding, o)]
                routes = [put for route in treated if (put := _delivered(route, o, r)) is not None]
            yield from routes


def _delivered(route: _Route, o: str, r: str) -> _Route | None:
    """Bring the held object to its destination, unless it lies there all the while: objects can be in two places."""
    return route if o in route.engine.state.inside[r] and route.source != r else _putting(route, r)


def _under_lamp(engine: Engine) -> Iterator[_Route]:
    """Routes that bring a wanted object to a lamp and use it."""
    world, state, goal, start = engine.world, engine.state, engine.world.goal, _start(engine)
    lamps = [(lamp, r, start) for r, objects in state.inside.items() for lamp in objects]
    if state.held is not None:  # a lamp in the hand has to be put down first
        lamps += [(state.held, r, put) for r in world.location if (put := _putting(start, r)) is not None]
    for lamp, r, route in sorted(lamps, key=lambda place: place[:2]):
        if world.kind[lamp] == goal.lamp and lamp in world.toggleable:
            for o in (o for o in world.name if world.kind.get(o) == goal.object):
                for holding in _holding(route, o):
                    there = holding.at(r)
                    yield there if lamp in state.toggled else there.does("use {}", lamp, held=o)


# ------------------------------------------------------------------------------------------------------ the search

_INTRO = re.compile(r"you see (.*)\.\n\nYour task is to: (.*)", re.DOTALL)
_CONTENT = re.compile(r"(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see (.*)\.")
_NAME = re.compile(r"\ba (\w+ \d+)")
_TAKE = re.compile(r"take (\w+ \d+) from (\w+ \d+)")
_PUT = re.compile(r"(?:move|put) (\w+ \d+) (?:to|in/on) (\w+ \d+)")
_TREAT = re.compile(r"(clean|heat|cool) (\w+ \d+) with \w+ \d+")
_UNDOES = {"heat": "cool", "cool": "heat", "clean": ""}

_HABITS = {thing.lower(): {p.lower(): w for p, w in places.items()} for thing, places in house.PLACES.items()}
_CLOSED = frozenset(kind.lower() for kind in house.OPENABLE)


class SearchExpert:
    """Plays from texts alone: looks where things usually are, remembers what it saw, then does what the task says.

    Call `observe` after every command, whoever chose it; `act` names the next one.
    """

    def __init__(self, introduction: str) -> None:
        """Read the introduction. Raises ValueError if it is not one, or states no task of the six kinds."""
        match = _INTRO.search(introduction)
        if match is None:
            raise ValueError("not the introduction of an ALFWorld game")
        self.wish = read_task(match[2])
        self.verb, self.tool = TREATMENTS.get(self.wish.kind, ("", ""))
        self.receptacles = _NAME.findall(match[1])
        self.contents: dict[str, list[str]] = {}
        """What was last seen in each receptacle that was looked into."""
        self.held = ""
        self.treated: set[str] = set()
        self.refused: set[str] = set()
        """Destinations that do not take the object."""

    def observe(self, command: str, feedback: str) -> None:
        """Learn from a command and what the game answered."""
        if feedback == NOTHING_HAPPENS:
            return
        if content := _CONTENT.search(feedback):
            self.contents[content[1] or content[2]] = _NAME.findall(content[3])
        elif take := _TAKE.fullmatch(command):
            self.held = take[1]
            self.contents[take[2]] = [o for o in self.contents.get(take[2], []) if o != take[1]]
        elif put := _PUT.fullmatch(command):
            self.held = ""
            self.contents.setdefault(put[2], []).append(put[1])
        elif treat := _TREAT.fullmatch(command):
            if treat[1] == self.verb:
                self.treated.add(treat[2])
            elif treat[1] == _UNDOES.get(self.verb):
                self.treated.discard(treat[2])

    def act(self, admissible: Sequence[str]) -> str:
        """The next command, one of the admissible ones."""
        offers = dict.fromkeys(admissible)
        if not self.held:
            return self._fetch(offers)
        if _kind(self.held) != self.wish.obj:
            return self._drop(offers)
        if self.wish.kind == "look_at_obj_in_light":
            return self._use_lamp(offers)
        if self.verb and self.held not in self.treated:
            command = f"{self.verb} {self.held} with {self.tool} "
            ready = [offer for offer in offers if offer.startswith(command)]
            return ready[0] if ready else self._approach(self._of_kind(self.tool), offers)
        return self._deliver(offers)

    def _fetch(self, offers: Collection[str]) -> str:
        """Take a wanted object that is offered, go to one that was seen, or search."""
        done = self._destination() if self.wish.count > 1 else ""
        for offer in offers:
            take = _TAKE.fullmatch(offer)
            if take and _kind(take[1]) == self.wish.obj and take[2] != done:
                return offer
        known = [r for r in self.contents if r != done and self._wanted(r)]
        return self._approach(known, offers) if known else self._search(self.wish.obj, offers)

    def _use_lamp(self, offers: Collection[str]) -> str:
        lamp = self.wish.place
        for offer in offers:
            if offer.startswith(f"use {lamp} "):
                return offer
        known = [r for r, objects in self.contents.items() if any(_kind(o) == lamp for o in objects)]
        return self._approach(known, offers) if known else self._search(lamp, offers)

    def _deliver(self, offers: Collection[str]) -> str:
        destination = self._destination()
        for offer in offers:
            put = _PUT.fullmatch(offer)
            if put and put[2] == destination:
                return offer
        if f"examine {destination}" in offers and f"open {destination}" not in offers:
            self.refused.add(destination)
            destination = self._destination()
        return self._approach([destination], offers)

    def _drop(self, offers: Collection[str]) -> str:
        """Get rid of an object the task does not ask for."""
        puts = [offer for offer in offers if _PUT.fullmatch(offer)]
        habits = _HABITS.get(_kind(self.held), {})
        usual = sorted(self.receptacles, key=lambda r: (_kind(r) in _CLOSED, -habits.get(_kind(r), 0)))
        return puts[0] if puts else self._approach([r for r in usual if f"examine {r}" not in offers], offers)

    def _search(self, thing: str, offers: Collection[str]) -> str:
        """Look into the receptacle most likely to hold a thing, for the number of commands it takes to do so."""
        unseen = [r for r in self.receptacles if r not in self.contents]
        if not unseen:  # the thing went unnoticed or was moved: look again
            self.contents.clear()
            unseen = [r for r in self.receptacles if f"examine {r}" not in offers]
        habits, number = _HABITS.get(thing, {}), Counter(map(_kind, self.receptacles))

        def value(r: str) -> float:
            commands = 2 if _kind(r) in _CLOSED and f"open {r}" not in offers else 1
            return habits.get(_kind(r), 0.1) / number[_kind(r)] / commands

        return self._approach([max(unseen, key=value)], offers)

    def _destination(self) -> str:
        """The receptacle to bring objects to: of the right type, best one that holds a wanted object already."""
        fitting = [r for r in self._of_kind(self.wish.place) if r not in self.refused]
        return max(fitting or self._of_kind(self.wish.place), key=lambda r: len(self._wanted(r)))

    def _wanted(self, receptacle: str) -> list[str]:
        return [o for o in self.contents.get(receptacle, ()) if _kind(o) == self.wish.obj]

    def _of_kind(self, kind: str) -> list[str]:
        return [r for r in self.receptacles if _kind(r) == kind]

    def _approach(self, receptacles: Sequence[str], offers: Collection[str]) -> str:
        """Open, go to, or look at the first of some receptacles."""
        for r in receptacles:
            for command in (f"open {r}", f"go to {r}", f"examine {r}"):
                if command in offers:
                    return command
        return "look"


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]
