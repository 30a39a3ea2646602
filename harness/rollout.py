"""Playing episodes: many at once, finished ones leave the batch, and no result depends on the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from harness.contracts import AgentEnv, Episode, HarnessError, Step, StopReason, Task, Turn, View
from harness.policy.base import Policy, Request, Sampling
from harness.pool import EnvPool, State
from harness.prompts import fit_prompt


@dataclass(frozen=True)
class Job:
    """One episode to play; ``key`` names its randomness, see :class:`Request`. Its prompts hold ``skill``, if any."""

    task: Task
    attempt: int
    key: tuple[int, ...]
    skill: str = ""


FEWEST = 20
"""Crashes of a smaller rollout are counted as if it had so many episodes: one of three is not yet a rate."""


@dataclass(frozen=True)
class Rules:
    """The part of the protocol that shapes an episode, and how many of a rollout's may crash."""

    history: int
    max_steps: int
    max_prompt_tokens: int
    sampling: Sampling
    max_env_errors: float = 1.0
    """Share of the episodes, of at least ``FEWEST``, whose environments may crash."""


@dataclass
class _Running:
    index: int
    """Position of the episode's job."""
    state: State
    episode: Episode
    turns: list[Turn] = field(default_factory=list)

    def view(self, history: int) -> View:
        return View(
            task=self.episode.task_text,
            step=len(self.episode.steps) + 1,
            history=tuple(self.turns[-history:]) if history else (),
            observation=self.state.observation["text"],
            images=self.state.observation["images"],
            admissible=self.state.admissible,
        )

    def take(self, step: Step, state: State) -> None:
        self.episode.steps.append(step)
        self.turns.append(Turn(len(self.episode.steps), step.observation["text"], step.action))
        self.episode.score = state.score
        self.state = state


def rollout(
    policy: Policy,
    env: AgentEnv,
    pool: EnvPool,
    jobs: Sequence[Job],
    rules: Rules,
    batch: int = 128,
    on_step: Callable[[int, int], None] | None = None,
    on_end: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play every job and return its episode, in the order of ``jobs``.

    Args:
        env: A template for pure functions (prompts, parsing); the playing happens in ``pool``.
        batch: Episodes in flight at once; changes speed and memory only.
        on_step: Called after every round with (finished episodes, sampled tokens so far).
        on_end: Called with every episode as soon as it is over.

    Raises HarnessError as soon as more environments have crashed than ``rules.max_env_errors`` allows; the traceback of
    the first is its note.
    """
    crashed: list[Episode] = []
    pool.forget_images()
    finished: dict[int, Episode] = {}
    waiting = iter(range(len(jobs)))
    running: dict[int, _Running] = {}
    sampled = 0

    def finish(slot: int, reason: StopReason) -> None:
        run = running.pop(slot)
        run.episode.stop_reason = reason
        finished[run.index] = run.episode
        pool.release(slot)
        if on_end:
            on_end(run.episode)
        if reason is StopReason.ENV_ERROR:
            crashed.append(run.episode)
            if len(crashed) > rules.max_env_errors * max(FEWEST, len(jobs)):
                raise _too_many(crashed, len(jobs), rules.max_env_errors)

    while True:
        free = [slot for slot in range(batch) if slot not in running]
        starting = dict(zip(free, islice(waiting, len(free)), strict=False))
        for slot, run in _start(env, pool, {slot: (i, jobs[i]) for slot, i in starting.items()}).items():
            running[slot] = run
            if run.state.error:
                run.episode.error, run.episode.traceback = run.state.error, run.state.traceback
                finish(slot, StopReason.ENV_ERROR)
        if not running:
            if len(finished) == len(jobs):
                return [finished[index] for index in range(len(jobs))]
            continue
        requests: dict[int, Request] = {}
        dropped: dict[int, int] = {}
        for slot, run in list(running.items()):
            view = run.view(rules.history)
            job = jobs[run.index]
            prompt, dropped[slot] = fit_prompt(env, policy, view, rules.max_prompt_tokens, job.skill)
            if prompt is None:
                finish(slot, StopReason.CONTEXT_OVERFLOW)
                continue
            key = (*job.key, len(run.episode.steps))
            requests[slot] = Request(prompt, key, env.choices(view), run.state.expert)
        responses = dict(zip(requests, policy.generate(list(requests.values()), rules.sampling), strict=True))
        for slot, response in list(responses.items()):
            if response.failure is not None:
                del responses[slot]
                running[slot].episode.error = response.error
                finish(slot, response.failure)
        parsed = {slot: env.parse(response.text) for slot, response in responses.items()}
        states = pool.step({slot: action for slot, (action, _) in parsed.items()})
        for slot, response in responses.items():
            run, new = running[slot], states[slot]
            sampled += response.tokens
            if new.error:
                run.episode.error, run.episode.traceback = new.error, new.traceback
                finish(slot, StopReason.ENV_ERROR)
                continue
            action, readable = parsed[slot]
            step = Step(
                observation=run.state.observation,
                prompt=requests[slot].prompt,
                response=response,
                action=action,
                valid=readable and new.valid,
                reward=new.reward,
                dropped_turns=dropped[slot],
            )
            run.take(step, new)
            reason = _stop_reason(new, len(run.episode.steps), rules.max_steps)
            if reason is not None:
                finish(slot, reason)
        if on_step:
            on_step(len(finished), sampled)


def _start(env: AgentEnv, pool: EnvPool, jobs: dict[int, tuple[int, Job]]) -> dict[int, _Running]:
    """Reset one slot for each job."""
    started: dict[int, _Running] = {}
    for slot, state in (pool.reset({slot: job.task for slot, (_, job) in jobs.items()}) if jobs else {}).items():
        index, job = jobs[slot]
        text = "" if state.error else env.task_text(state.observation)
        started[slot] = _Running(index, state, Episode(job.task, job.attempt, text))
    return started


def _too_many(crashed: Sequence[Episode], total: int, limit: float) -> HarnessError:
    """The end of a rollout in which environments crash too often."""
    first = crashed[0]
    error = HarnessError(
        f"{len(crashed)} of {total} episodes have crashed in their environment, more than env.max_env_errors={limit:g} "
        f"allows; the first, {first.task.id}: {first.error}"
    )
    error.add_note(first.traceback or first.error)
    return error


def _stop_reason(state: State, steps: int, max_steps: int) -> StopReason | None:
    if state.terminated:
        return StopReason.SUCCESS if state.success else StopReason.FAILURE
    if state.truncated or steps >= max_steps:
        return StopReason.MAX_STEPS
    return None
