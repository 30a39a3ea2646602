"""``harness perf``: how fast and how frugal the harness is, as ratios to straightforward references.

Every ratio comes from one run: ours and the reference take turns on the same work, and the medians are divided. Times
are CPU seconds of this process and of its environment workers, so that other programs on the machine hardly matter.
The settings are those of the recipe ``quick``.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness.cell import TRAIN, Session
from harness.config import CellConfig, TrainConfig
from harness.contracts import HarnessError, Prompt
from harness.naive import NaivePolicy, full_logits_scores
from harness.policy.load import load_local, model_directory
from harness.policy.tiny import new_tiny, tiny_config
from harness.preparation import local
from harness.recipes import expand, load_recipe
from harness.registry import ENVS, make_env, registered
from harness.rollout import Job
from harness.store import cell_dir
from harness.trainer import Trainer
from harness.training import Training

RECIPE = "quick"
REPEATS = 3

ROLLOUT_GOAL = 4.0
UPDATE_GOAL = 1.5
MEMORY_GOAL = 0.5

NAIVE_EPISODES = 4
"""Episodes that the reference plays each time: its speed does not depend on how many there are."""

VOCABULARY = 150_000
ROWS, NUMBERS = 8, 24


@dataclass(frozen=True)
class Settings:
    """What the user chose: the policy that is measured and how many episodes are in flight."""

    policy: str
    episodes: int


@dataclass(frozen=True)
class Measurement:
    """One ratio, ``ours / reference``, and its goal."""

    part: str
    what: str
    ours: float
    reference: float
    unit: str
    goal: float
    direction: Literal["at least", "at most"]

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal if self.direction == "at least" else self.ratio <= self.goal


Report = Callable[[str], None]
Part = Callable[[Settings, Report], Iterator[Measurement | str]]
"""Yields measurements, and lines about what could not be measured."""


def main(part: str | None, policy: str, episodes: int, console: Console) -> int:
    """Measure one part or all of them and print a table; 1 where a goal is missed.

    Raises HarnessError where the policy cannot be loaded or trained.
    """
    torch.set_num_threads(1)
    settings = Settings(policy, episodes)
    results: list[Measurement | str] = []
    with console.status("measuring") as status:
        for name in [part] if part else PARTS:
            results += PARTS[name](settings, status.update)
    measured = [result for result in results if isinstance(result, Measurement)]
    console.print(results_table(measured))
    for note in results:
        if isinstance(note, str):
            console.print(note, soft_wrap=True)
    return 0 if all(one.met for one in measured) else 1


def results_table(measured: Sequence[Measurement]) -> Table:
    """The measurements for the terminal."""
    table = Table("", "", "measured", "ours", "reference", "ratio", "goal", box=None)
    for one in measured:
        mark = "[green]✓[/green]" if one.met else "[red]✗[/red]"
        values = [f"{value:,.4g} {one.unit}" for value in (one.ours, one.reference)]
        sign = "≥" if one.direction == "at least" else "≤"
        table.add_row(mark, one.part, one.what, *values, f"{one.ratio:,.3g}", f"{sign} {one.goal:g}")
    return table


# ------------------------------------------------------------------------------------------------- rollout


def rollout_speed(settings: Settings, report: Report) -> Iterator[Measurement | str]:
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


# -------------------------------------------------------------------------------------------------- update


def update_cost(settings: Settings, report: Report) -> Iterator[Measurement | str]:
    """CPU seconds of a whole update: SEED's against GRPO's from the same weights on the same episodes."""
    for seed_config, grpo_config in zip(*(quick_cells(settings, name) for name in ("seed", "grpo")), strict=True):
        with opened(seed_config) as first, opened(grpo_config) as second:
            updaters = [Updater(first), Updater(second)]
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(1, REPEATS + 1):
                report(f"update {seed_config.env.id}: {number} of {REPEATS}")
                for updater, spent in zip(updaters, seconds, strict=True):
                    spent.append(updater.seconds(number))
            metrics = [session.cell.records("metrics.jsonl") for session in (first, second)]
            played = {(session.ledger.env_steps, session.ledger.sampled_tokens) for session in (first, second)}
        if len(played) > 1:
            raise RuntimeError(f"the two methods did not play the same episodes: {played}")
        rows, others = (median(record["rows"] for record in records) for records in metrics)
        usable = median(record["skill/parse_rate"] for record in metrics[0])
        env_id, (ours, reference) = seed_config.env.id, map(median, seconds)
        yield Measurement("update", env_id, ours, reference, "s", UPDATE_GOAL, "at most")
        yield (
            f"update {env_id}: seed against grpo on the same {settings.episodes} episodes; seed learns from "
            f"{rows:,.0f} steps, grpo from {others:,.0f}; {usable:.0%} of the skills are usable"
        )


class Updater:
    """Updates of one method that all start from the same weights."""

    def __init__(self, session: Session) -> None:
        policy, method, train = local(session.policy), session.config.method, train_config(session.config)
        if method is None:
            raise ValueError(f"{session.config.title} does not train")
        self.policy, self.start = policy, policy.clone()
        self.training = Training(session, method, policy, train)
        self.trainer = Trainer(policy, method, train, seed=0, reference=self.start)
        self.trainer.steps = 1  # as in the middle of a run: before the first step the reference need not be scored

    def seconds(self, number: int) -> float:
        """CPU seconds of update ``number``: collect, analyse, re-score, optimise, write down."""
        self.policy.copy_weights_from(self.start)
        gc.collect()
        begin = cpu_seconds()
        self.training.update(self.trainer, number)
        return cpu_seconds() - begin


# -------------------------------------------------------------------------------------------------- memory


def scoring_memory(settings: Settings, report: Report) -> Iterator[Measurement | str]:
    """Peak memory of scoring answers, forward and backward, against the logits of whole rows."""
    tokenizer = load_local(settings.policy).tokenizer
    config = tiny_config(tokenizer)
    config.get_text_config().vocab_size = VOCABULARY
    policy = new_tiny(tokenizer, 0, config)
    rng = np.random.default_rng(0)
    numbers = rng.integers(1000, size=(ROWS, NUMBERS))
    rows = [(Prompt(" ".join(map(str, row))), policy.answer_ids(" ".join(map(str, row[:8])))) for row in numbers]
    ids = [(policy.encode(prompt).ids.tolist(), answer) for prompt, answer in rows]

    def backward(scores: Tensor) -> None:
        policy.model.zero_grad()
        scores.sum().backward()

    peaks: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS):
        report(f"memory: {repeat + 1} of {REPEATS}")
        peaks[0].append(peak_megabytes(lambda: backward(policy.score(rows).logprobs)))
        peaks[1].append(peak_megabytes(lambda: backward(full_logits_scores(policy.model, ids))))
    tokens = sum(len(prompt) + len(answer) for prompt, answer in ids)
    ours, reference = map(median, peaks)
    yield Measurement("memory", "scoring", ours, reference, "MB", MEMORY_GOAL, "at most")
    yield (
        f"memory: peak of forward and backward over {tokens:,} tokens, {sum(len(answer) for _, answer in ids)} of them "
        f"answers, at a vocabulary of {VOCABULARY:,}, against the logits of every token"
    )


def peak_megabytes(work: Callable[[], None]) -> float:
    """By how much the resident memory rises at most while ``work`` runs, looked at a thousand times a second."""
    gc.collect()
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return float(peak - before) / 1e6


# -------------------------------------------------------------------------------------------------- engine


def engine_speed(settings: Settings, report: Report) -> Iterator[Measurement | str]:
    """What environments measure of themselves: engines of their own against the ones that they replace."""
    for name in registered(ENVS):
        report(f"engine {name}")
        with closing(make_env(name)) as env:
            try:
                speeds = env.benchmark()
            except HarnessError as error:
                yield f"engine {name} not measured: {error}"
                continue
        for speed in speeds:
            what = f"{name} {speed.what}"
            yield Measurement("engine", what, speed.ours, speed.reference, "/s", speed.goal, "at least")


# -------------------------------------------------------------------------------------------------- helpers


def quick_cells(settings: Settings, method: str) -> list[CellConfig]:
    """The recipe's cells of one method, one per environment."""
    group = load_recipe(RECIPE).train.group
    tasks = max(1, settings.episodes // group)
    overrides = [f"methods=[{method}]", "baselines=[]", "seeds=[0]", f"train.tasks={tasks}"]
    recipe = load_recipe(RECIPE, overrides).model_copy(update={"policy": settings.policy})
    return [cell for cell in expand(recipe) if cell.method is not None]


@contextmanager
def opened(config: CellConfig) -> Iterator[Session]:
    """A session that journals into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="harness-perf-") as scratch:
        cell = cell_dir(Path(scratch), config)
        cell.path.mkdir(parents=True)
        session = Session.open(config, cell, lambda progress: None, workers=1)
        try:
            yield session
        finally:
            session.pool.close()
            session.env.close()


def train_config(config: CellConfig) -> TrainConfig:
    """The training settings of a training cell."""
    if config.train is None:
        raise ValueError(f"{config.title} does not train")
    return config.train


def cpu_seconds() -> float:
    """CPU time so far of this process and of the environment workers that are alive."""
    workers = [psutil.Process(child.pid).cpu_times() for child in multiprocessing.active_children()]
    return time.process_time() + sum(float(times.user + times.system) for times in workers)


PARTS: dict[str, Part] = {
    "rollout": rollout_speed,
    "update": update_cost,
    "memory": scoring_memory,
    "engine": engine_speed,
}
