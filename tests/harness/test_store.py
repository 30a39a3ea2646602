"""The store survives kills, damage and full disks, and says in one line what is wrong."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas
import pytest

from harness.contracts import HarnessError
from harness.store import CellDir, check_writable, write_bytes


@pytest.fixture
def cell(tmp_path: Path) -> CellDir:
    place = CellDir(tmp_path / "cell")
    place.path.mkdir()
    return place


def save(cell: CellDir, update: int, text: str = "weights") -> None:
    with cell.checkpoint(update) as directory:
        (directory / "policy").mkdir()
        (directory / "policy" / "model").write_text(f"{text} {update}")
        (directory / "optimizer").write_text("moments")


def test_records_come_back_and_a_torn_last_line_is_left_out(cell: CellDir) -> None:
    cell.append("metrics.jsonl", {"update": 1, "text": "ü\n"}, {"update": 2})
    with (cell.path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "succ')
    assert cell.records("metrics.jsonl") == [{"update": 1, "text": "ü\n"}, {"update": 2}]
    assert cell.records("skills.jsonl") == []


def test_a_broken_line_is_named(cell: CellDir) -> None:
    (cell.path / "metrics.jsonl").write_text('{"update": 1}\n{"upd\n{"update": 3}\n')
    with pytest.raises(HarnessError, match=r"metrics\.jsonl, line 2: not JSON"):
        cell.records("metrics.jsonl")


def test_truncate_drops_what_came_after_the_checkpoint(cell: CellDir) -> None:
    cell.append("metrics.jsonl", *({"update": number} for number in range(1, 6)))
    with (cell.path / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    cell.truncate("metrics.jsonl", lambda record: record["update"] <= 3)
    cell.append("metrics.jsonl", {"update": 4})
    assert [record["update"] for record in cell.records("metrics.jsonl")] == [1, 2, 3, 4]


def test_the_last_two_checkpoints_are_kept(cell: CellDir) -> None:
    assert cell.latest_checkpoint() is None
    for update in (0, 2, 10):
        save(cell, update)
    latest = cell.latest_checkpoint()
    assert latest is not None
    assert latest.update == 10
    assert (latest.path / "policy" / "model").read_text() == "weights 10"
    assert sorted(entry.name for entry in (cell.path / "checkpoints").iterdir()) == ["10", "2"]


def test_an_interrupted_checkpoint_leaves_the_one_before(cell: CellDir) -> None:
    save(cell, 1)
    with suppress(KeyboardInterrupt), cell.checkpoint(2) as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    latest = cell.latest_checkpoint()
    assert latest is not None
    assert latest.update == 1
    save(cell, 2)
    assert not list((cell.path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "no checksums"])
def test_a_damaged_checkpoint_is_refused_with_what_to_do(cell: CellDir, damage: str) -> None:
    save(cell, 1)
    save(cell, 2)
    path = cell.path / "checkpoints" / "2"
    model = path / "policy" / "model"
    match damage:
        case "flip":
            model.write_text("WEIGHTS 2")
        case "cut":
            model.write_text("")
        case "remove":
            model.unlink()
        case "add":
            (path / "policy" / "stray").write_text("?")
        case "no checksums":
            (path / "checksums.json").unlink()
    with pytest.raises(
        HarnessError, match=r"checkpoints/2.* is (missing|damaged); delete .*/2 to resume from update 1"
    ):
        cell.latest_checkpoint()


def test_finish_keeps_weights_and_episodes_and_writes_the_manifest(cell: CellDir) -> None:
    cell.append("episodes.jsonl", {"task": "a", "success": True}, {"task": "b", "success": False, "error": "crash"})
    save(cell, 3)
    assert not cell.finished
    cell.finish({"status": "complete"})
    assert cell.finished
    assert cell.read_json("manifest.json") == {"status": "complete"}
    assert (cell.path / "policy" / "model").read_text() == "weights 3"
    assert not (cell.path / "checkpoints").exists()
    assert not (cell.path / "episodes.jsonl").exists()
    episodes = pandas.read_parquet(cell.path / "episodes.parquet")
    assert list(episodes["task"]) == ["a", "b"]
    assert episodes["error"][1] == "crash"


def test_finish_can_be_repeated_after_a_kill_before_the_manifest(cell: CellDir) -> None:
    cell.append("episodes.jsonl", {"task": "a"})
    save(cell, 3)
    with pytest.raises(TypeError):
        cell.finish({"status": object()})  # not JSON: stands for a kill just before the manifest
    assert not cell.finished
    assert cell.latest_checkpoint() is not None
    cell.finish({"status": "complete"})
    assert cell.finished


def test_a_cell_has_one_writer(cell: CellDir) -> None:
    code = f"from harness.store import CellDir; CellDir({str(cell.path)!r}).lock().__enter__()"
    with cell.lock():
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "HarnessError" in other.stderr
    assert "is in use by another process (pid " in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_is_one_line(cell: CellDir) -> None:
    (cell.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(HarnessError, match=r"cannot write .*: No space left on device"):
        cell.append("metrics.jsonl", {"update": 1})


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"cannot write .*file"):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(HarnessError, match=r"cannot write .*file"):
        write_bytes(tmp_path / "file" / "x.json", b"{}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(HarnessError, match=r"cannot write .*folder: it is a directory"):
        write_bytes(tmp_path / "folder", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    check_writable(tmp_path / "new" / "run")


def test_a_replaced_file_is_whole(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a.json", b"one")
    write_bytes(tmp_path / "a.json", b"two")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"two")]
