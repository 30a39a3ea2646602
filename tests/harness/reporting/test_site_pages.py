"""Data and markup of the episode and skills pages: complete, light at the start, and inert whatever a model wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_run import METHODS, write_cell

from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.records import CREDIT_COLUMNS, PICTURES
from harness.reporting.frames import Cell, read_cells, skills_of
from harness.reporting.site import script_json
from harness.reporting.site_episodes import (
    MOST_CHARACTERS,
    MOST_EPISODES,
    Told,
    episode_chunks,
    episode_index,
    read_told,
    scales,
    write_episode_pages,
)
from harness.reporting.site_skills import answer_chunks, counts, skill_index, write_skill_page
from harness.store import write_json

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {{ 7*7 }} \u2028 \x1b[31m"


def trained(directory: Path, method: str = "seed", skill: str = HOSTILE) -> Cell:
    config = CellConfig(env=EnvConfig(id="Sokoban-v1"), method=METHODS[method], train=TrainConfig(updates=40))
    write_cell(directory, config, {0: 0.2, 40: 0.6}, 12, skill)
    return read_cells(directory)[0][0]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(cell: Cell) -> Path:
    """The run's directory, with the pages of its cell."""
    directory = cell.store.path.parents[1]
    assert write_episode_pages(cell, directory) == f"report/episodes/{cell.id}.html"
    assert write_skill_page(cell, directory) == f"report/skills/{cell.id}.html"
    return directory


def data(run: Path, name: str) -> Any:
    """What a data file hands to the page."""
    text = (run / "report" / "data" / f"{name}.js").read_text()
    received, value = json.loads("[" + text.removeprefix("harness.receive(").removesuffix(");\n") + "]")
    assert received == name
    return value


def episode(number: int, said: str = "go", **other: Any) -> dict[str, Any]:
    step = {"observation": f"room {number}", "response": said, "action": "go", "valid": True, "reward": 0.5}
    return {
        "phase": "train",
        "update": 1 + number // 100,
        "task": f"train/{number % 100:06d}",
        "kind": "pick",
        "attempt": 0,
        "success": number % 2 == 0,
        "score": 0.0,
        "reward": 1.0,
        "steps": 2,
        "stop_reason": "success",
        "task_text": "put a mug in desk.",
        "error": "",
        "trace": json.dumps([step, {**step, "response": f"{said} {number}"}]),
        **other,
    }


def told(episodes: list[dict[str, Any]], credit: list[dict[str, Any]] | None = None) -> Told:
    return Told(
        pd.DataFrame(episodes), pd.DataFrame(credit or [], columns=list(CREDIT_COLUMNS)), pd.DataFrame(), len(episodes)
    )


def row(number: int, step: int = 0, **other: Any) -> dict[str, Any]:
    """Credit of one step of the episode of the same number."""
    return {
        "update": 1 + number // 100,
        "task": f"train/{number % 100:06d}",
        "attempt": 0,
        "step": step,
        "ids": [5, 6],
        "tokens": ["go", ""],
        "logp": [-0.5, -1.0],
        "teacher": [-0.25, -2.0],
        "gate": [0.7, 0.1],
        "advantage": 1.5,
        "pull": [1.6, 1.5],
        "skill": "Go.",
        "in_policy": True,
        "in_distill": True,
        "chosen": step == 0,
        **other,
    }


# ---------------------------------------------------------------------------------------------------- chunks


def test_chunks_hold_every_episode_once_and_stay_small() -> None:
    long = "word " * 4000
    recorded = told([episode(n, long if n % 7 == 0 else "go") for n in range(2000)])
    chunks = list(episode_chunks(recorded))
    assert [start for start, _ in chunks] == np.cumsum([0, *(len(c["episodes"]) for _, c in chunks)])[:-1].tolist()
    said = [chunk["texts"][e["response"][1]] for _, chunk in chunks for e in chunk["episodes"]]
    assert said == [f"{long if n % 7 == 0 else 'go'} {n}" for n in range(2000)]
    assert max(len(chunk["episodes"]) for _, chunk in chunks) == MOST_EPISODES
    assert max(len(script_json(chunk)) for _, chunk in chunks) < 1.2 * MOST_CHARACTERS
    assert len(script_json(episode_index(recorded))) < 100_000


def test_a_text_that_repeats_is_stored_once() -> None:
    ((_, chunk),) = episode_chunks(told([episode(n) for n in range(10)]))
    assert chunk["texts"].count("put a mug in desk.") == 1
    assert len(set(chunk["texts"])) == len(chunk["texts"])


def test_many_tokens_close_a_chunk_too() -> None:
    tokens = [f"t{n}" for n in range(3000)]
    per_token = dict.fromkeys(("logp", "teacher", "gate", "pull"), [-0.12345] * 3000)
    credit = [row(n, ids=list(range(3000)), tokens=tokens, **per_token) for n in range(10)]
    chunks = [chunk for _, chunk in episode_chunks(told([episode(n) for n in range(10)], credit))]
    assert len(chunks) > 2
    assert max(len(script_json(chunk)) for chunk in chunks) < 2 * MOST_CHARACTERS


# --------------------------------------------------------------------------------------------------- credit


def test_credit_reaches_its_episode() -> None:
    recorded = told([episode(0), episode(1)], [row(1), row(1, step=1, teacher=None, gate=None, skill="")])
    index = episode_index(recorded)
    assert index["credit"] == [0, 1]
    assert index["shift"] == [None, -0.75]
    ((_, chunk),) = episode_chunks(recorded)
    assert "credit" not in chunk["episodes"][0]
    first, second = chunk["episodes"][1]["credit"]
    assert [chunk["texts"][code] for code in first["tokens"]] == ["go", ""]
    assert (first["teacher"], first["advantage"], first["chosen"]) == ([-0.25, -2], 1.5, True)
    assert (second["teacher"], second["gate"], second["skill"], second["chosen"]) == (None, None, None, False)
    assert [chunk["texts"][code] for code in chunk["episodes"][1]["read"]] == ["Go."]


def test_colours_end_at_round_numbers() -> None:
    found = scales(told([], [row(n) for n in range(4)]).credit)
    assert found == {"shift": [-1, 0, 1], "gate": [0, 0.5, 1], "advantage": [-2, 0, 2], "pull": [-2, 0, 2]}
    plain = scales(told([], [row(0, teacher=None, gate=None)]).credit)
    assert (plain["shift"], plain["gate"], plain["advantage"]) == (None, None, [-2, 0, 2])


# ------------------------------------------------------------------------------------------------- whole cell


def test_the_index_says_how_episodes_ended(cell: Cell) -> None:
    recorded = read_told(cell)
    index = episode_index(recorded)
    outcome = np.array(index["outcome"]["values"])[index["outcome"]["codes"]]
    assert (outcome == "success").tolist() == recorded.episodes["success"].tolist()
    crashed = told([episode(1, stop_reason="env_error"), episode(3, stop_reason="max_steps")])
    assert episode_index(crashed)["outcome"]["values"] == ["crash", "failure"]


def test_skills_and_their_episodes_find_each_other(cell: Cell) -> None:
    recorded = read_told(cell)
    index, skills = episode_index(recorded), skills_of([cell])
    for number, written in enumerate(index["skill"]):
        if written is not None:
            about, skill = recorded.episodes.iloc[number], skills.iloc[written]
            names = ["update", "task", "attempt"]
            assert about[names].tolist() == skill[names].tolist()
    assert sum(written is not None for written in index["skill"]) == len(skills)


def test_evaluations_with_skills_in_the_prompt_have_a_phase_of_their_own(tmp_path: Path) -> None:
    both = METHODS["grpo"].model_copy(update={"evaluation": ("plain", "library")})
    config = CellConfig(env=EnvConfig(id="Sokoban-v1"), method=both, library="tiny", train=TrainConfig(updates=5))
    write_cell(tmp_path, config, {0: 0.2, 5: 0.6}, 12)
    phases = read_told(read_cells(tmp_path)[0][0]).episodes["phase"]
    assert (phases == "eval").sum() == (phases == "eval*").sum() == 12


def test_what_a_model_wrote_survives_as_data_and_closes_nothing(cell: Cell, run: Path) -> None:
    for file in (run / "report" / "data").iterdir():
        assert not re.search("<|\u2028", file.read_text())
    assert HOSTILE in data(run, f"{cell.id}.episodes.0")["texts"]
    assert HOSTILE in data(run, f"{cell.id}.skills")["text"]["values"]
    assert any(HOSTILE in json.loads(raw)["episode_skill"] for raw in data(run, f"{cell.id}.skills.0") if raw[0] == "{")
    for page in (run / "report").rglob("*.html"):
        text = page.read_text()
        assert "alert(" not in text
        assert re.findall(r"<script([^>]*)>", text) == re.findall(
            r"<script( defer src=\"[./]+report/assets/\w+\.js\")>", text
        )


def test_pictures_are_where_the_page_looks_for_them(cell: Cell, run: Path) -> None:
    page = run / "report" / "episodes" / f"{cell.id}.html"
    (folder,) = re.findall(r'data-pictures="([^"]+)"', page.read_text())
    assert (page.parent / folder).resolve() == (cell.store.path / PICTURES).resolve()
    shown = [name for e in data(run, f"{cell.id}.episodes.0")["episodes"] for step in e["pictures"] for name in step]
    assert shown
    assert all((page.parent / folder / name).is_file() for name in shown)


def test_cells_without_episodes_or_skills_get_no_page(tmp_path: Path) -> None:
    cell = trained(tmp_path, "grpo")
    assert write_skill_page(cell, tmp_path) is None
    (cell.store.path / "episodes.parquet").unlink()
    assert write_episode_pages(cell, tmp_path) is None
    assert not (tmp_path / "report").exists()


# --------------------------------------------------------------------------------------------------- skills


def skill(text: str, update: int = 1, usable: bool = True, attempt: int = 0) -> dict[str, Any]:
    return {
        "text": text,
        "summary": "",
        "author": "policy",
        "update": update,
        "raw": f"raw {text}",
        "task": "train/000001",
        "attempt": attempt,
        "success": attempt == 0,
        "usable": usable,
    }


def test_copies_of_a_skill_are_counted_among_the_usable() -> None:
    frame = pd.DataFrame([skill("Go left."), skill("Go left."), skill("", usable=False), skill("", usable=False)])
    index = skill_index(frame.assign(attempt=range(4)))
    assert (index["copies"], index["first"], index["words"]) == ([2, 2, 0, 0], [1, 0, 0, 0], [2, 2, 0, 0])
    (only,) = counts(frame)
    assert (only["skills"], only["usable"], only["distinct"], only["words"]) == (4, 0.5, 0.5, 2.0)


def test_raw_answers_are_cut_in_chunks_that_hold_each_once() -> None:
    frame = pd.DataFrame([skill("word " * (5000 if n % 300 == 0 else 1)) for n in range(1500)])
    chunks = list(answer_chunks(frame))
    assert [raw for _, part in chunks for raw in part] == frame["raw"].tolist()
    assert len(chunks) >= 3
    assert [start for start, _ in chunks] == np.cumsum([0, *(len(part) for _, part in chunks)])[:-1].tolist()


def test_the_audit_is_shown_where_there_is_one(cell: Cell, run: Path) -> None:
    page = run / "report" / "skills" / f"{cell.id}.html"
    assert f"harness skills audit {cell.store.path}" in page.read_text()
    estimate = {"value": 0.625, "low": 0.5, "high": 0.75}
    audit = {
        "format": "skill-audit-1",
        "updates": None,
        "drift": None,
        "outcomes": [{"outcome": "success", "episodes": 40, "agreement": estimate, "gap": {**estimate, "low": None}}],
        "shuffle": None,
        "usefulness": None,
        "missing": {"shuffle": HOSTILE},
    }
    write_json(cell.store.path / "audit.json", audit)
    write_skill_page(cell, run)
    (cell.store.path / "audit.json").unlink()
    text = page.read_text()
    assert "62.5 %" in text
    assert "[50.0 %, 75.0 %]" in text
    assert "+0.625" in text
    assert "<script>" not in text
    assert "Not audited" not in text
