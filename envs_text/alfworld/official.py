"""The official ALFWorld engine (unmodified alfworld and textworld packages) behind the native engine's interface.

It is some thousand times slower than `envs_text.alfworld.engine`; it is what the native one is held against.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs_text.alfworld.games import Game, Rules
from harness.contracts import HarnessError

# What the packaged rules (right) say where those of the distributed 2.1.1 games (left) differ.
DOMAIN_CHANGES = (("(receptacleType ?r SinkType)", ";(receptacleType ?r SinkType)"),)
GRAMMAR_CHANGES = (
    ("You arrive at {lend.name}.", "You arrive at {r.name}."),
    ("You put the {o.name} in/on the {r.name}.", "You move the {o.name} to the {r.name}."),
    ("put {o} in/on {r}", "move {o} to {r}"),
)

_IDLE: list[Any] = []
"""Environments of closed engines. Each has a planner library of its own, which cannot be unloaded safely: reuse it."""


class OfficialEngine:
    """Plays one game with the official packages; same methods and texts as `envs_text.alfworld.engine.Engine`.

    Call `reset` before anything else. Loading takes about 0.3 s, a reset as long, a step 30 ms, and memory 100 MB.
    """

    def __init__(self, game: Game, needs: Collection[str] = ()) -> None:
        """Load a game; raises HarnessError if the packages are not installed or cannot load it.

        ``needs`` names what the package shall work out in every state for an expert: ``"facts"``,
        ``"policy_commands"`` (a plan of its planner).
        """
        demangler, infos, pddl = _packages()
        domain, grammar = official_rules(game.rules)
        self.game = game
        self._env: Any = _IDLE.pop() if _IDLE else infos(demangler(pddl()))
        for name in ("facts", "policy_commands"):
            setattr(self._env.request_infos, name, name in needs)
        data = {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL.", game.task),
            "pddl_problem": game.problem,
        }
        try:
            with tidied():
                self._env.load(data)
        except KeyError as error:  # what the package raises for a problem that its planner finds hopeless
            self.close()
            raise HarnessError(f"the official engine cannot load {game.name}: it has no solution ({error})") from error
        self._state: Any = None

    def reset(self) -> str:
        """Start anew; returns the introduction: welcome, room, task."""
        with tidied():
            self._state = self._env.reset()
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command and return the feedback."""
        self._state, _, _ = self._env.step(command)
        return str(self._state.feedback)

    def admissible(self) -> tuple[str, ...]:
        """The admissible commands in alphabetical order."""
        return tuple(self._state["admissible_commands"])

    @property
    def state(self) -> Mapping[str, Any]:
        """What the package tells about the present state."""
        return self._state  # type: ignore[no-any-return]

    @property
    def won(self) -> bool:
        """Whether the goal holds now."""
        return bool(self._state["won"])

    def close(self) -> None:
        """Give the package's environment back for the next game."""
        if self._env is not None:
            _IDLE.append(self._env)
            self._env = None


def check_installed() -> None:
    """Raise HarnessError, with the command that helps, unless the official packages are installed."""
    if not all(map(find_spec, ("alfworld", "textworld", "fast_downward"))):
        raise _not_installed()


@lru_cache(maxsize=2)
def official_rules(rules: Rules) -> tuple[str, str]:
    """PDDL domain and grammar of a rule version; the package carries the current one, from which the other differs
    in a few lines (the extra command ``help`` among them)."""
    try:
        with tidied():
            from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    except ImportError as error:
        raise _not_installed() from error
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text("utf-8"), Path(ALFRED_TWL2_PATH).read_text("utf-8")
    if rules == "current":
        return domain, grammar
    for old, new in DOMAIN_CHANGES:
        domain = domain.replace(new, old)
    for old, new in GRAMMAR_CHANGES:
        grammar = grammar.replace(new, old)
    before, _, _ = domain.partition("\n(:action help")
    return before + "\n)\n", grammar.partition("\naction help")[0]


@lru_cache(maxsize=1)
def _packages() -> tuple[Any, Any, Any]:
    """AlfredDemangler, AlfredInfos and PddlEnv."""
    try:
        with tidied():
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.envs.pddl.pddl import PddlEnv
    except ImportError as error:
        raise _not_installed() from error
    if find_spec("fast_downward") is None:  # PddlEnv would say so only when it is built
        raise _not_installed()
    return AlfredDemangler, AlfredInfos, PddlEnv


def _not_installed() -> HarnessError:
    return HarnessError("the official ALFWorld engine is not installed: pip install 'seed-harness[alfworld]'")


@contextmanager
def tidied() -> Iterator[None]:
    """Undo what the packages do to the process: alfworld sets ALFWORLD_DATA on import, the planner's translator
    overwrites the command line."""
    argv, data = sys.argv, os.environ.get("ALFWORLD_DATA")
    try:
        yield
    finally:
        sys.argv = argv
        if data is None:
            os.environ.pop("ALFWORLD_DATA", None)
