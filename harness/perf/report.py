"""The report of a large run: what it takes to read a million episodes and write the pages about them.

The run is made up: 40 cells (5 seeds of 8 rows) of 150 updates by 128 episodes and 29 evaluations by 200, with a
skill for every episode and the credit of one group per update in the cells of SEED, as ``harness run`` would leave it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from harness.cards import Ledger, ProtocolCard
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.methods import Method, get_method
from harness.perf.measure import Measurement, Report, Result, Settings
from harness.store import CellDir

SECONDS_GOAL, GIBIBYTES_GOAL = 60.0, 2.0
ENVS, METHODS, SEEDS = ("ALFWorld-v1", "WebShop-v1"), ("grpo", "gigpo", "rloo", "seed"), range(5)
STEPS, TOKENS = 10, 10
"""Steps of an episode, tokens of an answer."""


@dataclass(frozen=True)
class Size:
    """Of one cell: updates and episodes of each, evaluations and episodes of each."""

    updates: int = 150
    played: int = 128
    evaluations: int = 29
    panel: int = 200

    @property
    def episodes(self) -> int:
        return self.updates * self.played + self.evaluations * self.panel


def report_cost(settings: Settings, report: Report) -> Iterator[Result]:
    """CPU seconds and peak memory of ``harness report`` on a run of a million episodes, against their limits."""
    with TemporaryDirectory(prefix="harness-perf-") as scratch:
        report("report: making up a run")
        cells = write_run(Path(scratch), Size())
        report("report: harness report")
        cost = reporting_cost(Path(scratch))
        files = [path.stat().st_size for path in Path(scratch, "report").rglob("*") if path.is_file()]
    yield Measurement("report", "CPU seconds", cost.cpu, SECONDS_GOAL, "s", 1.0, "at most")
    yield Measurement("report", "peak memory", cost.gibibytes, GIBIBYTES_GOAL, "GiB", 1.0, "at most")
    yield (
        f"report: {cells * Size().episodes:,} episodes of {cells} cells; {cost.wall:.0f} s by the clock; "
        f"{len(files):,} files of {sum(files) / 2**20:,.0f} MiB written"
    )


@dataclass(frozen=True)
class Cost:
    """What a child process took."""

    wall: float
    cpu: float
    gibibytes: float
    """Most memory that it held at once."""


COUNTED = r"""
import re, sys, time
from pathlib import Path
from harness.cli import main
code = main(["report", sys.argv[1]])
peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
print(f"\n{time.process_time()} {peak[1]}")
sys.exit(code)
"""
"""Not the peak that ``getrusage`` tells: it begins with that of the process that started this one."""


def reporting_cost(directory: Path) -> Cost:
    """Write a run's report in a process of its own."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", COUNTED, directory], check=True, capture_output=True, text=True)
    cpu, kibibytes = done.stdout.split()[-2:]
    return Cost(time.perf_counter() - begin, float(cpu), float(kibibytes) / 2**20)


# ------------------------------------------------------------------------------------------- a made-up run


def write_run(directory: Path, size: Size) -> int:
    """Write finished cells; returns how many."""
    configs = [
        CellConfig(env=EnvConfig(id=env), method=get_method(name), seed=seed, train=TrainConfig(updates=size.updates))
        for env in ENVS
        for name in METHODS
        for seed in SEEDS
    ]
    for config in configs:
        path = directory / "cells" / config.hash
        path.mkdir(parents=True)
        _write_cell(path, config, size)
    return len(configs)


def _write_cell(path: Path, config: CellConfig, size: Size) -> None:
    """One finished cell, written as columns: a million dictionaries would take longer than their report."""
    rng = np.random.default_rng([config.seed, len(config.title)])
    method, card = config.method, _card(config.env.id)
    if method is None:
        raise ValueError("a made-up cell trains")
    train = _episodes(rng, size.updates, size.played, "train")
    evaluated = _episodes(rng, size.evaluations, size.panel, "eval")
    last = size.evaluations
    evaluated["detail"] = evaluated["update"] == last
    table = pyarrow.concat_tables([pyarrow.table(train), pyarrow.table(evaluated)])
    pyarrow.parquet.write_table(table, path / "episodes.parquet", compression="zstd")
    cell = CellDir(path)
    with cell.lock():
        cell.write_json("config.json", config.model_dump(mode="json"))
        cell.append("metrics.jsonl", *(_metrics(rng, update + 1, size, method) for update in range(size.updates)))
        cell.append("evals.jsonl", *_evaluations(evaluated, size, asdict(card), method))
        if method.writes_skills:
            cell.append("skills.jsonl", *_skills(train))
            pyarrow.parquet.write_table(_credit(rng, size), path / "credit.parquet", compression="zstd")
        panel = {"name": "eval", "hash": card.panel_hash, "tasks": size.panel, "notes": []}
        spent = _ledger(size.updates, size, method).as_dict()
        cell.finish({"status": "complete", "protocol": asdict(card), "panel": panel, "ledger": spent, "warnings": []})


def _card(env: str) -> ProtocolCard:
    texts: dict[str, Any] = dict.fromkeys(ProtocolCard.__annotations__, "made up")
    numbers = {"episodes_per_task": 1, "history": 2, "max_steps": STEPS, "temperature": 1.0}
    return ProtocolCard(**{**texts, "env": env, **numbers})


def _episodes(rng: np.random.Generator, rounds: int, played: int, phase: str) -> dict[str, Any]:
    """The columns of ``episodes.parquet`` for as many rounds (updates, or evaluations after round 0, 1, ...)."""
    count = rounds * played
    number = np.arange(count)
    won = rng.random(count) < 0.2 + 0.5 * number / count
    group = 8 if phase == "train" else 1
    task = [f"{phase}/{n:06d}" for n in (number // group) % (4000 if phase == "train" else played)]
    said = [_trace(n) for n in range(64)]
    return {
        "phase": [phase] * count,
        "update": 1 + number // played,
        "skills": ["plain"] * count,
        "detail": number % played < group,
        "task": task,
        "kind": np.array(["pick", "look", "clean", "heat", "cool"])[number // group % 5],
        "attempt": number % group,
        "success": won,
        "score": won.astype(float),
        "reward": 10.0 * won,
        "steps": np.full(count, STEPS),
        "valid": np.full(count, STEPS),
        "dropped_turns": np.zeros(count, int),
        "stop_reason": np.where(won, "success", "max_steps"),
        "fingerprint": task,
        "task_text": ["put a clean mug in desk."] * count,
        "prompt_tokens": np.zeros(count, int),
        "sampled_tokens": np.full(count, STEPS * TOKENS),
        "error": [""] * count,
        "trace": [said[n % 64].replace("NUMBER", str(n)) for n in number],
    }


def _trace(number: int) -> str:
    seen = (
        f"NUMBER: on the desk {number} you see a bowl 1, a mug 2, a pen 3, a pencil 1, and a laptop 4."
        + " It is dark." * 8
    )
    step = {"observation": seen, "response": "<think>find</think><action>go to shelf 1</action>", "valid": True}
    return json.dumps([{**step, "action": f"go to shelf {n}", "reward": 0.0} for n in range(STEPS)])


def _metrics(rng: np.random.Generator, update: int, size: Size, method: Method) -> dict[str, Any]:
    names = ("success", "reward", "valid_rate", "episode_steps", "entropy", "grad_norm", "clip_fraction", "loss/policy")
    ledger = _ledger(update, size, method).as_dict()
    return {"update": update, **dict(zip(names, rng.random(len(names)).tolist(), strict=True)), "ledger": ledger}


def _ledger(update: int, size: Size, method: Method) -> Ledger:
    played = update * size.played
    return Ledger(
        env_steps=STEPS * played,
        episodes=played,
        sampled_tokens=STEPS * TOKENS * played,
        analyzer_tokens=20 * played * method.writes_skills,
        trained_tokens=STEPS * TOKENS * played,
        optimizer_steps=update,
        wall_seconds=2.0 * update,
        cpu_seconds=2.0 * update,
        flops=1e9 * played,
    )


def _evaluations(
    episodes: dict[str, Any], size: Size, card: dict[str, Any], method: Method
) -> Iterator[dict[str, Any]]:
    names = ("task", "kind", "attempt", "success", "score", "reward", "steps", "valid", "dropped_turns", "stop_reason")
    columns = [list(map(_plain, episodes[name])) for name in names]
    for place in range(size.evaluations):
        update = round(place * size.updates / max(1, size.evaluations - 1))
        rows = zip(*(column[place * size.panel : (place + 1) * size.panel] for column in columns), strict=True)
        spent = _ledger(update, size, method).as_dict()
        results = [dict(zip(names, row, strict=True)) for row in rows]
        yield {"update": update, "skills": "plain", "ledger": spent, "protocol": card, "results": results}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _skills(episodes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for update, task, attempt, won in zip(
        *(episodes[n] for n in ("update", "task", "attempt", "success")), strict=True
    ):
        text = f"Look into shelf {attempt} first; put things down at the desk, attempt {update}."
        raw = json.dumps({"episode_summary": "Went about.", "episode_skill": text})
        known = {"text": text, "summary": "Went about.", "author": "policy", "raw": raw, "usable": True}
        yield {**known, "update": int(update), "task": task, "attempt": int(attempt), "success": bool(won)}


def _credit(rng: np.random.Generator, size: Size) -> pyarrow.Table:
    """Credit of the first group of every update."""
    rows = size.updates * 8 * STEPS
    update, attempt, step = (grid.ravel() for grid in np.indices((size.updates, 8, STEPS)))
    offsets = pyarrow.array(np.arange(rows + 1) * TOKENS, pyarrow.int32())

    def lists(values: Any) -> pyarrow.Array:
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(values))

    logp = -rng.random(rows * TOKENS)
    return pyarrow.table(
        {
            "update": update + 1,
            "task": [f"train/{n * size.played // 8 % 4000:06d}" for n in update],
            "attempt": attempt,
            "step": step,
            "ids": lists(np.arange(rows * TOKENS) % 2000),
            "tokens": lists([f"token{n % 100}" for n in range(rows * TOKENS)]),
            "logp": lists(logp),
            "teacher": lists(logp + 0.1),
            "gate": lists(rng.random(rows * TOKENS)),
            "advantage": rng.normal(size=rows),
            "pull": lists(rng.normal(size=rows * TOKENS)),
            "skill": [f"Look into shelf {n}." for n in attempt],
            "in_policy": np.ones(rows, bool),
            "in_distill": np.ones(rows, bool),
            "chosen": np.ones(rows, bool),
        }
    )
