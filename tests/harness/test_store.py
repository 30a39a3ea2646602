"""The store survives kills, damage and full disks, and says in one line what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas
import pytest

from harness.claim import end_claim
from harness.contracts import HarnessError
from harness.store import CellDir, Checkpoint, check_writable, write_bytes


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


def latest(cell: CellDir) -> Checkpoint | None:
    """The newest checkpoint, where none is damaged."""
    damaged: list[str] = []
    found = cell.latest_checkpoint(damaged.append)
    assert damaged == []
    return found


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


def test_a_broken_line_is_told_and_left_out_where_that_helps(cell: CellDir) -> None:
    (cell.path / "episodes.jsonl").write_bytes(b'{"task": 1}\n{"tas\n\xff\xfe\x00\n{"task": 3}\n')
    broken: list[str] = []
    assert cell.records("episodes.jsonl", broken.append) == [{"task": 1}, {"task": 3}]
    assert [line.partition(", ")[2] for line in broken] == ["line 2: not JSON", "line 3: not JSON"]


def test_rewind_drops_what_came_after_the_checkpoint(cell: CellDir) -> None:
    for number in (1, 2):
        cell.append("metrics.jsonl", {"update": number})
        save(cell, number)
    cell.append("metrics.jsonl", {"update": 3})
    cell.append("skills.jsonl", {"update": 3})
    with (cell.path / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    cell.rewind(latest(cell))
    cell.append("metrics.jsonl", {"update": 3})
    assert [record["update"] for record in cell.records("metrics.jsonl")] == [1, 2, 3]
    assert cell.records("skills.jsonl") == []
    cell.rewind(None)
    assert not list(cell.path.glob("*.jsonl"))


def test_the_last_two_checkpoints_are_kept(cell: CellDir) -> None:
    assert latest(cell) is None
    for update in (0, 2, 10):
        save(cell, update)
    found = latest(cell)
    assert found is not None
    assert found.update == 10
    assert (found.path / "policy" / "model").read_text() == "weights 10"
    assert sorted(entry.name for entry in (cell.path / "checkpoints").iterdir()) == ["10", "2"]


def test_an_interrupted_checkpoint_leaves_the_one_before(cell: CellDir) -> None:
    save(cell, 1)
    with suppress(KeyboardInterrupt), cell.checkpoint(2) as directory:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt
    found = latest(cell)
    assert found is not None
    assert found.update == 1
    save(cell, 2)
    assert not list((cell.path / "checkpoints").glob("*.tmp"))


DAMAGES: dict[str, Callable[[CellDir], object]] = {
    "flipped bit": lambda cell: flip(cell.path / "checkpoints" / "2" / "policy" / "model"),
    "cut": lambda cell: (cell.path / "checkpoints" / "2" / "optimizer").write_bytes(b"mom"),
    "empty": lambda cell: (cell.path / "checkpoints" / "2" / "policy" / "model").write_bytes(b""),
    "file missing": lambda cell: (cell.path / "checkpoints" / "2" / "policy" / "model").unlink(),
    "file too many": lambda cell: (cell.path / "checkpoints" / "2" / "policy" / "stray").write_bytes(b"?"),
    "checksums missing": lambda cell: (cell.path / "checkpoints" / "2" / "checksums.json").unlink(),
    "checksums flipped": lambda cell: flip(cell.path / "checkpoints" / "2" / "checksums.json"),
    "checksums of another kind": lambda cell: (cell.path / "checkpoints" / "2" / "checksums.json").write_text("[1]"),
    "journal flipped": lambda cell: flip(cell.path / "metrics.jsonl", -3),
    "journal cut": lambda cell: os.truncate(cell.path / "metrics.jsonl", 20),
}


def flip(path: Path, at: int = 20) -> None:
    data = bytearray(path.read_bytes())
    data[min(at, len(data) - 1)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(cell: CellDir, damage: str) -> None:
    for number in (1, 2):
        cell.append("metrics.jsonl", {"update": number})
        save(cell, number)
    DAMAGES[damage](cell)
    damaged: list[str] = []
    found = cell.latest_checkpoint(damaged.append)
    assert found is not None
    assert found.update == 1
    assert len(damaged) == 1
    assert damaged[0].startswith("checkpoint 2 is damaged: ")
    with pytest.raises(HarnessError, match=r"checkpoint 2 is damaged: .*; run the same command again"):
        cell.finish({})
    cell.rewind(found)
    cell.append("metrics.jsonl", {"update": 2})
    save(cell, 2)
    assert latest(cell) is not None


def test_damage_to_what_all_checkpoints_build_on_leaves_none(cell: CellDir) -> None:
    (cell.path / "start").mkdir()
    (cell.path / "start" / "model").write_text("start of it all, as it was")
    save(cell, 1)
    save(cell, 2)
    flip(cell.path / "start" / "model")
    damaged: list[str] = []
    assert cell.latest_checkpoint(damaged.append) is None
    assert len(damaged) == 2
    save(cell, 0)  # the cell starts anew: damaged ones that are newer go
    assert [entry.name for entry in (cell.path / "checkpoints").iterdir()] == ["0"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes.parquet"])
def test_damage_to_a_finished_cell_is_named(cell: CellDir, name: str) -> None:
    cell.append("metrics.jsonl", {"update": 1, "success": 0.25})
    cell.append("episodes.jsonl", {"task": "a"})
    cell.finish({})
    manifest = cell.read_json("manifest.json")
    cell.require_whole(manifest)
    flip(cell.path / name)
    with pytest.raises(HarnessError, match=rf"{name} is not as it was written; restore it, or delete "):
        cell.require_whole(manifest)
    (cell.path / name).unlink()
    with pytest.raises(HarnessError, match=f"{name} is missing"):
        cell.require_whole(manifest)


def test_finish_keeps_weights_and_episodes_and_writes_the_manifest(cell: CellDir) -> None:
    cell.append("episodes.jsonl", {"task": "a", "success": True}, {"task": "b", "success": False, "error": "crash"})
    save(cell, 3)
    assert not cell.finished
    cell.finish({"status": "complete"})
    assert cell.finished
    manifest = cell.read_json("manifest.json")
    assert manifest["status"] == "complete"
    assert list(manifest["files"]) == ["episodes.parquet"]
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
    assert latest(cell) is not None
    cell.finish({"status": "complete"})
    assert cell.finished


def test_a_cell_has_one_writer(cell: CellDir) -> None:
    code = f"from harness.store import CellDir; CellDir({str(cell.path)!r}).lock().__enter__()"
    with cell.lock():
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "HarnessError" in other.stderr
    assert "is in use by another process (pid " in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_lost_writer_writes_no_more(cell: CellDir) -> None:
    """Two processes on two machines, as one directory has it: its locks are per process, so the first is a child."""
    code = (
        "import sys; from harness.store import CellDir; from harness.contracts import HarnessError\n"
        f"cell = CellDir({str(cell.path)!r})\n"
        "with cell.lock():\n"
        "    cell.append('metrics.jsonl', {'by': 'lost'}); print('held', flush=True); sys.stdin.readline()\n"
        "    writes = (lambda: cell.append('metrics.jsonl', {'by': 'lost'}), lambda: cell.finish({}),\n"
        "              lambda: cell.checkpoint(1).__enter__(), lambda: cell.write_json('config.json', {}))\n"
        "    for write in writes:\n"
        "        try: write()\n"
        "        except HarnessError as error: print(error)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lost:
        assert lost.stdout is not None
        assert lost.stdout.readline() == "held\n"
        with pytest.raises(HarnessError, match="in use by another process"), cell.lock():
            pass
        end_claim(cell.path)
        with cell.lock():
            cell.append("metrics.jsonl", {"by": "heir"})
            said = lost.communicate("go on\n")[0].splitlines()
            cell.append("metrics.jsonl", {"by": "heir"})
    assert said == [f"{cell.path} was taken from this process, which writes nothing more to it"] * 4
    assert [record["by"] for record in cell.records("metrics.jsonl")] == ["lost", "heir", "heir"]
    assert sorted(path.name for path in cell.path.iterdir()) == ["lock", "metrics.jsonl"]


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


def test_an_ended_claim_is_gone_even_without_an_heir(cell: CellDir) -> None:
    writes: list[Callable[[], None]] = [
        lambda: cell.append("metrics.jsonl", {}),
        lambda: cell.rewrite("metrics.jsonl", []),
        lambda: cell.rewind(None),
        lambda: cell.write_json("config.json", {}),
        lambda: cell.finish({}),
    ]
    with cell.lock():
        cell.append("metrics.jsonl", {"by": "lost"})
        end_claim(cell.path)
        for write in writes:
            with pytest.raises(HarnessError, match="was taken from this process"):
                write()
    assert cell.records("metrics.jsonl") == [{"by": "lost"}]


def test_a_claim_lost_while_a_checkpoint_is_filled_leaves_none(cell: CellDir) -> None:
    def write_late() -> None:
        with cell.checkpoint(1) as directory:
            (directory / "weights").write_text("late")
            end_claim(cell.path)

    with cell.lock(), pytest.raises(HarnessError, match="was taken"):
        write_late()
    assert not (cell.path / "checkpoints" / "1").exists()
