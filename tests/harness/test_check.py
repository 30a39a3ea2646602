"""Every registered environment keeps the contract, and the checks notice environments that break it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from harness.check import RULES, Subject, apply, check, results_table
from harness.cli import main
from harness.contracts import (
    AgentEnv,
    EnvCard,
    Episode,
    FreeText,
    HarnessError,
    Observation,
    Panel,
    Prompt,
    Task,
    View,
    digest,
    unknown,
)
from harness.registry import ENVS, registered

SPEC = f"{__name__}:"


class Climb(AgentEnv):
    """Reach a floor: the smallest environment that keeps the contract."""

    option_names: ClassVar[tuple[str, ...]] = ("floors",)
    action_space = FreeText(("up", "down"))

    def __init__(self, floors: int = 6) -> None:
        self.floors = floors
        self.card = EnvCard(
            id="Climb-v0",
            modality="text",
            max_steps=8,
            history=2,
            success="the goal's floor is reached",
            reward="1 at the goal",
            invalid_action="nothing moves",
            engine="climb-1",
            data="generated-1",
            parser="word-1",
            panels=("train", "eval"),
        )

    def panel(self, name: str, size: int | None = None) -> Panel:
        if name not in self.card.panels:
            raise unknown("panel of Climb-v0", name, self.card.panels)
        goals = range(2, self.floors, 2) if name == "train" else range(3, self.floors, 2)
        if size is not None and size > len(goals):
            raise HarnessError(f"panel {name!r} has {len(goals)} tasks")
        tasks = [Task(f"{name}/{goal}", "Climb-v0", name, "up", {"goal": goal}, digest([goal])) for goal in goals]
        return Panel(name, tuple(tasks[:size]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        tasks = self.panel("train").tasks
        task = (options or {}).get("task") or tasks[int(self.np_random.integers(len(tasks)))]
        self.goal, self.floor, self.steps = task.spec["goal"], 0, 0
        return self._look(), self._info(True)

    def step(self, action: str) -> Any:
        self.steps += 1
        self.floor = max(0, self.floor + {"up": 1, "down": -1}.get(action, 0))
        won = self.floor == self.goal
        return self._look(), float(won), won, not won and self.steps >= 8, self._info(action in ("up", "down"))

    def _look(self) -> Observation:
        return {"text": f"Go to floor {self.goal}. You are on floor {self.floor}.", "images": ()}

    def _info(self, valid: bool) -> dict[str, Any]:
        won = self.floor == self.goal
        return {"valid": valid, "success": won, "score": float(won), "admissible": ("up", "down")}

    def task_text(self, observation: Observation) -> str:
        return observation["text"].partition(".")[0]

    def prompt(self, view: View, style: str) -> Prompt:
        return Prompt(f"{view.task}\n{view.observation}\n{' '.join(view.admissible)}")

    def parse(self, response: str) -> tuple[str, bool]:
        return (response, True) if response in ("up", "down") else ("stay", False)

    def respond(self, action: str, thought: str = "") -> str:
        return action

    def oracle(self) -> str:
        return "up"


class Forgetful(Climb):
    def panel(self, name: str, size: int | None = None) -> Panel:
        tasks = Climb.panel(self, name, size).tasks
        return Panel(name, tuple(Task(t.id, t.env, t.split, t.kind, t.spec, str(hash(t.id))) for t in tasks))


class Leaky(Climb):
    def panel(self, name: str, size: int | None = None) -> Panel:
        return Climb.panel(self, "eval", size) if name == "train" else Climb.panel(self, name, size)


class Shared(Climb):
    floor: int
    state: ClassVar[dict[str, int]] = {}

    def step(self, action: str) -> Any:
        self.floor = self.state.get("floor", 0) if self.steps else 0
        result = Climb.step(self, action)
        self.state["floor"] = self.floor
        return result


class Generous(Climb):
    def _info(self, valid: bool) -> dict[str, Any]:
        return Climb._info(self, valid) | {"success": self.steps >= 8 or self.floor == self.goal}


class Clueless(Climb):
    def oracle(self) -> str:
        return "down"


class Fragile(Climb):
    def parse(self, response: str) -> tuple[str, bool]:
        return response.split()[0], True


class Padded(Climb):
    def prompt(self, view: View, style: str) -> Prompt:
        return Prompt(f"{view.task}\n")


class Careless(Climb):
    def panel(self, name: str, size: int | None = None) -> Panel:
        return Climb.panel(self, name if name in self.card.panels else "train", size)


class Hoarder(Climb):
    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.kept.append(open("/dev/null"))  # noqa: SIM115


class Talkative(Climb):
    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        return (episode.task_text, "")


class Telltale(Climb):
    def secrets(self) -> tuple[str, ...]:
        return (f"floor {self.goal}",)


@pytest.mark.parametrize("env_id", registered(ENVS))
def test_registered_environments_keep_the_contract(env_id: str) -> None:
    broken = {result.rule: result.detail for result in check(env_id) if not result.passed}
    assert broken == {}


def test_the_smallest_environment_keeps_the_contract() -> None:
    broken = {result.rule: result.detail for result in check(f"{SPEC}Climb") if not result.passed}
    assert broken == {}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Forgetful", "second_process"),
        ("Leaky", "panels"),
        ("Shared", "independent"),
        ("Generous", "truncation"),
        ("Clueless", "oracle"),
        ("Clueless", "random_below_oracle"),
        ("Fragile", "parser"),
        ("Padded", "prompts"),
        ("Careless", "options"),
        ("Hoarder", "options"),
        ("Hoarder", "closing_releases"),
        ("Talkative", "annotation"),
        ("Telltale", "hidden"),
    ],
)
def test_a_broken_contract_is_noticed(name: str, rule: str) -> None:
    tested = next(function for function in RULES if function.__name__ == rule)
    result = apply(tested, Subject(f"{SPEC}{name}", {}, 8))
    assert not result.passed
    assert result.detail


def test_the_command_prints_marks_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{SPEC}Clueless"]) == 1
    printed = capsys.readouterr().out
    assert "✓" in printed
    assert "✗" in printed
    assert results_table("x", []).row_count == 0
