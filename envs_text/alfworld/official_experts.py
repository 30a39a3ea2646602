"""The two experts of the official packages, behind the interface of our own: `observe` every command, then `act`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from envs_text.alfworld.engine import PUT
from envs_text.alfworld.official import OfficialEngine, tidied

PATIENCE = 200
"""Commands after which the package's handcoded expert gives up."""

IDLE = "look"


class HandcodedExpert:
    """The package's hand-written rules: from the texts, the objects' hidden states, and chance where it is undecided.

    Its rules know the current wording of commands only; games of the older rules are translated for it. It is seeded
    by the game and the number of the command, so the same episode is always the same. Where the package would raise
    for having run out of ideas, it stays at "look".
    """

    def __init__(self, engine: OfficialEngine) -> None:
        """``engine`` must have been made with `HandcodedExpert.NEEDS` and reset."""
        with tidied():
            from alfworld.agents.expert import handcoded_expert, handcoded_expert_tw
            from alfworld.gen import constants

        self._gives_up = (handcoded_expert.HandCodedAgentTimeout, handcoded_expert.HandCodedAgentFailed)
        self._engine = engine
        self._agent: Any = handcoded_expert_tw.HandCodedTWAgent(max_steps=PATIENCE)
        game = engine.game
        targets = {key: name.lower() if name in constants.OBJECTS else name for key, name in game.params.items()}
        task = {**targets, "task_type": game.kind}
        self._agent.policy = self._agent.get_task_policy(task)(task, max_steps=PATIENCE)
        self._agent.observe(engine.state["feedback"])
        self._commands = 0
        self._wish = IDLE

    NEEDS = ("facts",)

    def observe(self, command: str, feedback: str) -> None:
        """Take in a command that the engine has carried out, and make up the mind about the next."""
        self._commands += 1
        state = self._engine.state
        shown = {
            "feedback": feedback,
            "admissible_commands": [_modern(offer) for offer in state["admissible_commands"]],
            "facts": sorted(state["facts"], key=str),  # the package lists a set
        }
        if not state["won"]:
            with _drawing_from(f"{self._engine.game.name} {self._commands}"):
                try:
                    self._wish = self._agent.act(shown, 0, False, _modern(command))
                except self._gives_up:
                    self._wish = IDLE

    def act(self, admissible: Sequence[str]) -> str:
        """The next command, one of the admissible ones."""
        return next((offer for offer in admissible if _modern(offer) == self._wish), IDLE)


class Planner:
    """The planner of textworld (fast-downward): the first command of its plan from the present state."""

    NEEDS = ("policy_commands",)

    def __init__(self, engine: OfficialEngine) -> None:
        """``engine`` must have been made with `Planner.NEEDS` and reset."""
        self._engine = engine

    def observe(self, command: str, feedback: str) -> None:
        """Nothing to remember: the planner reads the engine's state."""

    def act(self, admissible: Sequence[str]) -> str:
        """The next command; "look" where there is no plan, as after the goal."""
        return next(iter(self._engine.state["policy_commands"]), IDLE)


def _modern(command: str) -> str:
    """A command in the current rules' words."""
    old, new = (PUT[rules][0].split("{}") for rules in ("2.1.1", "current"))
    if command.startswith(old[0]) and old[1] in command:
        return command.replace(old[0], new[0], 1).replace(old[1], new[1], 1)
    return command


@contextmanager
def _drawing_from(seed: str) -> Iterator[None]:
    """Seed Python's own generator, which the package draws from, and leave it as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
