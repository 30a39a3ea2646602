"""Before the first update: from the base policy to the start that the method asks for.

What the policy is then, the cell keeps in ``start/``: it is the reference of the KL term and whatever else a method
takes from the frozen start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.annotators import SCRIPTED, annotate_in
from harness.cards import Ledger
from harness.cell import IMITATION, SECOND_ADAPTERS, STAGE1, Session
from harness.config import ImitationConfig, Stage1Config, TrainConfig
from harness.contracts import HarnessError, Panel, Prompt
from harness.methods import Method
from harness.policy.load import load_policy
from harness.policy.local import LocalPolicy
from harness.policy.lora import fold_adapters
from harness.rollout import Job, rollout
from harness.rows import Sample, charge_play
from harness.seed import fine_tune, imitation_samples, skill_samples
from harness.store import SAMPLES, START, writing
from harness.world import World

KEPT = 0.8
"""Share of what adapters learned before the first update below which its loss to rounding is told."""


def prepare(session: Session, method: Method, policy: LocalPolicy, panel: Panel) -> None:
    """Bring the policy to the method's start, in place; ``panel`` is the training panel."""
    if method.start == "base":
        return
    with charged(session.ledger, session.world):
        if method.start == "hindsight_sft":
            _stage1(session, method, policy, panel)
        else:
            _imitate(session, policy, panel)
    if policy.adapters:
        kept = fold_adapters(policy, (session.config.seed, SECOND_ADAPTERS))  # so that the reference is the start
        if kept < KEPT:
            session.warn(
                f"weights in {session.config.precision} kept {kept:.0%} of what was learned before the first update; "
                "raise its learning rate, or use precision=float32"
            )
    if session.world.main:
        with writing(session.cell.path / START):
            policy.save(session.cell.path / START)
    session.world.wait()


def _stage1(session: Session, method: Method, policy: LocalPolicy, panel: Panel) -> None:
    """Hindsight-skill SFT (paper 1.2)."""
    config, analysis = session.config.stage1, session.config.analysis
    if config is None or analysis is None:
        raise ValueError("a method that starts from hindsight SFT needs stage-1 and analysis settings")
    jobs = _jobs(session, panel, STAGE1, config.tasks, config.attempts)
    episodes = session.play("stage 1: play", jobs, config.temperature, session.config.eval.batch)
    charge_play(session.ledger, policy, episodes)
    annotated = annotate_in(session, episodes, config.annotator, update=-1)
    skills = annotated.skills
    if config.annotator != SCRIPTED and annotated.summary:
        session.warn(f"stage 1: {annotated.summary}")
    session.journal_skills(-1, episodes, skills)
    session.journal("stage1", -1, episodes)
    samples = skill_samples(policy, episodes, skills, analysis.max_prompt_tokens, session.env.brief)
    if method.rehearsal and session.world.main:
        save_samples(samples, session.cell.path / SAMPLES)
    _learn(session, policy, samples, config, "stage 1: learn")


def _imitate(session: Session, policy: LocalPolicy, panel: Panel) -> None:
    """SFT on the external teacher's episodes."""
    config = session.config.imitation
    if config is None:
        raise ValueError("a method that starts from a teacher's episodes needs imitation settings")
    teacher = external_teacher(session, policy)
    jobs = _jobs(session, panel, IMITATION, config.tasks, config.attempts)
    rules, batch = session.rules(config.temperature), session.config.eval.batch
    mine = rollout(teacher, session.env, session.pool, session.world.mine(jobs), rules, batch)
    episodes = session.world.collect(mine)
    charge_play(session.ledger, teacher, episodes)
    session.journal("imitation", -1, episodes)
    samples = imitation_samples(episodes, config.episodes)
    _learn(session, policy, samples, config, "imitate")


def _learn(
    session: Session, policy: LocalPolicy, samples: Sequence[Sample], config: Stage1Config | ImitationConfig, phase: str
) -> None:
    """Fine-tune under the cell's seed and ledger, with progress."""
    train, tell = _train(session), partial(session.tell, phase)
    session.rest()
    if train.gradient_checkpointing:
        policy.checkpoint_gradients()
    fine_tune(policy, samples, config, session.config.seed, train, session.ledger, tell, session.world)


def _jobs(session: Session, panel: Panel, phase: int, tasks: int, attempts: int) -> list[Job]:
    """Attempts at randomly drawn training tasks."""
    seed = session.config.seed
    drawn = np.random.default_rng([seed, phase]).permutation(len(panel))[:tasks]
    return [Job(panel.tasks[i], attempt, (seed, phase, int(i), attempt)) for i in drawn for attempt in range(attempts)]


def _train(session: Session) -> TrainConfig:
    if session.config.train is None:
        raise ValueError("a method that trains needs training settings")
    return session.config.train


# ------------------------------------------------------------------------------------------------ policies


def external_teacher(session: Session, policy: LocalPolicy) -> LocalPolicy:
    """The cell's external teacher. Raises HarnessError where its tokens are not the policy's."""
    teacher = local(load_policy(session.config.teacher, session.env, precision=session.config.precision))
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise HarnessError(
            f"teacher {session.config.teacher!r} cannot score the tokens of {session.config.policy!r}: "
            "their vocabularies differ"
        )
    return teacher


def local(policy: Any) -> LocalPolicy:
    """The policy, if it has weights."""
    if not isinstance(policy, LocalPolicy):
        raise HarnessError(f"{policy.spec!r} has no weights; a model directory or hub id is needed here")
    return policy


# ------------------------------------------------------------------------------------------------- samples


def save_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write pairs to a file that holds texts, numbers and tensors only."""
    with writing(path):
        torch.save(
            [
                {"text": prompt.text, "images": [torch.tensor(i) for i in prompt.images], "answer": list(answer)}
                for prompt, answer in samples
            ],
            path,
        )


def load_samples(path: Path) -> list[Sample]:
    """The pairs that :func:`save_samples` wrote."""
    return [
        (Prompt(pair["text"], tuple(image.numpy() for image in pair["images"])), tuple(pair["answer"]))
        for pair in torch.load(path, weights_only=True)
    ]


class charged:
    """Add the time spent inside to a ledger: on the wall, and of all processes' cores."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self.ledger, self.world = ledger, world

    def __enter__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the others are not here to add theirs
            spent = self.world.total({"cpu": time.process_time() - self.cpu})
            self.ledger.wall_seconds += time.perf_counter() - self.wall
            self.ledger.cpu_seconds += spent["cpu"]
