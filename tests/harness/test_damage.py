"""Damaged files, full disks, broken gradients: found, said, and nothing that was there before is lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_cells import everything, run_in_child, run_toy, toy_config, toy_episodes, toy_policy
from toy_envs import Doors, troubled

from harness.cards import Ledger
from harness.config import CellConfig, EnvConfig, EvalConfig, Stage1Config, TrainConfig
from harness.contracts import HarnessError, Panel
from harness.methods import get_method
from harness.pool import EnvPool
from harness.records import finished_cell
from harness.reporting.frames import read_cells
from harness.runner import attempt, load_play
from harness.seed import fine_tune
from harness.skipping import Skips, likely_cause
from harness.store import CellDir, cell_dir
from harness.trainer import Trainer

CHECKPOINT = "checkpoints/2"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    with EnvPool("toy_envs:Doors") as pool:
        yield pool


@pytest.fixture
def one_pool(pool: EnvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are run many times share their environments."""
    monkeypatch.setattr("harness.cell.EnvPool", lambda *args, **options: pool)
    monkeypatch.setattr(pool, "close", lambda: None)


def small(policy: Path, **train: Any) -> CellConfig:
    """SEED with as little of everything as there can be."""
    config = toy_config(policy, "seed", updates=1, tasks=1, detail=1, **train)
    assert config.stage1 is not None
    return config.model_copy(
        update={
            "stage1": config.stage1.model_copy(update={"tasks": 1, "attempts": 2, "epochs": 1}),
            "eval": config.eval.model_copy(update={"panel_size": 1}),
        }
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# --------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> CellDir:
    return run_toy(toy_config(policy, "seed"), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def halfway(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SEED cell that was killed in update 3, after checkpoints 1 and 2."""
    place = tmp_path_factory.mktemp("halfway") / "cell"
    assert run_in_child(toy_config(policy, "seed"), place, dies_at=("harness.training:Training.update", 3)) == -9
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damages", "outcome"),
    [
        ({f"{CHECKPOINT}/policy/model.safetensors": flip}, "going on from update 1"),
        ({f"{CHECKPOINT}/trainer.pt": lambda path: path.write_bytes(b"")}, "going on from update 1"),
        ({f"{CHECKPOINT}/progress.json": cut}, "going on from update 1"),
        ({f"{CHECKPOINT}/checksums.json": Path.unlink}, "going on from update 1"),
        ({f"{CHECKPOINT}": lambda path: path.rename(path.with_name("2.tmp"))}, ""),
        ({f"{CHECKPOINT}/trainer.pt": cut, "checkpoints/1/trainer.pt": flip}, "starting anew"),
        ({"start/model.safetensors": flip}, "starting anew"),
        ({"metrics.jsonl": lambda path: path.write_text(path.read_text().replace("\n", "\n{bad\n"))}, "from update 1"),
        ({"episodes.jsonl": lambda path: path.write_bytes(b"\0" + path.read_bytes())}, "starting anew"),
        ({"config.json": cut}, ""),
    ],
    ids=["flipped", "empty", "cut", "no checksums", "half made", "both", "start", "journal", "whole journal", "config"],
)
def test_damage_costs_time_and_no_bit(
    policy: Path,
    whole: CellDir,
    halfway: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damages: dict[str, Callable[[Path], object]],
    outcome: str,
) -> None:
    shutil.copytree(halfway, tmp_path / "cell")
    for name, damage in damages.items():
        damage(tmp_path / "cell" / name)
    with caplog.at_level(logging.WARNING):
        cell = run_toy(toy_config(policy, "seed"), tmp_path / "cell")
    expected, found = everything(whole), everything(cell)
    warnings = found.pop("warnings")
    for name, value in found.items():
        assert value == expected[name], name
    assert len(warnings) == len(expected["warnings"]) + (0 if not outcome else 2 if outcome.endswith("anew") else 1)
    for text in warnings:
        assert text in caplog.text
        assert "damaged" in text
        assert text.endswith(outcome)


def test_broken_lines_of_an_evaluation_are_played_again(policy: Path, tmp_path: Path) -> None:
    config = CellConfig(
        env=EnvConfig(id="toy_envs:Doors", max_prompt_tokens=128, max_response_tokens=4),
        policy=str(policy),
        eval=EvalConfig(panel_size=6, temperature=1.0, batch=2),
    )
    whole = run_toy(config, tmp_path / "whole")
    cell = CellDir(tmp_path / "cell")
    assert run_in_child(config, cell.path, dies_at=("harness.cell:Session._conclude", 1)) == -9
    lines = (cell.path / "episodes.jsonl").read_bytes().split(b"\n")
    (cell.path / "episodes.jsonl").write_bytes(b"\n".join([lines[0], b"\x00" * 40, lines[2][:50], *lines[3:]]))
    found = everything(run_toy(config, cell.path))
    warnings = found.pop("warnings")
    assert [text.partition(", ")[2] for text in warnings] == [
        f"line {number}: not JSON; its episode is played again" for number in (2, 3)
    ]
    assert found == {name: value for name, value in everything(whole).items() if name != "warnings"}


@pytest.mark.parametrize("name", ["evals.jsonl", "episodes.parquet"])
def test_a_report_names_the_damaged_cell_and_what_to_do(whole: CellDir, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole.path, tmp_path / "run" / "cells" / "abc")
    flip(tmp_path / "run" / "cells" / "abc" / name)
    with pytest.raises(HarnessError, match=rf"cells/abc/{name} is not as it was written; restore it, or delete .*abc"):
        read_cells(tmp_path / "run")
    assert finished_cell(tmp_path / "run" / "cells" / "abc")


# ----------------------------------------------------------------------------------------------------- full disks


class FullDisk:
    """Makes the n-th attempt to open a file for writing, to make a directory, to rename or to sync in a place fail."""

    def __init__(self) -> None:
        self.place: Path | None = None
        self.left = 0

    def strike(self, path: object) -> None:
        if self.place is not None and str(path).startswith(str(self.place)):
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")
        makes = event == "os.mkdir" and not os.path.exists(arguments[0])
        if self.place and (writes or makes or event == "os.rename"):
            self.strike(arguments[0])


DISK = FullDisk()
sys.addaudithook(DISK.hook)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        DISK.strike(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    yield DISK
    DISK.place = None


def saved(cell: Path) -> tuple[int, int]:
    """What a cell has that must not get lost: its newest checkpoint, whether it is finished."""
    updates = [int(path.name) for path in (cell / "checkpoints").glob("*") if path.name.isdigit()]
    return int((cell / "manifest.json").is_file()), max(updates, default=-1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_pool")
def test_a_full_disk_at_any_write_loses_nothing(policy: Path, tmp_path: Path, disk: FullDisk) -> None:
    """Every single write fails in turn: those up to the first checkpoint, from there to the second, and the last."""
    config = small(policy)
    expected = everything(run_toy(config, tmp_path / "whole"))
    place, strikes, before, at = tmp_path / "cell", 0, (0, -1), 0
    while True:
        at += 1
        disk.place, disk.left = place, at
        failure = attempt(load_play, config, CellDir(place), lambda progress: None)
        disk.place = None
        if failure is None:
            break
        strikes += 1
        assert failure.user_error, failure
        assert os.strerror(errno.ENOSPC) in failure.cause
        assert "\n" not in failure.cause
        assert saved(place) >= before
        if saved(place) > before:
            before, at = saved(place), 0
    found = everything(CellDir(place))
    for name, value in expected.items():
        assert found[name] == value, name
    assert strikes > 60
    print(f"{strikes} writes failed in turn")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own that can be made larger; sizes in KiB. Needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")

    def resize(size: int) -> Path:
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(place)], check=True)
        return place

    yield resize
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # weights are still mapped


@pytest.mark.slow
@pytest.mark.usefixtures("one_pool")
def test_a_disk_that_is_really_full(policy: Path, tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    """The disk grows by little until the cell is finished: what writes it is C++ and Rust too."""
    config = small(policy)
    expected = everything(run_toy(config, tmp_path / "whole"))
    causes = set()
    for size in range(16, 1 << 13, 48):
        place = small_disk(size) / "cell"
        failure = attempt(load_play, config, CellDir(place), lambda progress: None)
        if failure is None:
            break
        assert failure.user_error, failure
        assert "No space left on device" in failure.cause
        assert "[(" not in failure.cause
        causes.add(failure.cause)
    found = everything(CellDir(place))
    for name, value in expected.items():
        assert found[name] == value, name
    assert len(causes) > 3


@pytest.mark.slow
def test_a_report_on_a_full_disk_leaves_the_old_one(
    whole: CellDir, policy: Path, tmp_path: Path, disk: FullDisk
) -> None:
    from test_faults import report_files

    from harness.reporting.report import write_report

    run = tmp_path / "run"
    shutil.copytree(whole.path, cell_dir(run, toy_config(policy, "seed")).path)
    write_report(run)
    expected = report_files(run)
    for at in (1, 2, 5, 11, 23, 47):
        disk.place, disk.left = run, at
        with pytest.raises(HarnessError, match="No space left on device"):
            write_report(run)
        disk.place = None
        assert report_files(run) == expected
        assert not list(run.glob(".report-*"))


# -------------------------------------------------------------------------------------------- crashes and gradients


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_environments_that_crash_too_often_end_the_cell(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    panel = Doors.panel

    def broken(env: Doors, name: str, size: int | None = None) -> Panel:
        tasks = panel(env, name, size).tasks
        return Panel(name, tuple(troubled(task, "raise", 1) if name == "train" else task for task in tasks))

    monkeypatch.setattr(Doors, "panel", broken)
    config = toy_config(policy, "grpo", updates=1)
    config = config.model_copy(update={"env": config.env.model_copy(update={"max_env_errors": share})})
    failure = attempt(load_play, config, CellDir(tmp_path), lambda progress: None)
    if share == 1:
        assert failure is None
        return
    assert failure is not None
    assert failure.user_error
    assert "1 of 8 episodes have crashed in their environment, more than env.max_env_errors=0 allows" in failure.cause
    assert "RuntimeError: this door is stuck" in failure.cause
    assert 'raise RuntimeError("this door is' in (tmp_path / "error.txt").read_text()
    assert saved(tmp_path) == (0, 0)


def test_a_gradient_that_is_never_finite_ends_the_cell_with_its_likely_cause(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config(policy, "grpo", max_skipped=2, mini_batches=1)
    loss = Trainer._loss
    calls = 0

    def overflowing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(*arguments) * (float("nan") if calls > 1 else 1.0)

    monkeypatch.setattr(Trainer, "_loss", overflowing)
    with pytest.raises(
        HarnessError,
        match=r"update 3: 2 optimizer steps in a row \(train\.max_skipped\) had a gradient that is not finite or above "
        r"train\.exploding=1000, the last of norm nan; no row is at fault alone of \d+: "
        r"the learning rate 0\.001 is probably too high",
    ):
        run_toy(config, tmp_path)
    cell = CellDir(tmp_path)
    first, second = cell.records("metrics.jsonl")
    assert "skipped_steps" not in first
    assert second["skipped_steps"] == 1
    assert "loss/policy" not in second
    assert second["ledger"]["optimizer_steps"] == 1
    one, two = (
        (cell.path / "checkpoints" / number / "policy" / "model.safetensors").read_bytes() for number in ("1", "2")
    )
    assert one == two
    monkeypatch.setattr(Trainer, "_loss", loss)
    assert run_toy(config, tmp_path).finished


def test_only_steps_in_a_row_count() -> None:
    skips, bad = Skips(limit=2, exploding=10.0), torch.tensor(float("nan"))
    assert [skips.steps(norm, "here", str) for norm in (bad, torch.tensor(1.0), bad)] == [False, True, False]
    with pytest.raises(HarnessError, match="here: 2 optimizer steps in a row"):
        skips.steps(bad, "here", str)


def test_the_count_of_steps_left_out_survives_a_checkpoint() -> None:
    config = TrainConfig(updates=1, kl=0.0)
    one, other = (Trainer(toy_policy(), get_method("grpo"), config, seed=0) for _ in range(2))
    one.skips.in_a_row = 3
    other.load_state(one.state())
    assert other.skips.in_a_row == 3


def test_weights_that_are_not_finite_are_named() -> None:
    policy = toy_policy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    with torch.no_grad():
        next(policy.model.parameters()).view(-1)[0] = float("nan")
    assert likely_cause(optimizer).startswith("the weights themselves are not finite")


def test_fine_tuning_skips_and_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config, ledger = toy_policy(), Stage1Config(epochs=2, batch=2, learning_rate=1e-3), Ledger()
    samples = [(episode.steps[0].prompt, policy.answer_ids("left")) for episode in toy_episodes(4)]
    before = policy.fingerprint
    score = type(policy).score

    def broken(*arguments: Any, **options: Any) -> Any:
        scores = score(*arguments, **options)
        return replace(scores, logprobs=scores.logprobs * float("inf"))

    monkeypatch.setattr(type(policy), "score", broken)
    with pytest.raises(HarnessError, match="fine-tuning step 3 of 4: 3 optimizer steps in a row"):
        fine_tune(policy, samples, config, 0, TrainConfig(max_skipped=3), ledger, lambda done, total: None)
    fine_tune(policy, samples, config, 0, TrainConfig(max_skipped=5), ledger, lambda done, total: None)
    assert policy.fingerprint == before
    assert ledger.optimizer_steps == 0
