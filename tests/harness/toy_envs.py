"""A toy environment: three doors, one prize, a picture, and trouble on demand. Workers import it, so no torch here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np

from harness.contracts import AgentEnv, EnvCard, Episode, FreeText, Observation, Panel, Prompt, Task, View, digest

DOORS = ("left", "middle", "right")
WAIT = "wait"
LEAKED: list[bytearray] = []


class Doors(AgentEnv):
    """Open doors until the prize is found (reward 1), or the same door twice (failure).

    Every text is some action, so that a policy with random weights plays varied episodes. A task's spec may name
    ``trouble`` ("raise", "die", "crash", "hang", "nan", "leak") that strikes in its step ``at`` (0: during the reset).
    """

    option_names = ("max_steps",)
    phrases = ("Find the prize.", "\nNow: ", "You have opened", "Open the ", " door.")

    def __init__(self, max_steps: int = 4) -> None:
        self.action_space = FreeText(DOORS)
        self.opened: list[str] = []
        self.steps = 0
        self.task: Task | None = None
        self.card = EnvCard(
            id="toy_envs:Doors",
            modality="vision",
            max_steps=max_steps,
            history=2,
            success="the prize is found",
            reward="1 for the prize",
            invalid_action="nothing happens",
            engine="toy-1",
            data="toy-1",
            parser="toy-1",
            panels=("train", "eval"),
        )

    def panel(self, name: str, size: int | None = None) -> Panel:
        return Panel(name, tuple(_task(name, number) for number in range(16 if size is None else size)))

    def task_text(self, observation: Observation) -> str:
        return "Find the prize."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.task = (options or {}).get("task") or self.panel("train").tasks[0]
        self.opened, self.steps = [], 0
        self._trouble()
        return self._observation(), self._info(True)

    def step(self, action: str) -> Any:
        self.steps += 1
        self._trouble()
        again = action in self.opened
        if action in DOORS:
            self.opened.append(action)
        info = self._info(action in DOORS)
        over = info["success"] or again
        reward = float("nan") if self._has("nan") else info["score"]
        return self._observation(), reward, over, self.steps >= self.card.max_steps and not over, info

    def _has(self, trouble: str) -> bool:
        assert self.task is not None
        return self.task.spec.get("trouble") == trouble and self.steps == self.task.spec["at"]

    def _trouble(self) -> None:
        if self._has("raise"):
            raise RuntimeError("this door is\nstuck")
        if self._has("die"):
            os._exit(3)
        if self._has("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._has("hang"):
            time.sleep(600)
        if self._has("leak"):
            LEAKED.append(bytearray(os.urandom(1 << 20)) * 64)

    def _info(self, valid: bool) -> dict[str, Any]:
        assert self.task is not None
        found = self.task.spec["prize"] in self.opened
        return {"valid": valid, "success": found, "score": float(found), "admissible": DOORS}

    def _observation(self) -> Observation:
        assert self.task is not None
        image = np.full((28, 28, 3), 40 * len(self.opened), np.uint8)
        image[:, :14, 0] = self.task.spec["shade"]
        return {"text": f"You have opened {' '.join(self.opened)}".strip(), "images": (image,)}

    def prompt(self, view: View, style: str) -> Prompt:
        past = "".join(f"\n{turn.number} {turn.observation}: {turn.action}" for turn in view.history)
        return Prompt(f"{'<image>' * len(view.images)}{view.task}{past}\nNow: {view.observation}", view.images)

    def parse(self, response: str) -> tuple[str, bool]:
        if response in DOORS:
            return response, True
        choice = sum(response.encode()) % 7
        return (DOORS[choice % 3], True) if choice < 6 else (WAIT, False)

    def respond(self, action: str, thought: str = "") -> str:
        return action

    def oracle(self) -> str:
        assert self.task is not None
        return str(self.task.spec["prize"])

    def oracle_skill(self) -> str:
        return f"Open the {self.oracle()} door."

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        last = episode.steps[-1].action
        return f"{len(episode.steps)} steps.", f"{'Open' if episode.success else 'Avoid'} the {last} door."


class Stubborn(Doors):
    """Does not end."""

    def close(self) -> None:
        time.sleep(600)


class Census(Doors):
    """Its observation tells how many instances live in its process."""

    alive = 0

    def __init__(self, max_steps: int = 4) -> None:
        super().__init__(max_steps)
        Census.alive += 1

    def _observation(self) -> Observation:
        return {"text": f"{os.getpid()} {Census.alive}", "images": ()}


def _task(split: str, number: int) -> Task:
    rng = np.random.default_rng([len(split), number])
    spec = {"prize": DOORS[rng.integers(3)], "shade": int(rng.integers(256))}
    return Task(f"{split}/{number}", "toy_envs:Doors", split, spec["prize"], spec, digest([split, number, spec]))


def troubled(task: Task, trouble: str, at: int) -> Task:
    """The task with trouble in step ``at``."""
    return replace(task, spec={**task.spec, "trouble": trouble, "at": at})
