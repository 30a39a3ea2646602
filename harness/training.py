"""The training loop of a cell: (stage 1,) then collect, analyse, re-score, optimise, and evaluate at fixed updates."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from harness import objective
from harness.annotators import annotate_in
from harness.cards import Ledger
from harness.cell import ADAPTERS, REHEARSAL, SHUFFLE, TRAIN, Session
from harness.config import TrainConfig
from harness.contracts import Episode, HarnessError, Skill, Step, StopReason, Task
from harness.credit import Credit
from harness.methods import Method, Reweighting, Teacher
from harness.outcomes import stop_reasons, success_rate
from harness.policy.base import Policy
from harness.policy.load import load_policy
from harness.policy.local import LocalPolicy
from harness.policy.lora import add_adapters, load_adapters, save_adapters, without_adapters
from harness.preparation import charged, external_teacher, load_samples, local, prepare
from harness.protocol import require_disjoint
from harness.rollout import Job
from harness.rows import Row, Sample, charge_play
from harness.seed import NO_SKILL, analyse, chosen, oracle_skill, teacher_prompt, teacher_texts
from harness.skill_measures import audit_skills
from harness.store import ADAPTER, POLICY, SAMPLES, START, read_json, write_json
from harness.trainer import Trainer

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
        self.seed, self.ledger, self.cell, self.world = session.config.seed, session.ledger, session.cell, session.world
        self.silent = 0
        self.rehearsed: list[Sample] = []
        self._oracle_skills: dict[str, str] = {}
        self.panel = session.env.panel("train", config.panel_size)
        require_disjoint(self.panel, session.panel)

    def run(self) -> None:
        damaged: list[str] = []
        found = self.world.once(lambda: self.cell.latest_checkpoint(damaged.append))
        for problem in damaged:
            self.session.warn(f"{problem}; {f'going on from update {found.update}' if found else 'starting anew'}")
        self.cell.rewind(found)
        if found is None:
            if self.config.lora:
                add_adapters(self.policy, self.config.lora, (self.seed, ADAPTERS))
            prepare(self.session, self.method, self.policy, self.panel)
            trainer = self._trainer()
            self.session.push_weights()
            self.session.evaluate(0, last=self.config.updates == 0)
            self._checkpoint(trainer, 0)
        else:
            self._load(found.path)
            trainer = self._trainer()
            self._restore(trainer, found.path)
            self.session.push_weights()
        for number in range(found.update + 1 if found else 1, self.config.updates + 1):
            self.update(trainer, number)
            last = number == self.config.updates
            if last or number % self.session.config.eval.every == 0:
                self.session.evaluate(number, last)
            if last or number % self.config.checkpoint_every == 0:
                self._checkpoint(trainer, number)
        self.session.finish(self.panel)

    # ----------------------------------------------------------------------------------------- one update

    def update(self, trainer: Trainer, number: int) -> None:
        """One update: collect, analyse, re-score, optimise; then one line in metrics.jsonl."""
        session = self.session
        with charged(self.ledger, self.world):
            trainer.forget_pictures()  # so that a resumed run encodes in the same batches
            session.tell("train", number - 1, self.config.updates)
            jobs = self._jobs(number)
            clock = time.perf_counter()
            episodes = session.play(None, jobs, self.config.temperature, len(jobs))
            tokens = charge_play(self.ledger, self.policy, episodes)
            speed = tokens / (time.perf_counter() - clock)
            skills, statistics = self._skills(trainer, episodes, number)
            texts = self._teacher_texts(episodes, skills, number)
            rows, steps_of, degenerate = self._rows(episodes, texts)
            statistics |= self._active(rows)
            if session.engine:
                rows, gap = trainer.rescore(rows, session.config.engine, self.ledger)
                statistics |= gap
            session.rest()
            done = trainer.update(rows, number, self.ledger, self._rehearsal(number))
            session.push_weights()
        self._listen(rows, number)
        session.journal("train", number, episodes, self.method.rollout, self.config.detail * self.config.group)
        self._journal_credit(number, episodes, texts, rows, steps_of, done.credit)
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
                "prompt_tokens": mean([self.policy.prompt_tokens(step.prompt) for step in steps]),
                "response_tokens": mean([len(step.response.token_ids) for step in steps]),
                "distinct_actions": len({step.action for step in steps}) / max(1, len(steps)),
                "degenerate_groups": degenerate,
                "stop_reasons": stop_reasons(episodes),
                **statistics,
                **done.statistics,
                "ledger": self.ledger.as_dict(),
            },
        )
        session.tell("train", number, self.config.updates, speed)

    def _jobs(self, number: int) -> list[Job]:
        """N attempts at the next tasks: the train panel in a new order each epoch, a function of seed and update.

        Where an epoch ends within the update, a task may come twice; its attempts are numbered on, so that (update,
        task, attempt) names one episode.
        """
        first = (number - 1) * self.config.tasks
        size = len(self.panel)
        jobs: list[Job] = []
        attempts: Counter[str] = Counter()
        for place in range(first, first + self.config.tasks):
            order = np.random.default_rng([self.seed, TRAIN, place // size]).permutation(size)
            task = self.panel.tasks[order[place % size]]
            skill = self.session.skill(self.method.rollout, task)
            for k in range(self.config.group):
                jobs.append(Job(task, attempts[task.id], (self.seed, TRAIN, number, place - first, k), skill))
                attempts[task.id] += 1
        return jobs

    def _skills(
        self, trainer: Trainer, episodes: Sequence[Episode], number: int
    ) -> tuple[list[Skill], dict[str, float]]:
        """Skills of the update's episodes, written by the method's analyzer, with their statistics."""
        analysis, spec, env = self.session.config.analysis, self.method.teacher, self.session.env
        if analysis is None or spec is None or not self.method.writes_skills:
            return [], {}
        wanted = [i for i, episode in enumerate(episodes) if chosen(spec, episode)]
        asked = [episodes[i] for i in wanted]
        if spec.analyzer == "external":
            annotated = annotate_in(self.session, asked, analysis.annotator, number, analysis.max_tokens)
            written, extra = annotated.skills, {"skill/asked_again": annotated.repeated / max(1, len(asked))}
        else:
            analyzer = self._analyzer(trainer, spec)
            written, extra = analyse(analyzer, asked, analysis, number, self.ledger, env.brief, self.world), {}
        self.session.journal_skills(number, asked, written)
        audit = audit_skills(written, asked)
        skills = dict(zip(wanted, written, strict=True))
        return [skills.get(i, NO_SKILL) for i in range(len(episodes))], {
            "skill/parse_rate": audit.usable,
            "skill/words": audit.words,
            "skill/duplicates": audit.duplicates,
            "skill/instances": audit.instances,
            **extra,
        }

    def _analyzer(self, trainer: Trainer, teacher: Teacher) -> Policy:
        """Who writes about the update's episodes, with the weights of its start or of the method's."""
        if teacher.analyzer == "update_start":
            return self.session.sampler
        if self.session.engine is None:
            return trainer.start()
        self.session.engine.load_weights(trainer.start())  # the update that follows ends with its own
        return self.session.engine

    def _teacher_texts(self, episodes: Sequence[Episode], skills: Sequence[Skill], number: int) -> Sequence[str | None]:
        """What the teacher reads about each episode; None where it is not distilled."""
        if self.method.teacher is None:
            return [None] * len(episodes)
        given = self._oracle_skill if self.method.teacher.context == "oracle_skill" else self._library_skill
        groups = [i // self.config.group for i in range(len(episodes))]
        key = (self.seed, SHUFFLE, number)
        return teacher_texts(self.method.teacher, episodes, skills, groups, given, key)

    def _library_skill(self, task: Task) -> str:
        return self.session.skill("library", task)

    def _oracle_skill(self, task: Task) -> str:
        """The environment's own skill for a task, from its hidden state."""
        if task.id not in self._oracle_skills:
            self._oracle_skills[task.id] = oracle_skill(self.session.env, task)
        return self._oracle_skills[task.id]

    def _rehearsal(self, number: int) -> list[Sample]:
        """The pairs of stage 1 that an update repeats."""
        if self.method.rehearsal is None:
            return []
        if not self.rehearsed:
            self.rehearsed = load_samples(self.cell.path / SAMPLES)
        rng = np.random.default_rng([self.seed, REHEARSAL, number])
        return [self.rehearsed[i] for i in rng.permutation(len(self.rehearsed))[: self.method.rehearsal.samples]]

    def _rows(
        self, episodes: Sequence[Episode], texts: Sequence[str | None]
    ) -> tuple[list[Row], list[tuple[int, int]], float]:
        """Step rows of all episodes that may be learned from, with advantages and teacher prompts.

        Returns (rows, (episode, step) of each, share of degenerate groups).
        """
        usable = [
            i
            for i, e in enumerate(episodes)
            if e.counted and e.stop_reason is not StopReason.CONTEXT_OVERFLOW and e.steps
        ]
        place = {index: n for n, index in enumerate(usable)}
        places = [(i, n) for i in usable for n in range(len(episodes[i].steps))]
        steps = [episodes[i].steps[n] for i, n in places]
        groups = [i // self.config.group for i in range(len(episodes))]
        degenerate, values, kept = 0.0, torch.zeros(len(steps)), torch.zeros(len(steps), dtype=torch.bool)
        if self.method.advantage is not None and steps:
            values, kept, degenerate = objective.advantages(
                torch.tensor([episodes[i].reward for i in usable], dtype=torch.float64),
                torch.tensor([groups[i] for i in usable]),
                torch.tensor([place[i] for i, _ in places]),
                torch.tensor([0.0 if step.valid else self.config.invalid_action_penalty for step in steps]),
                self.method.advantage,
                states=state_numbers(steps),
                step_rewards=torch.tensor([step.reward for step in steps], dtype=torch.float64),
            )
        # A teacher that only scales advantages has nothing to say where there is none.
        distilled = kept | (not isinstance(self.method.signal, Reweighting))
        rows = [
            Row(
                prompt=step.prompt,
                response=step.response.token_ids,
                logp_old=step.response.logprobs,
                episode=i,
                group=groups[i],
                advantage=float(value) if keep else None,
                teacher_prompt=teacher_prompt(step.prompt, texts[i]) if distil else None,
                watched=groups[i] < self.config.detail,
            )
            for (i, _), step, value, keep, distil in zip(places, steps, values, kept, distilled, strict=True)
        ]
        return rows, places, degenerate

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
                f"{self.method.name} is training without its teacher (see skill/parse_rate in metrics.jsonl)"
            )
            self.session.warn(text)

    # --------------------------------------------------------------------------------------------- helpers

    def _reference(self) -> LocalPolicy:
        """The frozen policy at the start of stage 2."""
        if self.policy.adapters:
            return without_adapters(self.policy)
        reference = local(load_policy(self._start(), self.session.env, precision=self.session.config.precision))
        reference.share_encodings(self.policy)
        return reference

    def _start(self) -> str:
        """Where the weights of the start of stage 2 lie."""
        return self.session.config.policy if self.method.start == "base" else str(self.cell.path / START)

    def _trainer(self) -> Trainer:
        spec = self.method.teacher
        frozen_needed = self.config.kl > 0 or (spec is not None and "start" in (spec.weights, spec.analyzer))
        external = spec is not None and spec.weights == "external"
        return Trainer(
            self.policy,
            self.method,
            self.config,
            seed=self.seed,
            reference=self._reference() if frozen_needed else None,
            teacher=external_teacher(self.session, self.policy) if external else None,
            world=self.world,
        )

    def _journal_credit(
        self,
        number: int,
        episodes: Sequence[Episode],
        texts: Sequence[str | None],
        rows: Sequence[Row],
        places: Sequence[tuple[int, int]],
        credit: Mapping[int, Credit],
    ) -> None:
        """What the tokens of the watched rows were told to learn, one record per row (:mod:`harness.records`)."""
        records = []
        for index, (row, (episode, step)) in enumerate(zip(rows, places, strict=True)):
            if row.watched:
                found = credit.get(index)
                records.append(
                    {
                        "update": number,
                        "task": episodes[episode].task.id,
                        "attempt": episodes[episode].attempt,
                        "step": step,
                        "ids": list(row.response),
                        "tokens": self.policy.tokenizer.batch_decode([[token] for token in row.response]),
                        "logp": list(row.logp_old),
                        "teacher": found.teacher if found else None,
                        "gate": found.gate if found else None,
                        "advantage": row.advantage,
                        "pull": found.pull if found else [0.0] * len(row.response),
                        "skill": texts[episode] or "",
                        "in_policy": row.advantage is not None,
                        "in_distill": row.teacher_prompt is not None,
                        "chosen": found is not None,
                    }
                )
        self.cell.append("credit.jsonl", *records)

    def _checkpoint(self, trainer: Trainer, number: int) -> None:
        state = trainer.state()  # by all processes, where each holds a part of it
        if not self.world.main:
            return
        with self.cell.checkpoint(number) as path:
            self.policy.save(path / POLICY)
            if self.policy.adapters:
                base = self.session.config.policy if self.method.start == "base" else f"../{START}"
                save_adapters(self.policy, path / ADAPTER, base)
            torch.save(state, path / "trainer.pt")
            write_json(
                path / "progress.json",
                {"ledger": self.ledger.as_dict(), "silent": self.silent, "warnings": self.session.warnings},
            )

    def _load(self, path: Path) -> None:
        """Take over a checkpoint's weights; where adapters are trained, its adapters above the start's weights."""
        spec = self._start() if self.config.lora else str(path / POLICY)
        precision, whole = self.session.config.precision, self.config.lora is None
        if spec != self.session.config.policy:
            stored = load_policy(spec, self.session.env, precision=precision, trained=whole)
            self.policy.copy_weights_from(local(stored))
        if self.config.lora:
            add_adapters(self.policy, self.config.lora, (self.seed, ADAPTERS))
            load_adapters(self.policy, path / ADAPTER)

    def _restore(self, trainer: Trainer, path: Path) -> None:
        trainer.load_state(torch.load(path / "trainer.pt", weights_only=True))
        progress = read_json(path / "progress.json")
        self.ledger.add(Ledger(**progress["ledger"]))
        self.silent = int(progress["silent"])
        self.session.warnings.extend(progress["warnings"])


def state_numbers(steps: Sequence[Step]) -> torch.Tensor:
    """A number for each step, equal where the agent saw the same text and the same pictures; ``[steps]``."""
    numbers: dict[tuple[str, tuple[bytes, ...]], int] = {}
    seen = [(s.observation["text"], tuple(image.tobytes() for image in s.observation["images"])) for s in steps]
    return torch.tensor([numbers.setdefault(state, len(numbers)) for state in seen])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
