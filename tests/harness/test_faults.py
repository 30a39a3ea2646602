"""Runs that are killed at random instants, again and again: what they end with is what an undisturbed run ends with."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from faults import NAMES, Aim, Shared, run
from toy_cells import everything, toy_config

from harness.config import CellConfig, EnvConfig, EvalConfig
from harness.store import CellDir, cell_dir

SEED = int(os.environ.get("HARNESS_TEST_SEED", "0"))
KILLS = 50
LEAST = 3
"""So often every phase is hit."""


def report_files(directory: Path) -> dict[str, bytes]:
    """All files of a report."""
    places = [directory / "report.html", *(directory / name for name in ("report", "tables", "figures"))]
    found = [path for place in places for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def without_clocks(files: dict[str, bytes]) -> dict[str, bytes]:
    """The names of a report's files, and the contents of those in which no clock's numbers are."""
    steady = ("tables/comparison.", "tables/differences.", "tables/kinds", "figures/final.", "report/data")
    return {name: data if name.startswith(steady) else b"" for name, data in files.items()}


@pytest.mark.slow
def test_fifty_kills_at_random_instants_change_no_bit(policy: Path, tmp_path: Path) -> None:
    config = toy_config(policy, "seed", mini_batches=2, updates=2)
    assert config.stage1 is not None
    config = config.model_copy(update={"stage1": config.stage1.model_copy(update={"tasks": 2, "epochs": 4})})
    rng, shared = random.Random(SEED), Shared()
    print(f"HARNESS_TEST_SEED={SEED}")
    whole = tmp_path / "whole" / "run"
    assert run(config, whole, shared) == (0, set())
    expected = everything(cell_dir(whole, config)), without_clocks(report_files(whole))
    hits: Counter[str] = Counter()
    kills = chains = 0
    while kills < KILLS or min(hits[name] for name in NAMES) < LEAST:
        chains += 1
        assert chains < 4 * KILLS, f"some phase is not reached: {hits}"
        place = tmp_path / "killed" / "run"
        planned = _some_kills(rng)
        reports = any(kill.phase == "report" for kill in planned)
        for kill in planned:
            code, inside = run(config, place, shared, kill, reports)
            if code == 0:
                break
            assert code == -9, f"{kill}: exit code {code}"
            kills += 1
            hits.update(inside)
        assert run(config, place, shared, None, reports) == (0, set())
        found = everything(cell_dir(place, config))
        for name, value in expected[0].items():
            assert found[name] == value, name
        if reports:
            assert without_clocks(report_files(place)) == expected[1]
        shutil.rmtree(place.parent)
    print(f"{kills} kills in {chains} runs: {dict(hits)}")


def _some_kills(rng: random.Random) -> list[Aim]:
    """Kills of one run: at each phase in turn, and before it at any time of the whole cell; sometimes at the report.

    Shares stay low, for they are of the slowest time that a phase took: a later kill may find the run finished.
    """
    kills: list[Aim] = []
    for name in NAMES[:-2]:
        kills += [Aim("cell", rng.uniform(0.1, 0.5)) for _ in range(rng.randint(0, 1))]
        kills.append(Aim(name, rng.uniform(0, 0.5)))
    return [*kills, *(Aim("report", rng.uniform(0, 0.5)) for _ in range(3 * (rng.random() < 0.4)))]


@pytest.mark.slow
def test_an_evaluation_that_is_killed_keeps_what_was_played(policy: Path, tmp_path: Path) -> None:
    config = CellConfig(
        env=EnvConfig(id="toy_envs:Doors", max_prompt_tokens=128, max_response_tokens=4),
        policy=str(policy),
        seed=5,
        eval=EvalConfig(panel_size=16, episodes_per_task=6, temperature=1.0, batch=3),
    )
    rng, shared = random.Random(SEED), Shared()
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    assert run(config, whole, shared, report=False) == (0, set())
    kept = 0
    for _ in range(8):
        code, _ = run(config, killed, shared, Aim("cell", rng.uniform(0.4, 1.0)), report=False)
        if code == 0:
            break
        journal = cell_dir(killed, config).path / "episodes.jsonl"
        played = journal.read_bytes().count(b"\n") if journal.is_file() else 0
        assert played >= kept or cell_dir(killed, config).finished
        kept = played
    assert run(config, killed, shared, report=False) == (0, set())
    expected, found = everything(cell_dir(whole, config)), everything(cell_dir(killed, config))
    for name, value in expected.items():
        assert found[name] == value, name


@pytest.mark.slow
def test_a_report_that_is_killed_is_written_again(policy: Path, tmp_path: Path) -> None:
    """The same cells give the same bytes, whatever a kill left of the report before."""
    config, shared, rng = toy_config(policy, "grpo", updates=1), Shared(), random.Random(SEED)
    assert run(config, tmp_path / "run", shared) == (0, set())
    expected = report_files(tmp_path / "run")
    for share in (0.2, 0.6, 0.9, 0.98, 1.0):
        (tmp_path / "run" / "report.html").unlink()
        run(config, tmp_path / "run", shared, Aim("report", share * rng.uniform(0.9, 1.0)))
        assert run(config, tmp_path / "run", shared) == (0, set())
        assert report_files(tmp_path / "run") == expected


def in_group(group: int) -> bool:
    """Whether a process of this group lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_end_goes_on_where_it_stopped(
    policy: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    recipe = {
        "name": "toy",
        "policy": str(policy),
        "methods": ["grpo"],
        "envs": [{"env": {"id": "toy_envs:Doors", "max_prompt_tokens": 128, "max_response_tokens": 4}}],
        "train": {"updates": 12, "tasks": 2, "group": 4, "panel_size": 3, "checkpoint_every": 2},
        "eval": {"panel_size": 4, "every": 50},
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(recipe))
    # A background job of a shell ignores SIGINT, and so would all its children.
    start = "import signal, sys; signal.signal(2, signal.default_int_handler); from harness.cli import main; "
    command = [sys.executable, "-c", f"{start}sys.exit(main())", "run", str(tmp_path / "toy.yaml"), "--out", "out"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, "text": True}
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, **options) as child:  # type: ignore[call-overload]
        while not list(tmp_path.glob("out/cells/*/checkpoints/4")):
            assert child.poll() is None
            time.sleep(0.05)
        os.killpg(child.pid, sent)  # as a terminal and as Slurm do
        errors = child.stderr.read()
    assert child.returncode == code, errors
    assert errors.strip() == "harness: interrupted; the same command continues where this one stopped"
    deadline = time.monotonic() + 10
    while in_group(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not in_group(child.pid)
    (place,) = (path.parent for path in tmp_path.glob("out/cells/*/checkpoints"))
    assert not CellDir(place).finished
    done = subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert len(CellDir(place).records("metrics.jsonl")) == 12
