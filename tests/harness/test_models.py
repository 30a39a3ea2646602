"""The embedded policies as shipped, and the main job end to end with them, on tiny budgets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.policy.load import MODELS, load_local
from harness.policy.measure import measure

POLICIES = ("tiny", "tiny-teacher")
RANDOM = {"EZPoints-v1": 0.002, "Sokoban-v1": 0.225, "ALFWorld-v1": 0.005, "WebShop-v1": 0.005, "SearchQA-v1": 0.044}
"""Success of the random policy on the eval panels, from the environments' pages."""


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policy_is_what_its_manifest_says_and_small(name: str) -> None:
    policy = load_local(name)
    manifest = json.loads((MODELS / name / "manifest.json").read_text())
    assert policy.fingerprint == manifest["fingerprint"]
    assert policy.parameters == manifest["parameters"] < 1_000_000
    assert sum(path.stat().st_size for path in (MODELS / name).iterdir()) < 8 * 2**20
    assert policy.prompt_style == "compact"
    assert (MODELS / name / "README.md").is_file()


def test_both_share_one_vocabulary() -> None:
    student, teacher = (load_local(name) for name in POLICIES)
    assert student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "history", "steps", "skilled", "valid"),
    [
        ("EZPoints-v1", 0, 8, 0.75, 0.95),
        ("Sokoban-v1", 0, 15, 0.75, 0.95),
        ("ALFWorld-v1", 2, 20, 0.75, 0.95),
        ("WebShop-v1", 2, 15, 0.4, 0.55),  # often misspells the codes of products
        ("SearchQA-v1", 4, 4, 0.4, 0.9),
    ],
)
def test_tiny_is_able_but_unwise(env: str, history: int, steps: int, skilled: float, valid: float) -> None:
    """Well above random, well below the expert, obedient to a good skill; one checkpoint for all environments."""
    ability = measure(load_local("tiny"), env, {}, 64, history, steps)
    assert RANDOM[env] + 0.1 < ability.plain < 0.75
    assert ability.skilled > ability.plain + 0.15
    assert ability.skilled > skilled
    assert ability.valid > valid


@pytest.mark.slow
def test_main_job_end_to_end_then_nothing_is_left_to_run(tmp_path: Path) -> None:
    overrides = [
        "envs=[EZPoints-v1]",
        "seeds=[0]",
        "train.updates=2",
        "train.tasks=2",
        "train.group=4",
        "train.panel_size=16",
        "stage1.tasks=4",
        "eval.panel_size=8",
    ]
    command = [sys.executable, "-m", "harness.cli", "run", "quick", *overrides, "--out", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("grpo", "seed", "opd-teacher", "oracle"):
        assert name in first.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<script" in page
    assert 'src="http' not in page
    assert 'href="http' not in page
    cells = sorted((tmp_path / "cells").iterdir())
    assert len(cells) == 6
    before = {cell.name: (cell / "manifest.json").stat().st_mtime_ns for cell in cells}
    subprocess.run(command, capture_output=True, text=True, check=True)
    assert {cell.name: (cell / "manifest.json").stat().st_mtime_ns for cell in cells} == before
    seed = next(cell for cell in cells if json.loads((cell / "config.json").read_text())["stage1"])
    updates = [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()]
    assert [update["update"] for update in updates] == [1, 2]
    assert updates[-1]["ledger"]["analyzer_tokens"] > 0
    skills = [json.loads(line) for line in (seed / "skills.jsonl").read_text().splitlines()]
    assert {skill["author"] for skill in skills} == {"scripted", "policy"}
