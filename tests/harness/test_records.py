"""Traces say what the policy was shown; credit keeps its column types; what is missing or broken is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from harness.contracts import Episode, HarnessError, Prompt, Response, Step, Task
from harness.records import (
    CREDIT_COLUMNS,
    PICTURES,
    finished_cell,
    read_credit,
    read_prompt,
    read_trace,
    trace,
)
from harness.store import CellDir

RED, BLUE = (np.full((4, 6, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))


def step(*images: np.ndarray) -> Step:
    prompt = Prompt("look: " + "<image>" * len(images), images)
    return Step({"text": "a \u2028 room", "images": images}, prompt, Response("<go>"), "go", True, 0.5)


def episode(*steps: Step) -> Episode:
    return Episode(Task("train/0", "E", "train", "k", {}, "f"), 0, "leave", list(steps))


def credit(**changes: object) -> dict[str, object]:
    record = {
        "update": 1,
        "task": "train/0",
        "attempt": 0,
        "step": 0,
        "ids": [3, 1],
        "tokens": ["go", ""],
        "logp": [-0.5, -1.0],
        "teacher": None,
        "gate": None,
        "advantage": None,
        "pull": [0.0, 0.0],
        "skill": "",
        "in_policy": False,
        "in_distill": False,
        "chosen": True,
    }
    return record | changes


def test_a_trace_holds_the_steps_and_only_in_detail_what_was_shown(tmp_path: Path) -> None:
    played = episode(step(RED, BLUE), step(RED))
    plain, detailed = read_trace(trace(played, None)), read_trace(trace(played, tmp_path / PICTURES))
    assert plain[0] == {
        "observation": "a \u2028 room",
        "response": "<go>",
        "action": "go",
        "valid": True,
        "reward": 0.5,
    }
    assert [set(after) - set(before) for before, after in zip(plain, detailed, strict=True)] == 2 * [
        {"prompt", "pictures"}
    ]
    assert detailed[0]["pictures"][0] == detailed[1]["pictures"][0] != detailed[0]["pictures"][1]
    assert len(list((tmp_path / PICTURES).iterdir())) == 2


def test_prompts_come_back_whole_and_the_files_do_not_change(tmp_path: Path) -> None:
    cell = CellDir(tmp_path)
    first = trace(episode(step(RED, BLUE)), tmp_path / PICTURES)
    files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / PICTURES).iterdir()}
    assert trace(episode(step(RED, BLUE)), tmp_path / PICTURES) == first
    assert files == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / PICTURES).iterdir()}
    prompt = read_prompt(read_trace(first)[0], cell)
    assert prompt.text == "look: <image><image>"
    assert all(map(np.array_equal, prompt.images, (RED, BLUE)))


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    record = read_trace(trace(episode(step(RED)), tmp_path / PICTURES))[0]
    (tmp_path / PICTURES / record["pictures"][0]).write_bytes(b"PNG?")
    with pytest.raises(HarnessError, match=rf"cannot read the picture .*{record['pictures'][0]}"):
        read_prompt(record, CellDir(tmp_path))


def test_credit_becomes_parquet_with_types_that_do_not_depend_on_the_method(tmp_path: Path) -> None:
    taught = credit(teacher=[-0.1, -1.0], gate=[0.9, 0.5], advantage=1.5, skill="Go.")
    schemas = []
    for name, record in (("without", credit()), ("with", taught)):
        cell = CellDir(tmp_path / name)
        cell.path.mkdir()
        cell.append("credit.jsonl", record)
        cell.finish({})
        schemas.append(pyarrow.parquet.read_schema(cell.path / "credit.parquet"))
        assert not (cell.path / "credit.jsonl").exists()
    assert schemas[0].equals(schemas[1])
    assert tuple(schemas[0].names) == CREDIT_COLUMNS
    bare, full = (read_credit(CellDir(tmp_path / name)).iloc[0] for name in ("without", "with"))
    assert bare["teacher"] is None
    assert np.isnan(bare["advantage"])
    assert list(full["teacher"]) == [-0.1, -1.0]
    assert full["skill"] == "Go."


def test_no_credit_is_an_empty_frame_and_a_broken_one_is_named(tmp_path: Path) -> None:
    cell = CellDir(tmp_path)
    assert read_credit(cell).empty
    assert set(read_credit(cell)) == set(CREDIT_COLUMNS)
    pyarrow.parquet.write_table(pyarrow.table({"update": [1]}), tmp_path / "credit.parquet")
    with pytest.raises(HarnessError, match=r"credit\.parquet has no column 'task'"):
        read_credit(cell)
    (tmp_path / "credit.parquet").write_bytes(b"PAR1")
    with pytest.raises(HarnessError, match=r"cannot read .*credit\.parquet"):
        read_credit(cell)


def test_a_cell_must_be_there_valid_and_finished(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no cell at"):
        finished_cell(tmp_path)
    (tmp_path / "config.json").write_text('{"env": {"id": "E", "histroy": 2}}')
    with pytest.raises(HarnessError, match=r"config\.json: env: unknown setting 'histroy'; did you mean 'history'"):
        finished_cell(tmp_path)
    (tmp_path / "config.json").write_text('{"env": {"id": "E"}}')
    with pytest.raises(HarnessError, match="not finished"):
        finished_cell(tmp_path)
