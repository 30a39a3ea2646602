"""A re-run equals a finished cell bit for bit; whatever was tampered with is found and named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from toy_cells import run_toy, toy_config, toy_policy

from harness.cell import run_cell
from harness.cli import main
from harness.config import CellConfig
from harness.contracts import HarnessError
from harness.recipes import expand, load_recipe
from harness.store import CellDir
from harness.verify import compare, difference, require_repeatable, verify


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[CellDir, CellDir]:
    """One SEED cell, run twice."""
    place = tmp_path_factory.mktemp("verify")
    toy_policy().save(place / "policy")
    config = toy_config(place / "policy", "seed", updates=1)
    return run_toy(config, place / "a"), run_toy(config, place / "b")


def differing(ours: CellDir, theirs: CellDir) -> dict[str, str]:
    return {part.name: part.difference for part in compare(ours, theirs) if part.difference}


def test_a_rerun_is_equal_in_every_part(twins: tuple[CellDir, CellDir]) -> None:
    parts = compare(*twins)
    assert {part.name: part.difference for part in parts} == dict.fromkeys(
        ["protocol", "evaluations", "updates", "skills", "episodes", "credit", "pictures", "weights"], ""
    )
    assert all(int(part.size.split()[0]) for part in parts)


def jsonl(name: str, change: Callable[[list[dict[str, Any]]], None]) -> Callable[[CellDir], None]:
    def tamper(cell: CellDir) -> None:
        records = cell.records(name)
        change(records)
        cell.rewrite(name, records)

    return tamper


def parquet(name: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[CellDir], None]:
    def tamper(cell: CellDir) -> None:
        change(pd.read_parquet(cell.path / name)).to_parquet(cell.path / name)

    return tamper


def one_bit(cell: CellDir) -> None:
    path = cell.path / "policy" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("tamper", "part", "message"),
    [
        (
            jsonl("evals.jsonl", lambda r: r[-1]["results"][1].update(score=0.5)),
            "evaluations",
            r"\.results\[1\]\.score: ",
        ),
        (
            jsonl("metrics.jsonl", lambda r: r[0].update(success=2.0)),
            "updates",
            r"^\[0\] \(update 1\)\.success: 2\.0 / ",
        ),
        (jsonl("metrics.jsonl", lambda r: r[0].pop("reward")), "updates", r"reward: only the re-run has it"),
        (jsonl("skills.jsonl", lambda r: r.pop()), "skills", r"^records: 19 / 20 entries$"),
        (jsonl("skills.jsonl", lambda r: r[3].update(raw="x" * 999)), "skills", r"raw: 'x{59}\.\.\. / "),
        (parquet("episodes.parquet", lambda f: f.iloc[::-1]), "episodes", r"\[0\] \(phase eval, "),
        (parquet("credit.parquet", lambda f: f.assign(advantage=0.0)), "credit", r"advantage: 0\.0 / "),
        (one_bit, "weights", r"^model\.safetensors: '"),
    ],
)
def test_what_was_tampered_with_is_named(
    twins: tuple[CellDir, CellDir], tmp_path: Path, tamper: Callable[[CellDir], None], part: str, message: str
) -> None:
    cell = CellDir(tmp_path / "cell")
    shutil.copytree(twins[0].path, cell.path)
    tamper(cell)
    found = differing(cell, twins[1])
    assert set(found) == {part}
    assert re.search(message, found[part]), found[part]


def test_clocks_are_not_compared_and_types_are() -> None:
    assert difference({"ledger": {"wall_seconds": 1.0}}, {"ledger": {"wall_seconds": 2.0}}) == ""
    assert difference([1], [1.0]) == "[0]: 1 / 1.0"
    assert difference({"a": [{"b": None}]}, {"a": [{"b": 0}]}) == "a[0].b: None / 0"
    assert difference({}, {"a": 1}) == "a: only the re-run has it"
    assert difference(float("nan"), float("nan")) == ""


def test_what_cannot_be_repeated_is_refused_before_anything_runs(tmp_path: Path) -> None:
    cell = CellDir(tmp_path)

    def refused(config: CellConfig, message: str) -> None:
        with pytest.raises(HarnessError, match=message):
            require_repeatable(cell, config)

    toy_policy().save(tmp_path / "policy")
    config = toy_config(tmp_path / "policy", "seed")
    require_repeatable(cell, config)
    refused(
        config.model_copy(update={"policy": "api:m@http://localhost/v1"}), "api:m@http://localhost/v1 is an endpoint"
    )
    stage1 = config.stage1.model_copy(update={"annotator": "m@http://localhost/v1"}) if config.stage1 else None
    refused(config.model_copy(update={"stage1": stage1}), ": m@http://localhost/v1 is an endpoint")
    refused(config.model_copy(update={"policy_fingerprint": "f" * 64}), "policy '.*' has changed since")
    refused(config.model_copy(update={"teacher": "no-such", "teacher_fingerprint": "f"}), "unknown policy 'no-such'")


@pytest.mark.slow  # a cell of the embedded policy, run twice, once in a process of its own
def test_the_command_verifies_a_real_cell_and_finds_a_forged_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "train.updates=1",
        "train.tasks=2",
        "train.group=2",
        "eval.panel_size=2",
        "stage1.tasks=2",
        "stage1.epochs=1",
    ]
    recipe = load_recipe("quick", ["envs=[EZPoints-v1]", "methods=[seed]", "seeds=[0]", "baselines=[]", *small])
    config = next(cell for cell in expand(recipe) if cell.method and cell.method.trains)
    cell = CellDir(tmp_path / "cell")
    run_cell(config, cell, lambda progress: None)
    forged = CellDir(tmp_path / "forged")
    shutil.copytree(cell.path, forged.path)
    jsonl("evals.jsonl", lambda records: records[0]["results"][0].update(steps=99))(forged)
    console = Console(highlight=False)
    assert verify([cell.path, forged.path], 1, console, Console(stderr=True, quiet=True)) == 1
    equal, different = capsys.readouterr().out.split(str(forged.path))
    assert equal.count("✓") == 8
    assert "✗" not in equal
    assert different.count("✗") == 1
    assert "✗ evaluations" in different
    assert "results[0].steps: 99 / " in different


def test_bad_input_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert f"no cell at {tmp_path}" in capsys.readouterr().err
