"""Evaluation without training: killed anywhere, it plays on with what is missing and ends with the same records."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from toy_cells import run_in_child, run_toy, toy_policy
from toy_envs import Doors, troubled

from harness import cell as cells
from harness.config import CellConfig, EnvConfig, EvalConfig
from harness.contracts import HarnessError, Panel
from harness.rollout import Job, rollout
from harness.store import CellDir


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a policy that samples."""
    place = tmp_path_factory.mktemp("policy")
    toy_policy().save(place)
    return str(place)


def config(policy: str) -> CellConfig:
    """Twelve episodes, three at a time."""
    return CellConfig(
        env=EnvConfig(id="toy_envs:Doors", max_prompt_tokens=128, max_response_tokens=4),
        policy=policy,
        seed=3,
        eval=EvalConfig(panel_size=6, episodes_per_task=2, temperature=1.0, batch=3),
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(task, attempt) of every episode that is played from now on in this process."""
    names: list[tuple[str, int]] = []

    def watched(policy: Any, env: Any, pool: Any, jobs: Sequence[Job], *rest: Any, **named: Any) -> Any:
        names.extend((job.task.id, job.attempt) for job in jobs)
        return rollout(policy, env, pool, jobs, *rest, **named)

    monkeypatch.setattr(cells, "rollout", watched)
    return names


def records(cell: CellDir) -> tuple[list[dict[str, Any]], pandas.DataFrame]:
    return cell.records("evals.jsonl"), pandas.read_parquet(cell.path / "episodes.parquet")


@pytest.mark.parametrize("kind", ["random", "toy"])
@pytest.mark.parametrize(
    "dies_at",
    [("harness.cell:Session.journal", 5), ("harness.store:CellDir.rewrite", 3), ("harness.store:CellDir.finish", 1)],
    ids=["while playing", "before the records", "before the manifest"],
)
def test_a_killed_evaluation_plays_only_what_is_missing(
    kind: str, dies_at: tuple[str, int], toy: str, tmp_path: Path, played: list[tuple[str, int]]
) -> None:
    setting = config(toy if kind == "toy" else kind)
    whole = run_toy(setting, tmp_path / "whole")
    everything = set(played)
    played.clear()
    assert run_in_child(setting, tmp_path / "cut", dies_at) == -signal.SIGKILL
    cut = CellDir(tmp_path / "cut")
    assert not cut.finished
    kept = {(record["task"], record["attempt"]) for record in cut.records("episodes.jsonl")}
    assert kept
    with (cut.path / "episodes.jsonl").open("a") as file:
        file.write('{"phase": "eval", "upd')  # as a kill in the middle of a write leaves it
    run_toy(setting, cut.path)
    assert sorted(played) == sorted(everything - kept)
    (evals, episodes), (expected_evals, expected_episodes) = records(cut), records(whole)
    assert evals == expected_evals
    pandas.testing.assert_frame_equal(episodes, expected_episodes)
    assert cut.read_json("manifest.json")["played"] == whole.read_json("manifest.json")["played"]


def test_what_crashed_or_changed_is_played_again(
    tmp_path: Path, played: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel: Callable[..., Panel] = Doors.panel

    def broken(self: Doors, name: str, size: int | None = None) -> Panel:
        tasks = list(panel(self, name, size).tasks)
        tasks[0] = troubled(tasks[0], "raise", 1)
        tasks[1] = panel(self, "train", 2).tasks[1]
        return Panel(name, tuple(tasks))

    setting = config("random")
    with monkeypatch.context() as patch:
        patch.setattr(Doors, "panel", broken)
        patch.setattr(CellDir, "finish", lambda self, manifest: None)
        cell = run_toy(setting, tmp_path / "cell")
    reasons = [record["stop_reason"] for record in cell.records("episodes.jsonl")]
    assert reasons[:2] == ["env_error"] * 2
    assert "env_error" not in reasons[2:]
    played.clear()
    run_toy(setting, cell.path)
    assert played == [(task.id, attempt) for task in Doors().panel("eval", 2) for attempt in range(2)]
    assert records(cell)[0] == records(run_toy(setting, tmp_path / "whole"))[0]


def test_an_evaluation_in_which_everything_crashed_is_an_error_and_is_played_again(
    tmp_path: Path, played: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    panel: Callable[..., Panel] = Doors.panel

    def broken(self: Doors, name: str, size: int | None = None) -> Panel:
        return Panel(name, tuple(troubled(task, "raise", 1) for task in panel(self, name, size)))

    setting = config("random")
    setting = setting.model_copy(update={"env": setting.env.model_copy(update={"max_env_errors": 1.0})})
    with monkeypatch.context() as patch:
        patch.setattr(Doors, "panel", broken)
        with pytest.raises(HarnessError, match=r"not one of 12 episodes could be played; the first: .*door is stuck"):
            run_toy(setting, tmp_path)
    assert not CellDir(tmp_path).finished
    played.clear()
    assert run_toy(setting, tmp_path).finished
    assert len(played) == 12


def test_scripted_policies_are_evaluated_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from harness.cli import main; "
        f"code = main('eval --policy random --env EZPoints-v1 --panel-size 2 --out {tmp_path}'.split()); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
