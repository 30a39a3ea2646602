"""scripts/gpu_check.sh runs with toy models on a CPU, and measures what estimates read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.config import CellConfig, EnvConfig
from harness.estimate import ASSUMED
from harness.measured import gpu_check, speed_of
from harness.policy.sizes import KNOWN

ROOT = Path(__file__).resolve().parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu-check-tiny.json"
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", ROOT / "scripts" / "gpu_check.sh", "--size", "tiny", "--out", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [model["name"] for model in report["models"]] == ["Qwen3-0.6B", "Qwen2.5-VL-3B"]
    assert report["incomplete"] == []
    for model in report["models"]:
        assert model["skipped"] == []
        assert set(model["update_tokens_per_second"]) == {"all weights", "adapters"}
        assert 0 <= model["rounding"]["batch, float32"] < 1e-4
        assert 0 < model["rounding"]["bfloat16, mean"] < 0.1
        shares, peak = model["share_of_peak"], report["peak_flops"] / model["parameters"]
        assert all(0 < share < 1 for share in shares.values())
        assert shares["training"] == pytest.approx(6 * model["update_tokens_per_second"]["all weights"] / peak)
        assert shares["scoring"] == pytest.approx(2 * model["scoring_tokens_per_second"] / peak)
    assert "| scored tokens/s |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(("gap", "code"), [(1e-4, 0), (1e-2, 1)])
def test_what_is_wrong_or_missing_is_told(
    gap: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = script(), tmp_path / "check.json"

    def check(name: str, bench: Any, peak: float) -> Any:
        kinds = ("sampling", "scoring", "training") if name == "Qwen3-0.6B" else ("sampling",)
        return module.Result(name, share_of_peak=dict.fromkeys(kinds, 0.1), rounding={"batch, float32": gap})

    monkeypatch.setattr(module, "check", check)
    monkeypatch.setattr(module, "matrix_peak", lambda bench: 1e12)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--size", "tiny", "--out", str(out)])
    assert module.main() == code
    report = json.loads(out.read_text())
    told = [[model["name"] for model in report[part]] for part in ("models", "incomplete")]
    assert told == [["Qwen3-0.6B"], ["Qwen2.5-VL-3B"]]


def test_estimates_read_it(tmp_path: Path) -> None:
    shares = {"sampling": 0.1, "scoring": 0.2, "training": 0.3}
    model = {"name": "Qwen3-0.6B", "parameters": 6e8, "share_of_peak": shares}
    check = {"device": "some GPU", "peak_flops": 1e15, "memory_bytes": 1e11, "models": [model]}
    (tmp_path / "check.json").write_text(json.dumps(check))
    cell, size = CellConfig(env=EnvConfig(id="EZPoints-v1")), KNOWN["Qwen/Qwen2.5-VL-3B-Instruct"]
    speed = speed_of(cell, size, gpu_check(tmp_path / "check.json"))
    assert (speed.name, speed.sampling, speed.training) == ("some GPU", 0.1, 0.3)
    assert speed_of(cell, size, gpu_check(tmp_path / "none.json")) == ASSUMED


def test_models_have_the_sizes_they_are_named_after() -> None:
    """On the meta device, which takes no memory."""
    module = script()
    bench = module.Bench("full", torch.device("meta"), 1.0)
    for name, known in (("Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("Qwen2.5-VL-3B", "Qwen/Qwen2.5-VL-3B-Instruct")):
        assert module.build(name, bench).parameters == KNOWN[known].parameters
