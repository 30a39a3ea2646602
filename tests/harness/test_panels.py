"""Panels of every registered environment are the same everywhere, and no task is in two of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from harness.check import Subject
from harness.cli import main
from harness.contracts import Panel
from harness.registry import ENVS, make_env, registered
from harness.store import CellDir

IDS = sorted(registered(ENVS))
Subjects = list[tuple[str, dict[str, Any], tuple[str, ...]]]
"""Environment id, options, names of panels."""


def panels(env_id: str, options: Mapping[str, Any], names: Sequence[str], size: int) -> list[Panel]:
    """The start of some panels, or all of one that is smaller."""
    return [Subject(env_id, options, size).panel(name) for name in names]


def names(env_id: str) -> tuple[str, ...]:
    """Of an environment's panels, as it is by default."""
    with closing(make_env(env_id)) as env:
        return env.card.panels


def hashes(subjects: Subjects) -> list[list[str]]:
    """Of the first tasks, by subject and panel."""
    return [[panel.hash for panel in panels(*subject, size=64)] for subject in subjects]


# ------------------------------------------------------------------------------------------------ in another process


class Shuffled:
    """What ``os.scandir`` returns, in another order."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self.entries = list(entries)
        random.Random(len(self.entries)).shuffle(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __enter__(self) -> Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def shuffle_listings() -> None:
    """Directories list their content in another order from now on; glob, walk and iterdir build on these two."""
    scan = os.scandir
    os.scandir = lambda path=".": Shuffled(scan(path))  # type: ignore[assignment]
    os.listdir = lambda path=".": [entry.name for entry in os.scandir(path)]  # type: ignore[assignment]


def child(call: str, *arguments: Any, seed: int = 0, shuffled: bool = True) -> Any:
    """What a function of this module returns in a new process, by way of JSON."""
    code = "import json, sys, test_panels as t; shuffled, arguments = json.loads(sys.argv[1]);"
    code += f"shuffled and t.shuffle_listings(); print(json.dumps(t.{call}(*arguments)))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([shuffled, arguments])],
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listings(directory: str) -> list[list[str]]:
    """A directory's content in the order of three ways to list it."""
    ways = (Path(directory).iterdir(), Path(directory).glob("*"), map(Path, os.listdir(directory)))
    return [[path.name for path in way] for way in ways]


def test_listings_are_shuffled(tmp_path: Path) -> None:
    """The stand-in does what the tests below rely on."""
    for number in range(20):
        (tmp_path / f"{number:02d}").touch()
    for here, there in zip(listings(str(tmp_path)), child("listings", str(tmp_path)), strict=True):
        assert there not in (here, sorted(here))
        assert sorted(there) == sorted(here)


def test_neither_hash_seeds_nor_listings_change_a_panel() -> None:
    subjects = [(env_id, {}, names(env_id)) for env_id in IDS]
    assert child("hashes", subjects, seed=1, shuffled=False) == child("hashes", subjects, seed=2) == hashes(subjects)


def test_listings_change_no_panel_of_official_games(alfworld_data: Path) -> None:
    subjects = [("ALFWorld-v1", {"data": str(alfworld_data)}, ("train", "valid_seen"))]
    assert child("hashes", subjects) == hashes(subjects)


def test_listings_change_no_panel_of_question_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for source in ("nq", "popqa", "hotpotqa"):
            records = (
                {"id": f"{n}", "data_source": source, "question": f"{split} {source} {n}?", "golden_answers": ["yes"]}
                for n in range(9)
            )
            (tmp_path / f"{split}-{source}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "\\"Title\\"\\nText."}\n')
    options = {"data": str(tmp_path), "retriever": str(tmp_path / "corpus.jsonl")}
    subjects = [("SearchQA-v1", options, ("train", "eval"))]
    assert child("hashes", subjects) == hashes(subjects)


# ------------------------------------------------------------------------------------------------------- in this one


@pytest.mark.parametrize("env_id", IDS)
def test_no_task_is_in_two_panels(env_id: str) -> None:
    found = panels(env_id, {}, names(env_id), 512)
    assert {"train", "eval"} <= {panel.name for panel in found}
    for one, other in combinations(found, 2):
        assert not {t.fingerprint for t in one} & {t.fingerprint for t in other}, (one.name, other.name)
        assert not {t.id for t in one} & {t.id for t in other}, (one.name, other.name)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_workers_change_neither_panel_nor_score(env_id: str, tmp_path: Path) -> None:
    def outcome(workers: int) -> tuple[Any, Any]:
        out = tmp_path / str(workers)
        arguments = ["--panel-size", "8", "--episodes-per-task", "2", "--max-steps", "4", "--workers", str(workers)]
        assert main(["eval", "--policy", "random", "--env", env_id, *arguments, "--out", str(out)]) == 0
        (path,) = (out / "cells").iterdir()
        cell = CellDir(path)
        return cell.read_json("manifest.json")["panel"], cell.records("evals.jsonl")[-1]["results"]

    assert outcome(1) == outcome(4)
