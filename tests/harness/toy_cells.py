"""Small training cells on the toy environment, with a policy of random weights, and children that die where told."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from toy_envs import Doors

from harness.cell import run_cell
from harness.config import AnalysisConfig, CellConfig, EnvConfig, EvalConfig, ImitationConfig, Stage1Config, TrainConfig
from harness.contracts import Episode, Prompt, Response, Step, StopReason, Task
from harness.methods import Method, get_method
from harness.policy.local import LocalPolicy
from harness.policy.tiny import build_tokenizer, new_tiny, tiny_config
from harness.skills import PHRASES
from harness.store import CellDir

TEXTS = ["left middle right door", "1 steps. Avoid the left door.", "2 steps. Open the right door."] * 4


def toy_policy(seed: int = 0, vocabulary: int = 340) -> LocalPolicy:
    """Random weights, spread so that every prompt has its own habits."""
    tokenizer = build_tokenizer(TEXTS, (*PHRASES, *Doors.phrases), vocabulary)
    config = tiny_config(tokenizer, width=32, layers=2, heads=2, key_value_heads=1, mlp=64, vision_width=32)
    policy = new_tiny(tokenizer, seed, config)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    return policy


CLOCKS = {"wall_seconds", "cpu_seconds"}

LIBRARY_SKILL = "Open the right door."


def toy_library(place: Path, of_tasks: Mapping[str, str] | None = None) -> Path:
    """A skill library about the toy environment: one skill for all of it, or one for each of some tasks."""
    skills: list[dict[str, str]] = [{"env": "toy_envs:Doors", "text": LIBRARY_SKILL}]
    if of_tasks is not None:
        skills = [{"env": "toy_envs:Doors", "task": task, "text": text} for task, text in of_tasks.items()]
    library = {"format": "skill-library-1", "name": "toy", "provenance": {"author": "test"}, "skills": skills}
    place.write_text(json.dumps(library))
    return place


def toy_episodes(count: int) -> list[Episode]:
    """Finished episodes of one step at a task each; every other one is a success."""
    episodes = []
    for n in range(count):
        image = np.full((28, 28, 3), 20 * n, np.uint8)
        observation: Any = {"text": "You have opened", "images": (image,)}
        prompt = Prompt("<image>Find the prize.", (image,))
        step = Step(observation, prompt, Response("left", (5,), (-1.0,)), "left", True, float(n % 2))
        reason = StopReason.SUCCESS if n % 2 else StopReason.FAILURE
        episodes.append(Episode(Task(f"t/{n}", "toy", "t", "", {}, str(n)), 0, "Find the prize.", [step], reason))
    return episodes


def toy_config(policy: Path | str, method: Method | str = "grpo", teacher: Path | str = "", **train: Any) -> CellConfig:
    """Three updates of two tasks, twice attempted; skills are readable because stage 1 makes them so."""
    method = get_method(method) if isinstance(method, str) else method
    library = str(toy_library(Path(policy).parent / "library.json")) if method.reads_library else ""
    settings = {
        "updates": 3 if method.learns else 0,
        "tasks": 2,
        "group": 4,
        "panel_size": 3,
        "learning_rate": 1e-3,
        "checkpoint_every": 1,
    }
    return CellConfig(
        env=EnvConfig(id="toy_envs:Doors", max_prompt_tokens=128, max_response_tokens=4),
        policy=str(policy),
        method=method,
        teacher=str(teacher),
        library=library,
        seed=5,
        train=TrainConfig(**(settings | train)),
        imitation=ImitationConfig(tasks=3, attempts=4, episodes="all", epochs=2, batch=4, learning_rate=1e-3),
        stage1=Stage1Config(tasks=3, attempts=4, temperature=1.0, epochs=8, batch=4, learning_rate=1e-2),
        analysis=AnalysisConfig(max_tokens=16, max_prompt_tokens=256),
        eval=EvalConfig(panel_size=4, temperature=1.0, every=2, batch=3),
    )


def run_toy(config: CellConfig, place: Path, workers: int = 1) -> CellDir:
    cell = CellDir(place)
    run_cell(config, cell, lambda progress: None, workers)
    return cell


def timeless(value: Any) -> Any:
    """Records without what a clock measured."""
    if isinstance(value, list):
        return [timeless(part) for part in value]
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name not in CLOCKS}
    return value


def everything(cell: CellDir) -> dict[str, Any]:
    """All that a run leaves behind and that must be the same whenever it is run."""
    assert cell.finished
    manifest = cell.read_json("manifest.json")
    return {
        "weights": b"".join(path.read_bytes() for path in cell.path.glob("policy/*.safetensors")),
        "pictures": sorted(path.name for path in (cell.path / "pictures").iterdir()),
        **{
            name: pyarrow.parquet.read_table(cell.path / f"{name}.parquet").to_pylist()
            for name in ("episodes", "credit")
            if (cell.path / f"{name}.parquet").is_file()
        },
        **{name: timeless(cell.records(name)) for name in ("metrics.jsonl", "evals.jsonl", "skills.jsonl")},
        **{name: timeless(manifest[name]) for name in ("ledger", "warnings", "protocol", "panel", "train_panel")},
    }


def server() -> Any:
    """Children of this context start from a server that has imported everything, in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    modules = ["toy_cells", "harness.training", "harness.reporting.report", "accelerate", "transformers"]
    context.set_forkserver_preload(modules)
    return context


def run_in_child(config: CellConfig, place: Path, dies_at: tuple[str, int] | None = None) -> int:
    """Run the cell in a process of its own and return its exit code.

    ``dies_at`` = ("package.module:function", n): the child kills itself with SIGKILL when it calls that for the n-th
    time.
    """
    child = server().Process(target=_child, args=(config.model_dump_json(), place, dies_at))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _child(config: str, place: Path, dies_at: tuple[str, int] | None) -> None:
    if dies_at:
        name, count = dies_at
        owner, function = find(name)
        setattr(owner, function, _deadly(getattr(owner, function), count))
    run_toy(CellConfig(**json.loads(config)), place)


def find(name: str) -> tuple[Any, str]:
    """What holds the function "package.module:Class.function", and the function's own name."""
    module, _, path = name.partition(":")
    *owners, function = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, function


def _deadly(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call
