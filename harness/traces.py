"""Short plays at the level of actions, without a policy: what the contract checks look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.contracts import AgentEnv, Episode, Observation, Response, Step, StopReason, Task, Turn, View


@dataclass(frozen=True)
class Moment:
    """What reset (``action`` is empty) or one step returned."""

    action: str
    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


Trace = list[Moment]
Choose = Callable[[AgentEnv, Trace], str]
"""Names the next action of an episode so far."""


def random_chooser(number: int) -> Choose:
    """Uniform over the environment's choices (the action space's samples where there are none), seeded."""
    draw = np.random.default_rng(number)

    def choose(env: AgentEnv, trace: Trace) -> str:
        if choices := env.choices(views(env, trace)[-1]):
            return str(choices[int(draw.integers(len(choices)))])
        env.action_space.seed(int(draw.integers(2**31)))
        return str(env.action_space.sample())

    return choose


def start(env: AgentEnv, task: Task) -> Moment:
    """Reset to a task."""
    observation, info = env.reset(options={"task": task})
    return Moment("", observation, 0.0, False, False, info)


def step(env: AgentEnv, action: str) -> Moment:
    """Take one action."""
    observation, reward, terminated, truncated, info = env.step(action)
    return Moment(action, observation, float(reward), terminated, truncated, info)


def play(env: AgentEnv, task: Task, choose: Choose) -> Trace:
    """One episode, at most as long as the card's step limit."""
    trace = [start(env, task)]
    while not (trace[-1].terminated or trace[-1].truncated) and len(trace) <= env.card.max_steps:
        trace.append(step(env, choose(env, trace)))
    return trace


def solved(traces: Sequence[Trace]) -> float:
    """Share of episodes that ended in success."""
    return sum(trace[-1].terminated and bool(trace[-1].info["success"]) for trace in traces) / len(traces)


def views(env: AgentEnv, trace: Trace) -> list[View]:
    """What an agent sees at every moment of an episode, with the card's history window."""
    task = env.task_text(trace[0].observation)
    turns: list[Turn] = []
    found = []
    for number, moment in enumerate(trace, start=1):
        if number > 1:
            turns.append(Turn(number - 1, trace[number - 2].observation["text"], moment.action))
        history = tuple(turns[-env.card.history :]) if env.card.history else ()
        text, images = moment.observation["text"], moment.observation["images"]
        found.append(View(task, number, history, text, images, moment.info["admissible"]))
    return found


def episode(env: AgentEnv, task: Task, trace: Trace) -> Episode:
    """A trace as the episode that the harness would have recorded."""
    last = trace[-1]
    ended = StopReason.SUCCESS if last.info["success"] else StopReason.FAILURE
    steps = [
        Step(
            observation=before.observation,
            prompt=env.prompt(view, "compact"),
            response=Response(env.respond(after.action)),
            action=after.action,
            valid=after.info["valid"],
            reward=after.reward,
        )
        for before, after, view in zip(trace, trace[1:], views(env, trace), strict=False)
    ]
    text = env.task_text(trace[0].observation)
    reason = ended if last.terminated else StopReason.MAX_STEPS
    return Episode(task, 0, text, steps, reason, float(last.info["score"]))
