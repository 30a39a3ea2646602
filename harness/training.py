"""The training loop of a cell: (stage 1,) then collect, analyse, re-score, optimise, and evaluate at fixed updates."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import objective
from harness.annotators import annotate
from harness.cell import SHUFFLE, STAGE1, TRAIN, Session, require_disjoint, stop_reasons, success_rate
from harness.config import TrainConfig
from harness.contracts import Episode, HarnessError, Ledger, Skill, StopReason
from harness.methods import Method
from harness.policy.load import load_policy
from harness.policy.local import LocalPolicy
from harness.rollout import Job
from harness.seed import analyse, hindsight_sft, sft_samples, teacher_prompts
from harness.skills import audit_skills
from harness.store import POLICY, read_json, write_json
from harness.trainer import Row, Trainer, forward_flops

log = logging.getLogger(__name__)

SILENT_UPDATES = 3
"""After so many updates in a row without an active distillation token the run says so loudly."""


def train(session: Session, method: Method) -> None:
    """Run a training cell from where it stands to its end."""
    if session.config.train is None or not isinstance(session.policy, LocalPolicy):
        raise HarnessError(f"{session.config.policy!r} cannot be trained; name tiny, a model directory or a hub id")
    Training(session, method, session.policy, session.config.train).run()


class Training:
    """A training cell in progress."""

    def __init__(self, session: Session, method: Method, policy: LocalPolicy, config: TrainConfig) -> None:
        torch.set_num_threads(1)  # two one-thread processes beat one with two threads, and one is reproducible
        self.session, self.method, self.policy, self.config = session, method, policy, config
        self.seed, self.ledger, self.cell = session.config.seed, session.ledger, session.cell
        self.silent = 0
        self.panel = session.env.panel("train", config.panel_size)
        require_disjoint(self.panel, session.panel)

    def run(self) -> None:
        found = self.cell.latest_checkpoint()
        for journal in ("metrics.jsonl", "evals.jsonl", "skills.jsonl", "episodes.jsonl"):
            self.cell.truncate(journal, lambda record: found is not None and record["update"] <= found.update)
        if found is None:
            self._start()
            trainer = self._trainer()
            self.session.evaluate(0)
            self._checkpoint(trainer, 0)
        else:
            self.policy.copy_weights_from(local(load_policy(str(found.path / POLICY), self.session.env)))
            trainer = self._trainer()
            self._restore(trainer, found.path)
        for number in range(found.update + 1 if found else 1, self.config.updates + 1):
            self.update(trainer, number)
            last = number == self.config.updates
            if last or number % self.session.config.eval.every == 0:
                self.session.evaluate(number)
            if last or number % self.config.checkpoint_every == 0:
                self._checkpoint(trainer, number)
        self.session.finish(self.panel)

    # ------------------------------------------------------------------------------------------- stage 1

    def _start(self) -> None:
        """Bring the policy to the method's start; what it is then, ``start/`` keeps for the reference policy."""
        if self.method.start == "hindsight_sft":
            with charged(self.ledger):
                self._stage1()
            self.policy.save(self.cell.path / "start")

    def _stage1(self) -> None:
        """Hindsight-skill SFT (paper 1.2)."""
        config, session = self.session.config.stage1, self.session
        if config is None:
            raise ValueError("a method that starts from hindsight SFT needs stage-1 settings")
        chosen = np.random.default_rng([self.seed, STAGE1]).permutation(len(self.panel))[: config.tasks]
        jobs = [
            Job(self.panel.tasks[i], attempt, (self.seed, STAGE1, int(i), attempt))
            for i in chosen
            for attempt in range(config.attempts)
        ]
        episodes = session.play("stage 1: play", jobs, config.temperature, session.config.eval.batch)
        self._charge_play(episodes)
        skills = annotate(episodes, config.annotator, session.env)
        self._journal_skills(-1, episodes, skills)
        session.journal("stage1", -1, episodes)
        limit = session.config.analysis.max_prompt_tokens if session.config.analysis else 16384
        samples = sft_samples(self.policy, episodes, skills, limit, self.session.env.brief)
        hindsight_sft(
            self.policy,
            samples,
            config,
            self.seed,
            self.config.token_budget,
            self.ledger,
            lambda done, total: session.tell("stage 1: learn", done, total),
        )

    # ------------------------------------------------------------------------------------------- stage 2

    def update(self, trainer: Trainer, number: int) -> None:
        """One update: collect, analyse, re-score, optimise; then one line in metrics.jsonl."""
        session = self.session
        with charged(self.ledger):
            trainer.forget_pictures()  # so that a resumed run encodes in the same batches
            session.tell("train", number - 1, self.config.updates)
            jobs = self._jobs(number)
            clock = time.perf_counter()
            episodes = session.play(None, jobs, self.config.temperature, len(jobs))
            tokens = self._charge_play(episodes)
            speed = tokens / (time.perf_counter() - clock)
            skills, statistics = self._skills(trainer, episodes, number)
            rows, degenerate = self._rows(episodes, skills, number)
            statistics |= self._active(rows)
            statistics |= trainer.update(rows, number, self.ledger)
        self._listen(rows, number)
        session.journal("train", number, episodes)
        steps = [step for episode in episodes for step in episode.steps]
        self.cell.append(
            "metrics.jsonl",
            {
                "update": number,
                "success": success_rate(episodes),
                "reward": mean([episode.reward for episode in episodes]),
                "score": mean([episode.score for episode in episodes]),
                "valid_rate": mean([step.valid for step in steps]),
                "episode_steps": mean([len(episode.steps) for episode in episodes]),
                "response_tokens": mean([len(step.response.token_ids) for step in steps]),
                "distinct_actions": len({step.action for step in steps}) / max(1, len(steps)),
                "degenerate_groups": degenerate,
                "stop_reasons": stop_reasons(episodes),
                **statistics,
                "ledger": self.ledger.as_dict(),
            },
        )
        session.tell("train", number, self.config.updates, speed)

    def _jobs(self, number: int) -> list[Job]:
        """N attempts at the next tasks: the train panel in a new order each epoch, a function of seed and update."""
        first = (number - 1) * self.config.tasks
        size = len(self.panel)
        jobs = []
        for place in range(first, first + self.config.tasks):
            order = np.random.default_rng([self.seed, TRAIN, place // size]).permutation(size)
            task = self.panel.tasks[order[place % size]]
            jobs += [Job(task, k, (self.seed, TRAIN, number, place - first, k)) for k in range(self.config.group)]
        return jobs

    def _skills(
        self, trainer: Trainer, episodes: Sequence[Episode], number: int
    ) -> tuple[list[Skill], dict[str, float]]:
        """Skills of the update's episodes, written by the method's analyzer, with their statistics."""
        analysis, spec = self.session.config.analysis, self.method.teacher
        if analysis is None or spec is None or not self.method.writes_skills:
            return [], {}
        analyzer = self.policy if spec.analyzer == "update_start" else trainer.start()
        skills = analyse(analyzer, episodes, analysis, number, self.ledger, self.session.env.brief)
        self._journal_skills(number, episodes, skills)
        audit = audit_skills(skills, episodes)
        return skills, {
            "skill/parse_rate": audit.usable,
            "skill/words": audit.words,
            "skill/duplicates": audit.duplicates,
            "skill/instances": audit.instances,
        }

    def _rows(self, episodes: Sequence[Episode], skills: Sequence[Skill], number: int) -> tuple[list[Row], float]:
        """Step rows of all episodes that may be learned from, with advantages and teacher prompts."""
        usable = [
            i
            for i, e in enumerate(episodes)
            if e.counted and e.stop_reason is not StopReason.CONTEXT_OVERFLOW and e.steps
        ]
        place = {index: n for n, index in enumerate(usable)}
        steps = [(i, step) for i in usable for step in episodes[i].steps]
        groups = [i // self.config.group for i in range(len(episodes))]
        degenerate, values, kept = 0.0, torch.zeros(len(steps)), torch.zeros(len(steps), dtype=torch.bool)
        if self.method.advantage is not None and steps:
            values, kept, degenerate = objective.advantages(
                torch.tensor([episodes[i].reward for i in usable], dtype=torch.float64),
                torch.tensor([groups[i] for i in usable]),
                torch.tensor([place[i] for i, _ in steps]),
                torch.tensor([0.0 if step.valid else self.config.invalid_action_penalty for _, step in steps]),
                self.method.advantage,
            )
        rows = [
            Row(
                prompt=step.prompt,
                response=step.response.token_ids,
                logp_old=step.response.logprobs,
                episode=i,
                group=groups[i],
                advantage=float(value) if keep else None,
            )
            for (i, step), value, keep in zip(steps, values, kept, strict=True)
        ]
        if self.method.teacher is not None:
            contexts = teacher_prompts(rows, skills, self.method.teacher.context, groups, (self.seed, SHUFFLE, number))
            rows = [dataclasses.replace(row, teacher_prompt=prompt) for row, prompt in zip(rows, contexts, strict=True)]
        return rows, degenerate

    def _active(self, rows: Sequence[Row]) -> dict[str, float]:
        """Share of the response tokens that have a teacher."""
        if self.method.teacher is None:
            return {}
        taught = sum(len(row.response) for row in rows if row.teacher_prompt is not None)
        return {"skill/active_ratio": taught / max(1, sum(len(row.response) for row in rows))}

    def _listen(self, rows: Sequence[Row], number: int) -> None:
        """Say loudly when distillation has gone silent."""
        if self.method.teacher is None or self.method.teacher.context == "empty_skill":
            return
        self.silent = 0 if any(row.teacher_prompt is not None for row in rows) else self.silent + 1
        if self.silent == SILENT_UPDATES:
            text = (
                f"no distillation token was active in updates {number - SILENT_UPDATES + 1} to {number}: "
                f"{self.method.name} is training as plain policy gradient (see skill/parse_rate in metrics.jsonl)"
            )
            log.warning("%s: %s", self.session.config.title, text)
            self.session.warnings.append(text)

    # --------------------------------------------------------------------------------------------- helpers

    def _reference(self) -> LocalPolicy:
        """The frozen policy at the start of stage 2."""
        start = self.cell.path / "start"
        spec = str(start) if self.method.start == "hindsight_sft" else self.session.config.policy
        reference = local(load_policy(spec, self.session.env))
        reference.share_encodings(self.policy)
        return reference

    def _trainer(self) -> Trainer:
        spec = self.method.teacher
        frozen_needed = self.config.kl > 0 or (spec is not None and "start" in (spec.weights, spec.analyzer))
        teacher = None
        if spec is not None and spec.weights == "external":
            teacher = local(load_policy(self.session.config.teacher, self.session.env))
            if teacher.tokenizer.get_vocab() != self.policy.tokenizer.get_vocab():
                raise HarnessError(
                    f"teacher {self.session.config.teacher!r} cannot score the tokens of "
                    f"{self.session.config.policy!r}: their vocabularies differ"
                )
        return Trainer(
            self.policy,
            self.method,
            self.config,
            seed=self.seed,
            reference=self._reference() if frozen_needed else None,
            teacher=teacher,
        )

    def _charge_play(self, episodes: Sequence[Episode]) -> int:
        steps = [step for episode in episodes for step in episode.steps]
        tokens = sum(len(step.response.token_ids) for step in steps)
        self.ledger.episodes += len(episodes)
        self.ledger.env_steps += len(steps)
        self.ledger.sampled_tokens += tokens
        self.ledger.flops += forward_flops(self.policy, (step.prompt for step in steps), tokens)
        return tokens

    def _journal_skills(self, update: int, episodes: Sequence[Episode], skills: Sequence[Skill]) -> None:
        self.cell.append(
            "skills.jsonl",
            *(
                {
                    **dataclasses.asdict(skill),
                    "update": update,
                    "task": episode.task.id,
                    "attempt": episode.attempt,
                    "success": episode.success,
                    "usable": skill.usable,
                }
                for episode, skill in zip(episodes, skills, strict=True)
            ),
        )

    def _checkpoint(self, trainer: Trainer, number: int) -> None:
        with self.cell.checkpoint(number) as path:
            self.policy.save(path / POLICY)
            torch.save(trainer.state(), path / "trainer.pt")
            write_json(
                path / "progress.json",
                {"ledger": self.ledger.as_dict(), "silent": self.silent, "warnings": self.session.warnings},
            )

    def _restore(self, trainer: Trainer, path: Path) -> None:
        trainer.load_state(torch.load(path / "trainer.pt", weights_only=True))
        progress = read_json(path / "progress.json")
        self.ledger.add(Ledger(**progress["ledger"]))
        self.silent = int(progress["silent"])
        self.session.warnings.extend(progress["warnings"])


class charged:
    """Add the time spent inside to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __enter__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.ledger.wall_seconds += time.perf_counter() - self.wall
        self.ledger.cpu_seconds += time.process_time() - self.cpu


def local(policy: Any) -> LocalPolicy:
    """The policy, if it has weights."""
    if not isinstance(policy, LocalPolicy):
        raise HarnessError(f"{policy.spec!r} has no weights; a model directory or hub id is needed here")
    return policy


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
