"""An environment whose every word was written to do harm, with a picture: workers import it, so no torch here."""

from __future__ import annotations

from typing import Any

import numpy as np
from nasty import NASTY
from toy_envs import Doors, Task, digest

from harness.contracts import Observation, Panel, Prompt, View


class Hostile(Doors):
    """The toy's doors; task, kind, observations and actions are hostile, and the prompt quotes all of them."""

    def __init__(self, max_steps: int = 3) -> None:
        super().__init__(max_steps)
        self.action_space.examples = NASTY[1:]

    def panel(self, name: str, size: int | None = None) -> Panel:
        tasks = tuple(
            Task(
                f"{name}/{n}/{text}", "hostile_env:Hostile", name, text, {"prize": text, "shade": n}, digest([n, text])
            )
            for n, text in enumerate(NASTY[: size or 4])
        )
        return Panel(name, tasks, (NASTY[4],))

    def task_text(self, observation: Observation) -> str:
        return "".join(NASTY)

    def _observation(self) -> Observation:
        image = np.full((28, 28, 3), 9, np.uint8)
        return {"text": NASTY[self.steps % len(NASTY)] + "".join(NASTY[1:12]), "images": (image,)}

    def _info(self, valid: bool) -> dict[str, Any]:
        return super()._info(valid) | {"admissible": NASTY[:24]}

    def prompt(self, view: View, style: str) -> Prompt:
        past = "".join(f"{turn.observation}{turn.action}" for turn in view.history)
        return Prompt(f"<image>{view.task}{past}{view.observation}{'|'.join(view.admissible)}", view.images)

    def parse(self, response: str) -> tuple[str, bool]:
        return response, True
