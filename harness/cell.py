"""One cell: the policy, the environment and the journal they write to; evaluation on a pinned panel.

A cell that was killed anywhere continues from its last checkpoint and ends with the same numbers, bit for bit on CPU:
all sampling is keyed by (seed, phase, ...), so no generator state outlives an update. A cell without training
continues from the episodes it has journaled. ``harness.training`` adds the training loop.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from harness.cards import Ledger, ProtocolCard
from harness.config import CellConfig, longest_sequence
from harness.contracts import UNCOUNTED, AgentEnv, Episode, HarnessError, Panel, Skill, Task
from harness.library import Library, load_library
from harness.outcomes import Result, result, share
from harness.policy.api import USUAL, Calls
from harness.policy.base import Policy, Sampling, check_length
from harness.policy.load import load_policy
from harness.pool import EnvPool
from harness.progress import Progress
from harness.protocol import describe, protocol_card
from harness.provenance import provenance
from harness.records import PICTURES, trace
from harness.registry import env_class, make_env
from harness.rollout import Job, Rules, rollout
from harness.store import CellDir, Record
from harness.world import World, current_world, directory_of

if TYPE_CHECKING:
    from harness.policy.engines import Engine

log = logging.getLogger(__name__)

TRAIN, EVAL, STAGE1, SHUFFLE, IMITATION, REHEARSAL, ADAPTERS, SECOND_ADAPTERS = range(8)
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
    world = current_world()
    cell = directory_of(cell, world)
    with cell.lock():
        if world.once(lambda: cell.finished):
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
            world.wait()
        finally:
            session.close()


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
    world: World = field(default_factory=World)
    engine: Engine | None = None
    """What samples in the policy's place, if anything does."""
    calls: Calls = USUAL
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
        world = current_world()
        if config.engine.kind != "local":
            from harness.policy.engines import check_engine

            check_engine(world.size)
        options = env_options(config)
        env = make_env(config.env.id, options)
        panel = env.panel(config.eval.panel, config.eval.panel_size)
        library = load_library(config.library) if config.library else None
        whole = config.train is not None and config.train.lora is None
        policy = load_policy(config.policy, env, precision=config.precision, trained=whole, calls=calls)
        check_length(policy, longest_sequence(config))
        engine = _engine(config, policy)
        pool = EnvPool(config.env.id, options, workers=workers, want_expert=policy.needs_expert)
        return cls(config, cell, report, env, pool, policy, panel, library, world, engine, calls)

    @property
    def sampler(self) -> Policy:
        """What answers prompts: the policy, or the engine that stands in for it."""
        return self.engine or self.policy

    def push_weights(self) -> None:
        """Have the engine, if there is one, sample with the policy's weights as they are now."""
        if self.engine:
            self.engine.load_weights(self.engine.policy)

    def rest(self) -> None:
        """Have the engine, if there is one, free memory until weights are pushed again."""
        if self.engine:
            self.engine.rest()

    def close(self) -> None:
        """End the environments and the engine."""
        self.pool.close()
        self.env.close()
        if self.engine:
            self.engine.close()

    def rules(self, temperature: float) -> Rules:
        """The rules of an episode: the cell's where it states one, else the environment card's."""
        env = self.config.env
        return Rules(
            history=self.env.card.history if env.history is None else env.history,
            max_steps=env.max_steps or self.env.card.max_steps,
            max_prompt_tokens=env.max_prompt_tokens,
            sampling=Sampling(temperature, env.max_response_tokens),
            max_env_errors=env.max_env_errors,
        )

    def play(self, phase: str | None, jobs: Sequence[Job], temperature: float, batch: int) -> list[Episode]:
        """Play jobs under the cell's rules, with progress if the phase has a name."""
        mine = self.world.mine(jobs)
        tell = self._teller(phase, 0, len(mine)) if phase else None
        return self.world.collect(
            rollout(self.sampler, self.env, self.pool, mine, self.rules(temperature), batch, tell)
        )

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
        self.cell.rewrite("evals.jsonl", [])
        broken: list[str] = []
        played = [r for r in self.cell.records("episodes.jsonl", broken.append) if r["stop_reason"] not in UNCOUNTED]
        for line in broken:
            self.warn(f"{line}; its episode is played again")
        self.cell.rewrite("episodes.jsonl", played)
        before = self.world.once(lambda: set(self._journaled()))
        missing = [job for job in jobs if _name(job.task, job.attempt) not in before]
        mine = self.world.mine(missing)
        episodes = rollout(
            self.sampler,
            self.env,
            self.pool,
            mine,
            self.rules(spec.temperature),
            spec.batch,
            self._teller("eval", len(jobs) - len(missing), len(jobs)),
            on_end=lambda episode: self.journal("eval", 0, [episode], context, detailed=1),
        )
        theirs = [e for i, e in enumerate(self.world.collect(episodes)) if i % self.world.size]
        self.journal("eval", 0, theirs, context, detailed=len(theirs))
        self.world.wait()  # for the journal
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
        rules = self.rules(self.config.eval.temperature)
        return protocol_card(self.env, self.panel, self.config.eval.episodes_per_task, rules, self.policy.prompt_style)

    def journal(
        self, phase: str, update: int, episodes: Sequence[Episode], context: str = "plain", detailed: int = 0
    ) -> None:
        """Append whole episodes, the first ``detailed`` of them with prompts and pictures (:mod:`harness.records`)."""
        if not self.world.main:
            return
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
                    "traceback": e.traceback,
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

    def warn(self, text: str) -> None:
        """Say loudly what a reader of the cell's numbers must know: now, in the manifest and in every report."""
        log.warning("%s: %s", self.config.title, text)
        self.warnings.append(text)

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
                "processes": {"count": self.world.size, "sharded": self.world.sharded},
                "env_workers": {"restarted": self.pool.restarted, "recycled": self.pool.recycled},
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


def _engine(config: CellConfig, policy: Policy) -> Engine | None:
    """The engine that the cell asks for; loading it loads torch."""
    if config.engine.kind == "local":
        return None
    from harness.policy.engines import open_engine

    return open_engine(config, policy)


def env_options(config: CellConfig) -> dict[str, Any]:
    """Constructor options of the cell's environment; its own step limit, if it has one, follows the protocol's."""
    limit = config.env.max_steps
    follows = limit is not None and "max_steps" in env_class(config.env.id).option_names
    return {**config.env.options, "max_steps": limit} if follows else dict(config.env.options)


def _name(task: Task, attempt: int) -> tuple[str, str, int]:
    """What an episode is known by: where a task of this id has become another problem, it is another episode."""
    return task.id, task.fingerprint, attempt
