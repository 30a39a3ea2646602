"""What an embedded policy can do: act, act on a good skill, write skills. The numbers of its model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.config import AnalysisConfig
from harness.contracts import AgentEnv, Ledger, Prompt, Response, Task
from harness.policy.base import Policy, Request, Sampling
from harness.policy.local import LocalPolicy
from harness.pool import EnvPool
from harness.registry import make_env
from harness.rollout import Job, Rules, rollout
from harness.seed import analyse
from harness.skills import insert_skill


class SkillReader(Policy):
    """A policy that always sees the skill of the task at hand; ``skills`` by the first number of the request's key."""

    def __init__(self, policy: LocalPolicy, skills: Sequence[str]) -> None:
        self.policy, self.skills = policy, skills
        self.spec, self.prompt_style = policy.spec, policy.prompt_style

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        told = [Request(insert_skill(r.prompt, self.skills[r.key[0]]), r.key) for r in requests]
        return self.policy.generate(told, sampling)

    def prompt_tokens(self, prompt: Prompt) -> int:
        return self.policy.prompt_tokens(prompt)


@dataclass(frozen=True)
class Ability:
    """Shares over the tasks of a panel, at temperature 1.

    Attributes:
        plain: Success on ordinary prompts.
        skilled: Success with the oracle's skill in the prompt.
        misled: Success with the oracle's skill of another task.
        valid: Share of the plain actions that the environment accepts as listed (admissible and readable).
        written: Share of the plain episodes whose own skill equals the scripted annotator's, word for word.
    """

    plain: float
    skilled: float
    misled: float
    valid: float
    written: float


def measure(
    policy: LocalPolicy, env_id: str, options: dict[str, str], tasks: int, history: int, max_steps: int
) -> Ability:
    """Play the first ``tasks`` of the eval panel three times: plain, with the right skill, with a wrong one."""
    env = make_env(env_id, options)
    panel = env.panel("eval", tasks).tasks
    rules = Rules(history, max_steps, max_prompt_tokens=2048, sampling=Sampling(1.0, 32))
    jobs = [Job(task, 0, (index,)) for index, task in enumerate(panel)]
    skills = [skill_of(env, task) for task in panel]
    with EnvPool(env_id, options) as pool:
        plain = rollout(policy, env, pool, jobs, rules)
        skilled = rollout(SkillReader(policy, skills), env, pool, jobs, rules)
        misled = rollout(SkillReader(policy, skills[1:] + skills[:1]), env, pool, jobs, rules)
    written = analyse(policy, plain, AnalysisConfig(max_tokens=96, max_prompt_tokens=2048), 0, Ledger(), env.brief)
    notes = [env.annotate(episode) for episode in plain]
    env.close()
    return Ability(
        plain=float(np.mean([episode.success for episode in plain])),
        skilled=float(np.mean([episode.success for episode in skilled])),
        misled=float(np.mean([episode.success for episode in misled])),
        valid=float(np.mean([step.valid for episode in plain for step in episode.steps])),
        written=float(
            np.mean([note is not None and skill.text == note[1] for skill, note in zip(written, notes, strict=True)])
        ),
    )


def skill_of(env: AgentEnv, task: Task) -> str:
    """The oracle's skill for a task."""
    env.reset(options={"task": task})
    return env.oracle_skill()
