"""Holds the native engine against the official one: same games, same commands, text for text, and the time of each."""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from envs_text.alfworld.engine import Engine
from envs_text.alfworld.experts import plan
from envs_text.alfworld.games import Game
from envs_text.alfworld.official import OfficialEngine
from envs_text.alfworld.world import parse_world

Moment = tuple[str, tuple[str, ...], bool]
"""What an engine shows after a command: text, admissible commands in order, whether the goal holds."""

# Not admissible anywhere, or not as they are written.
INVALID = ("", "dance", "LOOK", "go to nowhere 1", "take apple 1", "go to cabinet 999", "examine loc 1", "look around")


class PlaysAlfworld(Protocol):
    """What both engines can do."""

    def reset(self) -> str: ...
    def step(self, command: str) -> str: ...
    def admissible(self) -> tuple[str, ...]: ...
    @property
    def won(self) -> bool: ...


def play(engine: PlaysAlfworld, commands: Iterable[str]) -> list[Moment]:
    """What an engine shows after each command."""
    return [(engine.step(command), engine.admissible(), engine.won) for command in commands]


def differences(game: Game, commands: Sequence[str]) -> list[str]:
    """Play commands in both engines; one line for everything in which they differ, from the introduction on."""
    return _compare(game, commands, defaultdict(float))


def compare_engines(games: Sequence[Game], steps: int, seed: int = 0) -> dict[str, float]:
    """Play the same walks in both engines, taking turns game by game; compare texts and CPU time.

    Returns:
        ``games``, ``moments`` and ``unequal`` (how many moments were compared, how many differences there were);
        ``native_load_s``, ``official_load_s``, ``load_ratio``: loading a game and its first reset, seconds;
        ``native_step_s``, ``official_step_s``, ``step_ratio``: one command and the admissible list after it.
    """
    seconds: dict[str, float] = defaultdict(float)
    unequal = 0
    for number, game in enumerate(games):
        unequal += len(_compare(game, walk(game, steps, seed + number), seconds))
    mean = {key: total / len(games) / (steps if "step" in key else 1) for key, total in seconds.items()}
    return {
        "games": len(games),
        "moments": len(games) * (steps + 1),
        "unequal": unequal,
        **mean,
        "load_ratio": mean["official_load_s"] / mean["native_load_s"],
        "step_ratio": mean["official_step_s"] / mean["native_step_s"],
    }


def _compare(game: Game, commands: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Differences between the engines; adds the CPU time of each to ``seconds``."""
    shown = []
    parse_world.cache_clear()
    for name, kind in (("native", Engine), ("official", OfficialEngine)):
        gc.collect()  # so that neither pays for the other's garbage
        begin = time.process_time()
        engine: PlaysAlfworld = kind(game)
        introduction = engine.reset()
        loaded = time.process_time()
        first = (introduction, engine.admissible(), engine.won)
        ready = time.process_time()
        moments = play(engine, commands)
        seconds[f"{name}_load_s"] += loaded - begin
        seconds[f"{name}_step_s"] += time.process_time() - ready
        shown.append([first, *moments])
        if isinstance(engine, OfficialEngine):
            engine.close()
    return [
        f"{game.name} ({game.rules}) after {command!r}: {what} {ours!r}, officially {theirs!r}"
        for command, native, official in zip(["(reset)", *commands], *shown, strict=True)
        for what, ours, theirs in zip(("text", "admissible", "won"), native, official, strict=True)
        if ours != theirs
    ]


# ---------------------------------------------------------------------------------------------------------- walks


def walk(game: Game, steps: int, seed: int) -> list[str]:
    """``steps`` commands for a game: the expert's solution, deeds that chance would rarely do, and random commands."""
    rng = random.Random(seed)
    engine = Engine(game)
    commands = plan(game)[: steps // 3]
    for command in commands:
        engine.step(command)
    for deed in rng.sample(DEEDS, len(DEEDS)):
        if len(commands) < steps * 2 // 3:
            commands += deed(engine, rng)
    while len(commands) < steps:
        command = _random_command(engine, rng)
        commands.append(command)
        engine.step(command)
    return commands[:steps]


def _random_command(engine: Engine, rng: random.Random) -> str:
    """A command of a random verb, or (one in twenty) one that is not admissible."""
    by_verb: dict[str, list[str]] = defaultdict(list)
    for command in engine.admissible():
        by_verb[command.split()[0]].append(command)
    if rng.random() < 0.05:
        return rng.choice([*INVALID, by_verb["go"][0].upper(), f"  {by_verb['go'][-1]} "])
    weights = [5 if verb == "go" else 1 if verb in ("look", "inventory", "help") else 3 for verb in by_verb]
    return rng.choice(rng.choices(list(by_verb.values()), weights)[0])


class _Agent:
    """Drives an engine by intent and notes the commands."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.commands = engine, list[str]()

    def do(self, *commands: str) -> bool:
        """Carry out commands, admissible or not; returns whether the last one was."""
        for command in commands:
            admissible = command in self.engine.admissible()
            self.engine.step(command)
            self.commands.append(command)
        return admissible

    def reach(self, r: str) -> None:
        name = self.engine.world.name[r]
        for command in (f"go to {name}", f"open {name}"):
            if command in self.engine.admissible():
                self.do(command)

    def put_down(self) -> None:
        """Put down what is held where it fits."""
        engine = self.engine
        held = engine.state.held
        if held is None:
            return
        for r in engine.world.location:
            if (engine.world.kind[r], engine.world.kind[held]) in engine.world.fits:
                self.reach(r)
                self.do(engine.put_command(held, r))
                return

    def take(self, o: str, r: str) -> bool:
        """Empty the hand and take an object from a receptacle."""
        self.put_down()
        self.reach(r)
        name = self.engine.world.name
        return self.do(f"take {name[o]} from {name[r]}")


def _places(engine: Engine, objects: Iterable[str]) -> list[tuple[str, str]]:
    """(object, receptacle) for all places of some objects now, sorted."""
    wanted = set(objects) & engine.world.pickupable
    return sorted((o, r) for r, inside in engine.state.inside.items() for o in inside & wanted)


def slice_and_treat(engine: Engine, rng: random.Random) -> list[str]:
    """Slice something, then clean, heat and cool it in some order, examining it after each."""
    world, agent = engine.world, _Agent(engine)
    knives = _places(engine, (o for o, kind in world.kind.items() if kind in ("knife", "butterknife")))
    foods = [(o, r) for o, r in _places(engine, world.sliceable) if (o, world.location[r]) in engine.state.placed]
    if knives and foods and agent.take(*rng.choice(knives)):
        o, r = rng.choice(foods)
        held = engine.state.held
        agent.do(f"examine {world.name[held or o]}", f"go to {world.name[r]}")
        agent.do(f"slice {world.name[o]} with {world.name[held or o]}")
        if agent.take(o, r):
            agent.do(f"examine {world.name[o]}", f"slice {world.name[o]} with {world.name[held or o]}")
            agent.commands += _treatments(engine, rng, o)
    return agent.commands


def treat(engine: Engine, rng: random.Random) -> list[str]:
    """Take something and clean, heat and cool it in some order."""
    world, agent = engine.world, _Agent(engine)
    options = _places(engine, world.cleanable | world.heatable | world.coolable)
    if options:
        o, r = rng.choice(options)
        if agent.take(o, r):
            agent.commands += _treatments(engine, rng, o)
    return agent.commands


def _treatments(engine: Engine, rng: random.Random, o: str) -> list[str]:
    world, agent = engine.world, _Agent(engine)
    tools = [(r, verb) for r, kind in world.kind.items() for verb, tool in _TOOLS if kind == tool]
    for r, verb in rng.sample(sorted(tools), min(3, len(tools))):
        agent.do(f"go to {world.name[r]}", f"{verb} {world.name[o]} with {world.name[r]}", f"examine {world.name[o]}")
    return agent.commands


_TOOLS = (("clean", "sinkbasin"), ("heat", "microwave"), ("cool", "fridge"))


def move_beside(engine: Engine, rng: random.Random) -> list[str]:
    """Move something between two receptacles of one location, looking around; also take one of two places of it."""
    world, agent = engine.world, _Agent(engine)
    beside = [
        (o, r, other)
        for o, r in _places(engine, world.pickupable)
        for other in world.here[world.location[r]]
        if other != r and (world.kind[other], world.kind[o]) in world.fits
    ]
    if beside:
        o, r, other = rng.choice(beside)
        agent.take(o, r)
        agent.do("look", "inventory")
        agent.reach(other)
        agent.do(engine.put_command(o, other), "look", f"examine {world.name[other]}")
        agent.do(f"take {world.name[o]} from {world.name[other]}", "look")
        agent.reach(r)
        agent.do(engine.put_command(o, r), "look")
    return agent.commands


def take_twice(engine: Engine, rng: random.Random) -> list[str]:
    """Take something that lies in two receptacles from both of them."""
    world, agent = engine.world, _Agent(engine)
    places: dict[str, list[str]] = defaultdict(list)
    for o, r in _places(engine, world.pickupable):
        places[o].append(r)
    double = sorted(o for o, rs in places.items() if len(rs) > 1)
    if double:
        o = rng.choice(double)
        first, second, *_ = places[o]
        agent.take(o, first)
        agent.reach(second)
        agent.do("look", f"examine {world.name[second]}", f"take {world.name[o]} from {world.name[second]}")
        agent.do(engine.put_command(o, second), "look")
        agent.do(f"take {world.name[o]} from {world.name[second]}", "look")
        agent.reach(first)
        agent.do(engine.put_command(o, first), "look", f"examine {world.name[first]}")
    return agent.commands


def use_lamp(engine: Engine, rng: random.Random) -> list[str]:
    """Use what can be switched on, twice, and examine it in the hand where it can be taken."""
    world, agent = engine.world, _Agent(engine)
    switches = sorted((o, r) for r, inside in engine.state.inside.items() for o in inside & world.toggleable)
    if switches:
        o, r = rng.choice(switches)
        agent.do(f"go to {world.name[r]}", f"use {world.name[o]}", f"use {world.name[o]}")
        if o in world.pickupable and agent.take(o, r):
            agent.do(f"examine {world.name[o]}", f"use {world.name[o]}")
    return agent.commands


DEEDS = (slice_and_treat, treat, move_beside, take_twice, use_lamp)
"""What a walk does beside the expert's solution; each names the commands it has carried out."""
