"""Rollout: sampled tokens per CPU second, against one episode after the other with transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch

from harness.cell import TRAIN, Session
from harness.config import TrainConfig
from harness.naive import NaivePolicy
from harness.perf.measure import (
    REPEATS,
    Measurement,
    Report,
    Result,
    Settings,
    cpu_seconds,
    opened,
    quick_cells,
    train_config,
)
from harness.policy.load import model_directory
from harness.preparation import local
from harness.rollout import Job

ROLLOUT_GOAL = 4.0

NAIVE_EPISODES = 4
"""Episodes that the reference plays each time: its speed does not depend on how many there are."""


def rollout_speed(settings: Settings, report: Report) -> Iterator[Result]:
    """Sampled tokens per CPU second: episodes in one batch, against one after the other with ``model.generate``."""
    for config in quick_cells(settings, "grpo"):
        with opened(config) as session:
            policy, train = local(session.policy), train_config(config)
            naive = NaivePolicy(model_directory(settings.policy), sorted(policy.banned_ids))
            rules = session.rules(train.temperature)
            speeds: tuple[list[float], list[float]] = ([], [])
            for repeat in range(REPEATS):
                report(f"rollout {config.env.id}: {repeat + 1} of {REPEATS}")
                jobs = jobs_of(session, train, repeat)
                policy.forget_pictures()
                begin = cpu_seconds()
                episodes = session.play(None, jobs, train.temperature, len(jobs))
                tokens = sum(len(step.response.token_ids) for episode in episodes for step in episode.steps)
                speeds[0].append(tokens / (cpu_seconds() - begin))
                torch.manual_seed(repeat)
                begin = cpu_seconds()
                some = jobs[:: max(1, len(jobs) // NAIVE_EPISODES)]
                tokens = sum(naive.play(session.env, job.task, rules, policy.prompt_style) for job in some)
                speeds[1].append(tokens / (cpu_seconds() - begin))
        ours, reference = map(median, speeds)
        yield Measurement("rollout", config.env.id, ours, reference, "tokens/s", ROLLOUT_GOAL, "at least")
    yield f"rollout: {len(jobs)} episodes at once against one after the other with transformers' generate"


def jobs_of(session: Session, train: TrainConfig, number: int) -> list[Job]:
    """The episodes of one update, on tasks that no other ``number`` has."""
    tasks = session.env.panel("train", train.tasks * (number + 1)).tasks[-train.tasks :]
    return [Job(task, k, (0, TRAIN, number, n, k)) for n, task in enumerate(tasks) for k in range(train.group)]
