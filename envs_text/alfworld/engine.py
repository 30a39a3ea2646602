"""The native ALFWorld engine: every rule of the official text game, in plain Python.

It loads the same PDDL problem file as the official engine (textworld) and prints the same texts, character for
character, in both rule versions; ``tests/envs_text/test_alfworld_engine.py`` holds the two against each other.

The game in short. A room holds *receptacles* (cabinets, tables, ...) at *locations* and *objects* in receptacles. The
agent stands at one location, holds at most one object, and reaches what is in the receptacles there that have no door
or stand open. `Engine.commands` states when each command is admissible, the methods after it what it does and prints.
Where the official rules are odd, so are these: heating works with the microwave's door shut, ``use`` reaches into
closed receptacles, a lamp never goes off again, and an object may lie in several receptacles at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from envs_text.alfworld.games import Game
from envs_text.alfworld.world import State, parse_world
from harness.contracts import HarnessError

NOTHING_HAPPENS = "Nothing happens."

# Command and feedback of putting an object down, by rule version; filled with (object, receptacle).
PUT = {
    "2.1.1": ("put {} in/on {}", "You put the {} in/on the {}."),
    "current": ("move {} to {}", "You move the {} to the {}."),
}

HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

Action = tuple[Callable[..., str], *tuple[str, ...]]
"""What a command does: a method of `Engine` and its arguments (ids)."""


class Engine:
    """Plays one game. ``world`` and ``state`` are open to reading (experts need the hidden state), not to writing."""

    def __init__(self, game: Game) -> None:
        """Load a game; raises HarnessError if its problem cannot be read or has a goal that no task kind has."""
        self.game = game
        try:
            self.world = parse_world(game.problem)
        except ValueError as error:
            raise HarnessError(f"cannot load ALFWorld game {game.name}: {error}") from error
        # Sinks themselves count as wash basins only in the older rules.
        self._basins = {"sinkbasin", "sink"} if game.rules == "2.1.1" else {"sinkbasin"}
        self._targets = [r for r in self.world.location if self.world.kind[r] == self.world.goal.receptacle]
        self._go_commands: dict[str, dict[str, Action]] = {}
        self._commands: dict[str, Action] | None = None
        self._admissible: tuple[str, ...] | None = None
        self.reset()

    def reset(self) -> str:
        """Start anew; returns the introduction: welcome, room, task."""
        self.restore(self.world.start)
        room = self._look(self.world.location)
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {self.game.task}"

    def restore(self, state: State) -> None:
        """Go on from a copy of a state of the same game."""
        self.state = state.copy()
        self._forget()

    def step(self, command: str) -> str:
        """Carry out a command and return the feedback; one that is not admissible changes nothing."""
        action = self.commands().get(command.strip())
        return NOTHING_HAPPENS if action is None else action[0](self, *action[1:])

    def admissible(self) -> tuple[str, ...]:
        """The admissible commands in alphabetical order (of characters, so "cabinet 10" precedes "cabinet 2")."""
        if self._admissible is None:
            self._admissible = tuple(sorted(self.commands()))
        return self._admissible

    @property
    def won(self) -> bool:
        """Whether the goal holds now; it is not remembered."""
        world, state, goal = self.world, self.state, self.world.goal
        if goal.lamp:
            reached = (lamp for r in world.here.get(state.location, ()) for lamp in state.inside[r])
            return (state.held is not None and world.kind[state.held] == goal.object) and any(
                world.kind[lamp] == goal.lamp and lamp in world.toggleable and lamp in state.toggled for lamp in reached
            )
        return any(len(self.matching(r)) >= goal.count for r in self._targets)

    def matching(self, receptacle: str) -> list[str]:
        """Objects in a receptacle that have the type and the state that the goal asks for."""
        world, goal = self.world, self.world.goal
        objects = [o for o in self.state.inside[receptacle] if world.kind[o] == goal.object]
        if objects and goal.state:
            able, done = self.treatable(goal.state)
            return [o for o in objects if o in able and o in done]
        return objects

    def treatable(self, state: str) -> tuple[frozenset[str], set[str]]:
        """Objects that can come into a state ("clean", "hot", "cool"), and objects that are in it now."""
        world, now = self.world, self.state
        return {
            "clean": (world.cleanable, now.clean),
            "hot": (world.heatable, now.hot),
            "cool": (world.coolable, now.cool),
        }[state]

    # ------------------------------------------------------------------------------- when a command is admissible

    def commands(self) -> Mapping[str, Action]:
        """Admissible commands with what they do: a method and its arguments."""
        if self._commands is not None:
            return self._commands
        world, state, name, held = self.world, self.state, self.world.name, self.state.held
        table = self._commands = self._go().copy()
        table["inventory"] = (Engine._inventory,)
        table["look"] = (Engine._look,)
        if self.game.rules == "current":
            table["help"] = (Engine._help,)
        for r in world.here.get(state.location, ()):
            place, kind = name[r], world.kind[r]
            table[f"examine {place}"] = (Engine._describe, r)
            if r not in world.openable:
                reachable = True
            elif reachable := r in state.opened:
                table[f"close {place}"] = (Engine._close, r)
            else:
                table[f"open {place}"] = (Engine._open, r)
            for o in state.inside[r]:
                if o in world.toggleable:
                    table[f"use {name[o]}"] = (Engine._use, o)
                if reachable and held is None and o in world.pickupable:
                    table[f"take {name[o]} from {place}"] = (Engine._take, o, r)
            if held is None:
                continue
            if reachable and (kind, world.kind[held]) in world.fits:
                table[self.put_command(held, r)] = (Engine._put, held, r)
            if kind == "microwave" and held in world.heatable:
                table[f"heat {name[held]} with {place}"] = (Engine._heat, held, r)
            if kind == "fridge" and held in world.coolable:
                table[f"cool {name[held]} with {place}"] = (Engine._cool, held, r)
            if kind in self._basins and held in world.cleanable:
                table[f"clean {name[held]} with {place}"] = (Engine._clean, held, r)
        if held is not None:
            table[f"examine {name[held]}"] = (Engine._examine_object, held)
            if world.kind[held] in ("knife", "butterknife"):
                for o in world.sliceable:
                    if (o, state.location) in state.placed:
                        table[f"slice {name[o]} with {name[held]}"] = (Engine._slice, o, held)
        return table

    def put_command(self, o: str, r: str) -> str:
        """The command that puts an object into a receptacle."""
        return PUT[self.game.rules][0].format(self.world.name[o], self.world.name[r])

    def _go(self) -> dict[str, Action]:
        """Go-to commands from the present location: to every receptacle that is elsewhere."""
        location = self.state.location
        if location not in self._go_commands:
            self._go_commands[location] = {
                f"go to {self.world.name[r]}": (Engine._go_to, r)
                for r, place in self.world.location.items()
                if place != location
            }
        return self._go_commands[location]

    # ------------------------------------------------------------------------------------ what it does and prints

    def _go_to(self, r: str) -> str:
        self.state.location = self.world.location[r]
        self._forget()
        shown = r if self.game.rules == "current" else self.state.location
        return f"You arrive at {self.world.name[shown]}. {self._describe(r)}"

    def _open(self, r: str) -> str:
        self.state.opened.add(r)
        self._forget()
        return f"You open the {self.world.name[r]}. {self._describe(r)}"

    def _close(self, r: str) -> str:
        self.state.opened.discard(r)
        self._forget()
        return f"You close the {self.world.name[r]}."

    def _take(self, o: str, r: str) -> str:
        state = self.state
        state.inside[r].discard(o)
        state.taken.add((o, r))
        state.placed.discard((o, state.location))
        state.held = o
        self._forget()
        return f"You pick up the {self.world.name[o]} from the {self.world.name[r]}."

    def _put(self, o: str, r: str) -> str:
        state = self.state
        state.inside[r].add(o)
        state.taken.discard((o, r))
        state.placed.add((o, state.location))
        state.held = None
        self._forget()
        return PUT[self.game.rules][1].format(self.world.name[o], self.world.name[r])

    def _heat(self, o: str, r: str) -> str:
        self.state.hot.add(o)
        self.state.cool.discard(o)
        return f"You heat the {self.world.name[o]} using the {self.world.name[r]}."

    def _cool(self, o: str, r: str) -> str:
        self.state.cool.add(o)
        self.state.hot.discard(o)
        return f"You cool the {self.world.name[o]} using the {self.world.name[r]}."

    def _clean(self, o: str, r: str) -> str:
        self.state.clean.add(o)
        return f"You clean the {self.world.name[o]} using the {self.world.name[r]}."

    def _use(self, o: str) -> str:
        self.state.toggled.add(o)
        return f"You turn on the {self.world.name[o]}."

    def _slice(self, o: str, knife: str) -> str:
        self.state.sliced.add(o)
        return f"You sliced the {self.world.name[o]} with the {self.world.name[knife]}."

    def _inventory(self) -> str:
        held = self.state.held
        return "You are not carrying anything." if held is None else f"You are carrying: a {self.world.name[held]}."

    def _help(self) -> str:
        return HELP

    def _look(self, appliances: Iterable[str] = ()) -> str:
        """The surroundings; only the introduction lists the ``appliances`` of the room."""
        state, name = self.state, self.world.name
        here = self.world.here.get(state.location)
        if not here:
            seen = _list(f"a {name[r]}" for r in appliances)
            return f"You are in the middle of a room. Looking quickly around you, you see {seen}."
        beside = sorted(o for o, location in state.placed if location == state.location) if state.taken else []
        floor = _list(f"a {name[o]}" for o in beside for r in here if (o, r) in state.taken)
        return f"You are facing the {_list(name[r] for r in here)}. Next to it, you see {floor}."

    def _describe(self, r: str) -> str:
        name = self.world.name
        if r in self.world.openable and r not in self.state.opened:
            return f"The {name[r]} is closed."
        seen = _list(f"a {name[o]}" for o in sorted(self.state.inside[r]))
        if r in self.world.openable:
            return f"The {name[r]} is open. In it, you see {seen}."
        return f"On the {name[r]}, you see {seen}."

    def _examine_object(self, o: str) -> str:
        state, name = self.state, self.world.name
        if o in self.world.contents:
            inner = _list(f"a {name[i]}" for i in self.world.contents[o])
            return f"This is a normal {name[o]}. In it, you see {inner}."
        sliced = o in state.sliced
        temperature = "hot" if o in state.hot else "cool" if o in state.cool else ""
        condition = " and ".join(word for word in (temperature, "clean" if o in state.clean else "") if word)
        if condition:
            word = "cold" if condition == "cool" and not sliced else condition
            return f"This is a {word} {'sliced ' if sliced else ''}{name[o]}."
        if o in state.toggled:
            return f"This {name[o]} is on."
        return f"This is a sliced {name[o]}." if sliced else f"There's nothing special about {name[o]}."

    def _forget(self) -> None:
        """The set of admissible commands has changed."""
        self._commands = None
        self._admissible = None


def _list(items: Iterable[str]) -> str:
    """An enumeration as the game words it, with a comma before "and" even between two."""
    *first, last = list(items) or ["nothing"]
    return f"{', '.join(first)}, and {last}" if first else last
