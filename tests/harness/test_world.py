"""Several processes on one cell: the same numbers as one process, written once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from harness.contracts import HarnessError
from harness.store import CellDir
from harness.world import Onlooker, World, current_world, directory_of

CELL = [
    *("quick", "envs=[Sokoban-v1]", "methods=[seed]", "baselines=[]", "seeds=[0]"),
    *("train.updates=2", "train.tasks=3", "train.group=3", "train.checkpoint_every=1", "train.kl=0.01"),
    *(
        "stage1.tasks=2",
        "stage1.attempts=2",
        "stage1.epochs=1",
        "stage1.learning_rate=1e-5",
        "train.learning_rate=1e-5",
        "eval.panel_size=5",
        "eval.every=1",
    ),
]
LAUNCH = {"ddp": ["--multi_gpu"], "fsdp2": ["--use_fsdp", "--fsdp_version", "2"]}


@dataclass(frozen=True)
class Outcome:
    """What a run left of its trained cell and of its cell without training."""

    metrics: list[dict[str, Any]]
    episodes: pd.DataFrame
    evaluated: pd.DataFrame
    skills: str
    processes: dict[str, Any]
    weights: dict[str, torch.Tensor]


WATCHED = """
import atexit, os, pathlib, sys, torch.distributed
from harness.cli import main

def note():
    if not torch.distributed.is_initialized():
        pathlib.Path(__file__).with_name("parted-" + os.environ.get("RANK", "0")).touch()

if __name__ == "__main__":
    atexit.register(note)
    sys.exit(main())
"""
"""The command, in a process that notes last of all that it has parted from the others: else it may be aborted."""


def command(out: Path, launch: list[str] | None, program: list[str]) -> list[str]:
    run = [*program, "run", *CELL, "--out", str(out)]
    if launch is None:
        return [sys.executable, *run, "--jobs", "1"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--num_processes", "2"]
    settings = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return [*launcher, *settings, *run]


def start(out: Path, launch: list[str] | None, program: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    words = command(out, launch, program)
    return subprocess.Popen(
        words, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    )


def run(out: Path, launch: list[str] | None = None) -> Outcome:
    script = out / "watched.py"
    script.write_text(WATCHED)
    process = start(out, launch, [str(script)])
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert len(list(out.glob("parted-*"))) == (2 if launch else 1)
    return outcome(out)


def outcome(out: Path) -> Outcome:
    cells = {json.loads((c / "config.json").read_text())["method"] is None: c for c in (out / "cells").iterdir()}
    trained, evaluated = cells[False], cells[True]
    return Outcome(
        [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()],
        pd.read_parquet(trained / "episodes.parquet"),
        pd.read_parquet(evaluated / "episodes.parquet"),
        (trained / "skills.jsonl").read_text(),
        json.loads((trained / "manifest.json").read_text())["processes"],
        load_file(trained / "policy" / "model.safetensors"),
    )


def same(found: Outcome, expected: Outcome) -> None:
    """Same episodes and skills to the letter; losses within 1e-6."""
    pd.testing.assert_frame_equal(found.episodes, expected.episodes)
    pd.testing.assert_frame_equal(found.evaluated, expected.evaluated)
    assert found.skills == expected.skills
    assert [record["update"] for record in found.metrics] == [1, 2]
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        for name in [name for name in theirs if name.startswith("loss/")]:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
        # Clipped gradients hide their size from the weights, and so few steps hide much from both.
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        times = ("wall_seconds", "cpu_seconds")
        assert {k: v for k, v in ours["ledger"].items() if k not in times} == {
            k: v for k, v in theirs["ledger"].items() if k not in times
        }
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCH.values(), ids=LAUNCH)
def test_two_processes_equal_one(alone: Outcome, launch: list[str], tmp_path: Path) -> None:
    found = run(tmp_path, launch)
    assert found.processes == {"count": 2, "sharded": launch == LAUNCH["fsdp2"]}
    same(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("heir", [None, LAUNCH["fsdp2"]], ids=["by one", "by two"])
def test_two_killed_processes_are_continued(alone: Outcome, tmp_path: Path, heir: list[str] | None) -> None:
    """A checkpoint of shared-out weights and optimizer state is one of whole weights and state."""
    process = start(tmp_path, LAUNCH["fsdp2"], ["-m", "harness"])
    limit = time.monotonic() + 200
    while not list(tmp_path.glob("cells/*/checkpoints/1")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    same(run(tmp_path, heir), alone)


@pytest.mark.parametrize("setting", [{"WORLD_SIZE": "abc"}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "5"}])
def test_what_no_launcher_sets_is_refused(setting: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", **setting}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HarnessError, match="not those of accelerate launch"):
        current_world.__wrapped__()


def test_onlookers_write_nothing(tmp_path: Path) -> None:
    """Whatever a cell's directory offers is either told apart below or does nothing in processes but the first."""
    reads = {"finished", "read_json", "records", "latest_checkpoint", "require_whole"}
    first_process = {"checkpoint", "tidy"}  # which the others never call
    writes = {name for name in vars(CellDir) if not name.startswith("_")} - reads - first_process
    assert writes == {name for name in vars(Onlooker) if not name.startswith("_")}
    onlooker = directory_of(CellDir(tmp_path / "cell"), World(1, 2))
    with onlooker.lock():
        onlooker.write_json("config.json", {})
        onlooker.append("metrics.jsonl", {"update": 1})
        onlooker.rewrite("evals.jsonl", [])
        onlooker.rewind(None)
        onlooker.finish({})
    assert not (tmp_path / "cell").exists()


def test_shares_are_disjoint_and_come_to_the_whole() -> None:
    items = list(range(11))
    shares = [World(rank, 4).mine(items) for rank in range(4)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_with_shared_out_weights_make_equally_many_passes() -> None:
    parts = [[0], [1], [2]]
    dealt = [World(rank, 2, sharded=True).deal(parts) for rank in range(2)]
    assert dealt == [[([0], True), ([2], True)], [([1], True), ([0], False)]]
    assert World(1, 2).deal(parts) == [([1], True)]
