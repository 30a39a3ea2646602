"""Playing episodes: the batch changes nothing, prompts lose history first, only the environment declares success."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_cells import toy_policy
from toy_envs import Doors, troubled

from harness.contracts import Episode, HarnessError, Prompt, Response, StopReason, Turn, View
from harness.policy.base import Policy, Request, Sampling
from harness.pool import EnvPool
from harness.prompts import fit_prompt
from harness.rollout import Job, Rules, rollout

ENV = Doors()
JOBS = [Job(task, k, (0, n, k)) for n, task in enumerate(ENV.panel("train", 10)) for k in range(3)]
RULES = Rules(history=2, max_steps=4, max_prompt_tokens=200, sampling=Sampling(temperature=1.0, max_tokens=4))


class Always(Policy):
    """Gives one answer whatever it is asked; counts words as tokens."""

    spec = fingerprint = "always"
    prompt_style = "compact"

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        return [Response(self.answer) for _ in requests]

    def prompt_tokens(self, prompt: Prompt) -> int:
        return len(prompt.text.split())


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with EnvPool("toy_envs:Doors") as pool:
        yield pool


def outcome(episode: Episode) -> tuple[Any, ...]:
    """All that must not depend on the batch."""
    steps = [(step.response.token_ids, step.action, step.valid, step.reward) for step in episode.steps]
    return episode.task.id, episode.attempt, episode.stop_reason, episode.score, steps


# -------------------------------------------------------------------------------------------- batches and crashes


def test_results_depend_neither_on_batch_nor_on_workers(pool: EnvPool) -> None:
    policy = toy_policy()
    alone = [outcome(episode) for episode in rollout(policy, ENV, pool, JOBS, RULES, batch=1)]
    assert [(task, attempt) for task, attempt, *_ in alone] == [(job.task.id, job.attempt) for job in JOBS]
    assert {len(steps) for *_, steps in alone} == {1, 2, 3, 4}
    assert {reason for _, _, reason, *_ in alone} >= {StopReason.SUCCESS, StopReason.FAILURE}
    with EnvPool("toy_envs:Doors", workers=4) as four:
        for place, batch in [(pool, 7), (pool, 64), (four, 1), (four, 7), (four, 64)]:
            assert [outcome(episode) for episode in rollout(policy, ENV, place, JOBS, RULES, batch)] == alone


@pytest.mark.parametrize("trouble", ["raise", "die"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_crash_costs_one_episode(pool: EnvPool, trouble: str, at: int) -> None:
    policy = toy_policy()
    calm = [outcome(episode) for episode in rollout(policy, ENV, pool, JOBS, RULES, batch=8)]
    jobs = [replace(job, task=troubled(job.task, trouble, at)) if n == 4 else job for n, job in enumerate(JOBS)]
    episodes = rollout(policy, ENV, pool, jobs, RULES, batch=8)
    crashed = episodes.pop(4)
    assert crashed.stop_reason is StopReason.ENV_ERROR
    assert crashed.error
    assert not crashed.success
    assert not crashed.counted
    assert [outcome(episode) for episode in episodes] == calm[:4] + calm[5:]


def test_a_rollout_in_which_too_many_crash_stops_and_says_why(pool: EnvPool) -> None:
    few = [replace(job, task=troubled(job.task, "raise", 1)) if n < 3 else job for n, job in enumerate(JOBS)]
    rules = replace(RULES, max_env_errors=0.1)
    episodes = rollout(Always("left"), ENV, pool, few, rules)
    assert [episode.stop_reason for episode in episodes].count(StopReason.ENV_ERROR) == 3  # a tenth of 30
    assert "raise RuntimeError" in episodes[0].traceback
    many = [replace(job, task=troubled(job.task, "raise", 1)) if n < 4 else job for n, job in enumerate(JOBS)]
    seen: list[Episode] = []
    with pytest.raises(
        HarnessError,
        match=r"4 of 30 episodes have crashed .* env\.max_env_errors=0\.1 .* train/0: RuntimeError: this door is stuck",
    ) as caught:
        rollout(Always("left"), ENV, pool, many, rules, on_end=seen.append)
    assert len(seen) == 4
    assert "raise RuntimeError" in caught.value.__notes__[0]
    rollout(Always("left"), ENV, pool, few[:4], rules=replace(rules, max_env_errors=0.15))  # 3 of 4, counted as of 20


def test_no_jobs_no_episodes(pool: EnvPool) -> None:
    assert rollout(Always("left"), ENV, pool, [], RULES) == []


# ----------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("answer", "prize", "max_steps", "reason", "steps"),
    [
        ("left", "left", 4, StopReason.SUCCESS, 1),
        ("left", "left", 1, StopReason.SUCCESS, 1),
        ("left", "right", 4, StopReason.FAILURE, 2),
        ("left", "right", 1, StopReason.MAX_STEPS, 1),
        ("wait!!", "right", 4, StopReason.MAX_STEPS, 4),
    ],
)
def test_only_a_reached_goal_is_success(
    pool: EnvPool, answer: str, prize: str, max_steps: int, reason: StopReason, steps: int
) -> None:
    task = next(task for task in ENV.panel("train") if task.kind == prize)
    rules = replace(RULES, max_steps=max_steps)
    episode = rollout(Always(answer), ENV, pool, [Job(task, 0, (1,))], rules)[0]
    assert (episode.stop_reason, len(episode.steps)) == (reason, steps)
    assert episode.success == (reason is StopReason.SUCCESS)
    assert episode.score == episode.reward == float(episode.success)
    assert episode.counted
    assert all(step.valid == (answer == "left") for step in episode.steps)


# ----------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("skill", ["", "ADVICE about doors"])
def test_over_long_prompts_lose_their_oldest_history_only(skill: str) -> None:
    history = tuple(Turn(n, f"seen{n}", f"did{n}") for n in (1, 2, 3))
    view = View("TASK", 4, history, "OBSERVED", (np.zeros((28, 28, 3), np.uint8),), ())
    policy = Always("")
    full, dropped = fit_prompt(ENV, policy, view, 99, skill)
    assert full is not None
    assert dropped == 0
    size = policy.prompt_tokens(full)
    texts = {}
    for limit in range(size + 1):
        prompt, dropped = fit_prompt(ENV, policy, view, limit, skill)
        if prompt is None:
            continue
        assert policy.prompt_tokens(prompt) <= limit
        assert "TASK" in prompt.text
        assert "OBSERVED" in prompt.text
        assert skill in prompt.text
        assert len(prompt.images) == 1
        assert [f"did{n}" in prompt.text for n in (1, 2, 3)] == [n > dropped for n in (1, 2, 3)]
        texts[dropped] = limit
    assert set(texts) == {0, 1, 2, 3}
    assert fit_prompt(ENV, policy, view, 2, skill) == (None, 3)


def test_dropped_turns_are_counted(pool: EnvPool) -> None:
    task = ENV.panel("train", 1).tasks[0]
    wide, narrow = (
        rollout(Always("wait!!"), ENV, pool, [Job(task, 0, (1,))], replace(RULES, max_prompt_tokens=limit))[0]
        for limit in (50, 14)
    )
    assert [step.dropped_turns for step in wide.steps] == [0, 0, 0, 0]
    assert [step.dropped_turns for step in narrow.steps] == [0, 0, 1, 1]


def test_an_observation_that_does_not_fit_ends_the_episode(pool: EnvPool) -> None:
    task = next(task for task in ENV.panel("train") if task.kind == "right")
    rules = replace(RULES, max_prompt_tokens=7)  # enough for the first observation, not for one with an opened door
    episodes = rollout(Always("left"), ENV, pool, [Job(task, k, (k,)) for k in range(3)], rules)
    assert {(e.stop_reason, len(e.steps)) for e in episodes} == {(StopReason.CONTEXT_OVERFLOW, 1)}
    assert all(e.counted and not e.success for e in episodes)
