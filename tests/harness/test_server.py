"""A real pretrained model behind a real server: HARNESS_TEST_SERVER=DIR python -m pytest -m server.

DIR keeps the server's environment and the model (1 GB) for the next time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest

from harness import cli
from harness.store import CellDir

ROOT = Path(__file__).resolve().parents[2]
STEPS, TOKENS = 2, 24


@pytest.fixture(scope="module")
def policy() -> Iterator[str]:
    """SmolLM2, as ``harness eval`` names it, on a free port of this machine."""
    directory = Path(os.environ["HARNESS_TEST_SERVER"]).resolve()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, ROOT / "scripts" / "serve_smollm2.py", "--directory", directory, "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            while not healthy(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, "the server ended"
                time.sleep(1)
            yield f"api:{directory / 'model'}@http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.server
@pytest.mark.skipif("HARNESS_TEST_SERVER" not in os.environ, reason="set HARNESS_TEST_SERVER to a directory")
def test_a_real_model_plays(policy: str, tmp_path: Path) -> None:
    limits = ["--panel-size", "2", "--max-steps", str(STEPS), "--max-response-tokens", str(TOKENS)]
    assert cli.main(["eval", "--policy", policy, "--env", "ALFWorld-v1", *limits, "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "cells").iterdir()
    played = CellDir(path).read_json("manifest.json")["played"]
    assert (played["episodes"], played["env_steps"]) == (2, 2 * STEPS)
    assert played["prompt_tokens"] > 100 * 2 * STEPS
    assert 2 * STEPS <= played["sampled_tokens"] <= 2 * STEPS * TOKENS
    episodes = pandas.read_parquet(path / "episodes.parquet")
    assert set(episodes["stop_reason"]) == {"max_steps"}
    assert list(episodes["error"]) == ["", ""]
