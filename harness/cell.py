"""One cell: the policy, the environment and the journal they write to; evaluation on a pinned panel.

A cell that was killed anywhere continues from its last checkpoint and ends with the same numbers, bit for bit on CPU:
all sampling is keyed by (seed, phase, ...), so no generator state outlives an update. A cell without training
continues from the episodes it has journaled. ``harness.training`` adds the training loop.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict

import numpy as np

from harness.config import CellConfig
from harness.contracts import (
    UNCOUNTED,
    AgentEnv,
    Episode,
    HarnessError,
    Ledger,
    Panel,
    ProtocolCard,
    Skill,
    Task,
    Turn,
    View,
    digest,
)
from harness.library import Library, load_library
from harness.policy.api import USUAL, Calls
from harness.policy.base import Policy, Sampling
from harness.policy.load import load_policy
from harness.pool import EnvPool
from harness.progress import Progress
from harness.provenance import provenance
from harness.records import PICTURES, trace
from harness.registry import env_class, make_env
from harness.rollout import Job, Rules, rollout
from harness.store import CellDir, Record

TRAIN, EVAL, STAGE1, SHUFFLE, IMITATION, REHEARSAL = range(6)
"""Phases, as they enter the keys of all randomness."""


def run_cell(
    config: CellConfig,
    cell: CellDir,
    report: Callable[[Progress], None],
    workers: int = 1,
    calls: Calls = USUAL,
) -> None:
    """Run a cell to its end, or continue it.

    Environment processes (``workers``) and how an endpoint is called (``calls``) change its speed, not its numbers.
    Raises HarnessError for anything the user can mend.
    """
    with cell.lock():
        if cell.finished:
            return
        cell.write_json("config.json", config.model_dump(mode="json"))
        session = Session.open(config, cell, report, workers, calls)
        try:
            if config.method is not None and config.method.trains:
                from harness.training import train  # torch loads only where there is something to train

                train(session, config.method)
            else:
                session.evaluate_only()
                session.finish()
        finally:
            session.pool.close()
            session.env.close()


@dataclass
class Session:
    """What lives while a cell runs."""

    config: CellConfig
    cell: CellDir
    report: Callable[[Progress], None]
    env: AgentEnv
    pool: EnvPool
    policy: Policy
    panel: Panel
    library: Library | None = None
    ledger: Ledger = field(default_factory=Ledger)
    success: float | None = None
    """Success rate of the latest evaluation."""
    played: dict[str, int] | None = None
    """What an evaluation without training took: episodes, steps and tokens."""
    warnings: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @classmethod
    def open(
        cls,
        config: CellConfig,
        cell: CellDir,
        report: Callable[[Progress], None],
        workers: int,
        calls: Calls = USUAL,
    ) -> Session:
        options = env_options(config)
        env = make_env(config.env.id, options)
        panel = env.panel(config.eval.panel, config.eval.panel_size)
        library = load_library(config.library) if config.library else None
        policy = load_policy(config.policy, env, calls=calls)
        pool = EnvPool(config.env.id, options, workers=workers, want_expert=policy.needs_expert)
        return cls(config, cell, report, env, pool, policy, panel, library)

    def rules(self, temperature: float) -> Rules:
        """The rules of an episode: the cell's where it states one, else the environment card's."""
        env = self.config.env
        return Rules(
            history=self.env.card.history if env.history is None else env.history,
            max_steps=env.max_steps or self.env.card.max_steps,
            max_prompt_tokens=env.max_prompt_tokens,
            sampling=Sampling(temperature, env.max_response_tokens),
        )

    def play(self, phase: str | None, jobs: Sequence[Job], temperature: float, batch: int) -> list[Episode]:
        """Play jobs under the cell's rules, with progress if the phase has a name."""
        tell = self._teller(phase, 0, len(jobs)) if phase else None
        return rollout(self.policy, self.env, self.pool, jobs, self.rules(temperature), batch, tell)

    def _teller(self, phase: str, before: int, total: int) -> Callable[[int, int], None]:
        """Reports the progress of a rollout: finished episodes, after ``before`` earlier ones, and tokens a second."""
        clock = time.perf_counter()
        return lambda done, tokens: self.tell(phase, before + done, total, tokens / (time.perf_counter() - clock))

    @property
    def contexts(self) -> tuple[str, ...]:
        """What the prompts of evaluations hold: each entry is an evaluation of its own."""
        return self.config.method.evaluation if self.config.method else ("plain",)

    def skill(self, context: str, task: Task) -> str:
        """What the step prompts of a task hold under a method's ``rollout`` or ``evaluation``; empty for ``plain``."""
        if context == "plain":
            return ""
        if self.library is None:
            raise ValueError("a method whose prompts hold skills needs a library")
        return self.library.skill_for(task)

    def evaluate(self, update: int, last: bool) -> None:
        """Play the evaluation panel and journal it, with prompts and pictures where it is the last time."""
        spec = self.config.eval
        for context in self.contexts:
            episodes = self.play("eval", self._eval_jobs(context), spec.temperature, spec.batch)
            self._conclude(update, context, [result(episode) for episode in episodes])
            self.journal("eval", update, episodes, context, detailed=len(episodes) if last else 0)

    def evaluate_only(self) -> None:
        """Play what is missing of the evaluation panel, and journal every episode as soon as it is over.

        Episodes that the environment or the endpoint broke off are missing. Raises HarnessError where that is all of
        them: there is nothing to score, and the next run plays them again.
        """
        spec, (context,) = self.config.eval, self.contexts
        jobs = self._eval_jobs(context)
        self.cell.truncate("evals.jsonl", lambda record: False)
        self.cell.truncate("episodes.jsonl", lambda record: record["stop_reason"] not in UNCOUNTED)
        before = self._journaled()
        missing = [job for job in jobs if _name(job.task, job.attempt) not in before]
        rollout(
            self.policy,
            self.env,
            self.pool,
            missing,
            self.rules(spec.temperature),
            spec.batch,
            self._teller("eval", len(jobs) - len(missing), len(jobs)),
            on_end=lambda episode: self.journal("eval", 0, [episode], context, detailed=1),
        )
        journaled = self._journaled()
        records = [journaled[_name(job.task, job.attempt)] for job in jobs]
        if all(record["stop_reason"] in UNCOUNTED for record in records):
            raise HarnessError(f"not one of {len(records)} episodes could be played; the first: {records[0]['error']}")
        self.cell.rewrite("episodes.jsonl", records)  # in the panel's order, whichever was over first
        self._conclude(0, context, [{name: record[name] for name in Result.__annotations__} for record in records])
        self.played = {
            "episodes": len(records),
            "env_steps": sum(record["steps"] for record in records),
            "prompt_tokens": sum(record["prompt_tokens"] for record in records),
            "sampled_tokens": sum(record["sampled_tokens"] for record in records),
        }

    def _eval_jobs(self, context: str) -> list[Job]:
        """The keys do not contain the update: every checkpoint is measured with the same random numbers."""
        return [
            Job(task, attempt, (self.config.seed, EVAL, number, attempt), self.skill(context, task))
            for number, task in enumerate(self.panel)
            for attempt in range(self.config.eval.episodes_per_task)
        ]

    def _journaled(self) -> dict[tuple[str, str, int], Record]:
        records = self.cell.records("episodes.jsonl")
        return {(record["task"], record["fingerprint"], record["attempt"]): record for record in records}

    def _conclude(self, update: int, context: str, results: Sequence[Mapping[str, Any]]) -> None:
        """Append the outcome of an evaluation to ``evals.jsonl``."""
        self.success = share(result["success"] for result in results if result["stop_reason"] not in UNCOUNTED)
        self.cell.append(
            "evals.jsonl",
            {
                "update": update,
                "skills": context,
                "ledger": self.ledger.as_dict(),
                "protocol": dataclasses.asdict(self.protocol()),
                "results": results,
            },
        )

    def protocol(self) -> ProtocolCard:
        """The conditions of the cell's evaluations."""
        card, spec, rules = self.env.card, self.config.eval, self.rules(self.config.eval.temperature)
        return ProtocolCard(
            env=card.id,
            panel=self.panel.name,
            panel_hash=self.panel.hash,
            episodes_per_task=spec.episodes_per_task,
            history=rules.history,
            max_steps=rules.max_steps,
            truncation=f"oldest history first, beyond {rules.max_prompt_tokens} tokens",
            temperature=spec.temperature,
            checkpoint="last",
            parser=card.parser,
            decoding=f"free, at most {rules.sampling.max_tokens} tokens",
            invalid_action=card.invalid_action,
            reward=card.reward,
            success=card.success,
            prompt_hash=prompt_hash(self.env, self.policy.prompt_style),
            engine=card.engine,
            data=card.data,
        )

    def journal(
        self, phase: str, update: int, episodes: Sequence[Episode], context: str = "plain", detailed: int = 0
    ) -> None:
        """Append whole episodes, the first ``detailed`` of them with prompts and pictures (:mod:`harness.records`)."""
        pictures = self.cell.path / PICTURES
        self.cell.append(
            "episodes.jsonl",
            *(
                {
                    "phase": phase,
                    "update": update,
                    "skills": context,
                    "detail": number < detailed,
                    **result(e),
                    "fingerprint": e.task.fingerprint,
                    "task_text": e.task_text,
                    "prompt_tokens": sum(step.response.usage[0] for step in e.steps),
                    "sampled_tokens": sum(step.response.tokens for step in e.steps),
                    "error": e.error,
                    "trace": trace(e, pictures if number < detailed else None),
                }
                for number, e in enumerate(episodes)
            ),
        )

    def journal_skills(self, update: int, episodes: Sequence[Episode], skills: Sequence[Skill]) -> None:
        """Append skills, one about each episode, with what became of it."""
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

    def tell(self, phase: str, done: int, total: int, speed: float | None = None) -> None:
        self.report(Progress(self.config.title, phase, done, total, self.success, speed))

    def finish(self, train_panel: Panel | None = None) -> None:
        """Write the manifest; the cell is complete from then on."""
        self.cell.finish(
            {
                "status": "complete",
                **provenance(),
                "panel": describe(self.panel),
                "train_panel": describe(train_panel) if train_panel else None,
                "protocol": dataclasses.asdict(self.protocol()),
                "ledger": self.ledger.as_dict(),
                "played": self.played,
                "policy": {
                    "spec": self.config.policy,
                    "fingerprint": self.config.policy_fingerprint,
                    "parameters": self.policy.parameters,
                },
                "library": self.config.library_fingerprint or None,
                "warnings": self.warnings,
                "started": self.started,
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )


def env_options(config: CellConfig) -> dict[str, Any]:
    """Constructor options of the cell's environment; its own step limit, if it has one, follows the protocol's."""
    limit = config.env.max_steps
    follows = limit is not None and "max_steps" in env_class(config.env.id).option_names
    return {**config.env.options, "max_steps": limit} if follows else dict(config.env.options)


def describe(panel: Panel) -> dict[str, Any]:
    """A panel as manifests name it."""
    return {"name": panel.name, "hash": panel.hash, "tasks": len(panel), "notes": list(panel.notes)}


class Result(TypedDict):
    """The outcome of an episode as the journals hold it."""

    task: str
    kind: str
    attempt: int
    success: bool
    score: float
    reward: float
    steps: int
    valid: int
    """Steps whose answer was a valid action."""
    dropped_turns: int
    stop_reason: str


def result(episode: Episode) -> Result:
    """The outcome of an episode."""
    return {
        "task": episode.task.id,
        "kind": episode.task.kind,
        "attempt": episode.attempt,
        "success": episode.success,
        "score": episode.score,
        "reward": episode.reward,
        "steps": len(episode.steps),
        "valid": sum(step.valid for step in episode.steps),
        "dropped_turns": sum(step.dropped_turns for step in episode.steps),
        "stop_reason": str(episode.stop_reason),
    }


def _name(task: Task, attempt: int) -> tuple[str, str, int]:
    """What an episode is known by: where a task of this id has become another problem, it is another episode."""
    return task.id, task.fingerprint, attempt


def success_rate(episodes: Sequence[Episode]) -> float:
    """Share of successes among the counted episodes; 0 where none counts."""
    return share(episode.success for episode in episodes if episode.counted)


def share(truths: Iterable[bool]) -> float:
    """How many of them hold, as a share; 0 where there are none."""
    values = list(truths)
    return sum(values) / len(values) if values else 0.0


def stop_reasons(episodes: Sequence[Episode]) -> dict[str, int]:
    """How often each stop reason occurred."""
    return dict(Counter(str(episode.stop_reason) for episode in episodes))


def prompt_hash(env: AgentEnv, style: str) -> str:
    """Hash of the step prompts' wording: a first and a later step of a made-up view, rendered."""
    picture = (np.zeros((28, 28, 3), np.uint8),) if env.card.modality == "vision" else ()
    past = (Turn(1, "SEEN 1", "DONE 1"), Turn(2, "SEEN 2", "DONE 2"))
    views = [View("TASK", 1, (), "OBS", picture, ("ACTION",)), View("TASK", 3, past, "OBS", picture, ("ACTION",))]
    return digest([style, *(env.prompt(view, style).text for view in views)])[:12]


def require_disjoint(train: Panel, evaluation: Panel) -> None:
    """Raise HarnessError where a task is in both panels."""
    shared = {task.fingerprint for task in train} & {task.fingerprint for task in evaluation}
    if shared:
        raise HarnessError(
            f"panels {train.name!r} and {evaluation.name!r} share {len(shared)} tasks; training on them would leak"
        )
