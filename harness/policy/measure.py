"""What an embedded policy can do: act, act on a good skill, write skills. The numbers of its model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.cards import Ledger
from harness.config import AnalysisConfig
from harness.policy.base import Sampling
from harness.policy.local import LocalPolicy
from harness.pool import EnvPool
from harness.registry import make_env
from harness.rollout import Job, Rules, rollout
from harness.seed import analyse, oracle_skill


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
    skills = [oracle_skill(env, task) for task in panel]
    with EnvPool(env_id, options) as pool:
        plain = rollout(policy, env, pool, jobs, rules)
        skilled = rollout(policy, env, pool, told(jobs, skills), rules)
        misled = rollout(policy, env, pool, told(jobs, skills[1:] + skills[:1]), rules)
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


def told(jobs: Sequence[Job], skills: Sequence[str]) -> list[Job]:
    """The jobs with a skill in the prompts of each."""
    return [replace(job, skill=skill) for job, skill in zip(jobs, skills, strict=True)]
