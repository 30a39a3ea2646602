"""Skill libraries: what is refused, what a task gets, and the export from a cell's own skills."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.config import CellConfig, EnvConfig
from harness.contracts import HarnessError, Task
from harness.library import fingerprint_of, load_library, packaged
from harness.methods import SEED
from harness.records import EPISODE_COLUMNS
from harness.registry import make_env
from harness.skill_commands import command
from harness.skill_export import Choice, export, read_updates, spell
from harness.store import CellDir

HEAT = {"env": "Home-v1", "kind": "heat", "text": "Use the microwave."}
LIBRARY: dict[str, Any] = {
    "format": "skill-library-1",
    "name": "home",
    "provenance": {"author": "test"},
    "skills": [
        {"env": "Home-v1", "task": "train/1", "text": "The mug is in cabinet 2."},
        HEAT,
        {"env": "Home-v1", "text": "Open doors."},
        {"env": "Home-v1", "task": "f2", "text": "The egg is in fridge 1."},
        {"env": "Home-v1", "text": "Look around.\n"},
        {"env": "Shop-v1", "text": "Mind the price."},
    ],
}


def write(place: Path, changes: Mapping[str, Any]) -> str:
    place.write_text(json.dumps(LIBRARY | dict(changes)))
    return str(place)


def task(number: int, kind: str, env: str = "Home-v1") -> Task:
    return Task(f"train/{number}", env, "train", kind, {}, f"f{number}")


# ------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "skill-library-2"}, "format: input should be 'skill-library-1' (got 'skill-library-2')"),
        ({"skils": []}, "unknown setting 'skils'; did you mean 'skills'?"),
        ({"skills": []}, "skills: tuple should have at least 1 item after validation, not 0 (got [])"),
        ({"provenance": {}}, "provenance.author: field required"),
        ({"skills": [HEAT, HEAT | {"knd": "heat"}]}, "skills.1: unknown setting 'knd'; did you mean 'kind'?"),
        ({"skills": [HEAT, {"env": "Home-v1"}]}, "skills.1.text: field required"),
        ({"skills": [HEAT, HEAT | {"text": " \n"}]}, "skills.1.text: a skill needs a text (got ' \\n')"),
        ({"skills": [HEAT | {"text": "See <image>"}]}, "skills.0.text: a skill carries no image: spell <image> out"),
        ({"skills": [HEAT | {"task": "t"}]}, "skills.0: a skill is about a kind or about a task: leave one"),
        (
            {"skills": [HEAT, HEAT | {"text": "use the  microwave."}]},
            "skills.1 repeats skills.0 ('use the  microwave.')",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, changes: Mapping[str, Any], complaint: str
) -> None:
    spec = write(tmp_path / "home.json", changes)
    with pytest.raises(HarnessError) as error:
        load_library(spec)
    assert str(error.value).startswith(f"{spec}: {complaint}")
    assert "\n" not in str(error.value)


def test_a_library_that_is_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="unknown skill library 'genral'; did you mean 'general'"):
        load_library("genral")
    with pytest.raises(HarnessError, match=r"no such skill library file: nowhere\.json"):
        load_library("nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(HarnessError, match=r"broken\.json is not a JSON file"):
        load_library(str(tmp_path / "broken.json"))


def test_the_fingerprint_covers_what_prompts_hold_and_nothing_else(tmp_path: Path) -> None:
    before = fingerprint_of(write(tmp_path / "a.json", {}))
    assert fingerprint_of(write(tmp_path / "b.json", {"name": "other", "provenance": {"author": "me"}})) == before
    assert fingerprint_of(write(tmp_path / "c.json", {"skills": LIBRARY["skills"][::-1]})) != before


# ----------------------------------------------------------------------------------------------- retrieval


def test_a_task_gets_the_skills_of_its_environment_its_kind_and_its_own(tmp_path: Path) -> None:
    library = load_library(write(tmp_path / "home.json", {}))
    general = "Open doors.\nLook around."
    assert library.skill_for(task(1, "heat")) == f"{general}\nUse the microwave.\nThe mug is in cabinet 2."
    assert library.skill_for(task(2, "cool")) == f"{general}\nThe egg is in fridge 1."  # by fingerprint
    assert library.skill_for(task(1, "heat", "Shop-v1")) == "Mind the price."
    assert library.skill_for(task(1, "heat", "Yard-v1")) == ""


def test_a_text_on_two_levels_is_read_once(tmp_path: Path) -> None:
    library = load_library(write(tmp_path / "home.json", {"skills": [HEAT, {"env": "Home-v1", "text": HEAT["text"]}]}))
    assert library.skill_for(task(1, "heat")) == "Use the microwave."


def test_require_names_what_has_no_skill(tmp_path: Path) -> None:
    library = load_library(write(tmp_path / "home.json", {}))
    library.require("Home-v1", [task(1, "clean"), task(2, "cool"), task(3, "heat")])
    library.require("Shop-v1", [task(4, "garden", "Shop-v1")])
    with pytest.raises(
        HarnessError, match=r"'home' has no skill for 2 tasks of Home-v1, kinds 'cool'; it has .* 'heat'"
    ):
        library.require("Home-v1", [task(3, "cool"), task(4, "cool"), task(5, "heat")])
    with pytest.raises(HarnessError, match="'home' has no skill for Yard-v1, only for Home-v1, Shop-v1"):
        library.require("Yard-v1", [])


def test_packaged_libraries_serve_every_environment() -> None:
    for name in packaged():
        library = load_library(name)
        assert library.name == name
        for env_id in ("ALFWorld-v1", "EZPoints-v1", "SearchQA-v1", "Sokoban-v1", "WebShop-v1"):
            library.require(env_id, make_env(env_id).panel("eval"))


# -------------------------------------------------------------------------------------------------- export


def toy_cell(place: Path, *skills: tuple[int, str, int, bool, str], env: str = "Home-v1") -> Path:
    """A finished cell with skills given as (update, task, attempt, success, text); tasks starting with h are heat."""
    import pyarrow
    import pyarrow.parquet

    cell = CellDir(place)
    place.mkdir(parents=True)
    cell.write_json("config.json", CellConfig(env=EnvConfig(id=env), method=SEED).model_dump(mode="json"))
    cell.write_json("manifest.json", {})
    for update, name, attempt, success, text in skills:
        record = {"text": text, "author": "policy" if update >= 0 else "scripted", "update": update, "task": name}
        cell.append("skills.jsonl", record | {"attempt": attempt, "success": success, "usable": bool(text)})
    tasks = sorted({skill[1] for skill in skills})
    columns = {name: [""] * len(tasks) for name in EPISODE_COLUMNS}
    columns |= {"task": tasks, "kind": ["heat" if name.startswith("h") else "cool" for name in tasks]}
    pyarrow.parquet.write_table(pyarrow.table(columns), place / "episodes.parquet")
    return place


SKILLS = (
    (-1, "h1", 0, True, "Heat it."),
    (1, "h1", 1, True, "heat  it."),
    (1, "h1", 2, True, "Heat it."),
    (1, "h2", 0, True, "Heat mug 1."),
    (2, "h3", 0, True, "Heat mug 1."),
    (2, "h4", 0, True, "Look at <image>."),
    (2, "h5", 0, False, "Never cook."),
    (2, "h6", 0, False, "Never cook."),
    (2, "h7", 0, True, ""),
    (2, "c1", 0, True, "Cool it."),
)


def test_an_export_takes_the_skills_that_most_tasks_support(tmp_path: Path) -> None:
    cell = toy_cell(tmp_path / "abc", *SKILLS)
    library, taken = export([cell], "mine", Choice(per_env=1, per_kind=2))
    assert [(entry.kind, entry.text) for entry in library.skills] == [
        (None, "Heat mug 1."),  # two tasks solved, before one task solved three times
        ("cool", "Cool it."),
        ("heat", "Heat mug 1."),
        ("heat", "Heat it."),
    ]
    source = library.skills[3].source
    assert source is not None
    assert (source.tasks, source.episodes, source.successes, source.author) == (1, 3, 3, "scripted")
    assert library.provenance.instances == 2
    assert library.provenance.author == "policy, scripted"
    assert (library.provenance.cells[0].skills, library.provenance.cells[0].usable) == (10, 7)
    assert [(group.usable, group.distinct) for group in taken] == [(7, 4), (1, 1), (6, 3)]


def test_an_export_can_look_at_failures_at_some_updates_and_at_single_tasks(tmp_path: Path) -> None:
    cell = toy_cell(tmp_path / "abc", *SKILLS)
    everything, _ = export([cell], "mine", Choice(per_env=9, per_kind=0, outcome="all"))
    assert [entry.text for entry in everything.skills][-1] == "Never cook."  # supported by no success
    assert "Look at (image)." in [entry.text for entry in everything.skills]
    stage1, _ = export([cell], "mine", Choice(updates=read_updates("stage1")))
    assert [(entry.kind, entry.text) for entry in stage1.skills] == [("heat", "Heat it.")]
    tasks, _ = export([cell], "mine", Choice(per_kind=0, per_task=1))
    assert tasks.skill_for(Task("h2", "Home-v1", "train", "heat", {}, "")) == "Heat mug 1."


def test_an_export_passes_over_cells_without_skills_and_names_a_broken_file(tmp_path: Path) -> None:
    cells = [toy_cell(tmp_path / "a", *SKILLS), toy_cell(tmp_path / "b")]
    library, _ = export(cells, "mine", Choice())
    assert [origin.cell for origin in library.provenance.cells] == ["a"]
    (tmp_path / "a" / "episodes.parquet").write_bytes(b"PAR1")
    with pytest.raises(HarnessError, match=r"cannot read .*a/episodes\.parquet"):
        export(cells, "mine", Choice())


def test_an_export_is_the_same_in_any_order_and_reads_back(tmp_path: Path) -> None:
    cells = [toy_cell(tmp_path / "b", *SKILLS), toy_cell(tmp_path / "a", *SKILLS[::-1], env="Yard-v1")]
    there, _ = export(cells, "mine", Choice())
    back, _ = export(cells[::-1], "mine", Choice())
    assert there == back
    (tmp_path / "mine.json").write_text(there.model_dump_json())
    assert load_library(str(tmp_path / "mine.json")) == there


@pytest.mark.parametrize(
    ("skills", "choice", "complaint"),
    [
        (SKILLS, Choice(per_kind=0), "nothing to export: --per-env, --per-kind and --per-task are all 0"),
        (SKILLS, Choice(updates=(7, 9)), "no usable skill from successes of updates 7..9 in 1 cells"),
        ((), Choice(), "abc: no skills there, the method writes none"),
    ],
)
def test_an_export_of_nothing_says_why(tmp_path: Path, skills: tuple[Any, ...], choice: Choice, complaint: str) -> None:
    cell = toy_cell(tmp_path / "abc", *skills)
    with pytest.raises(HarnessError, match=complaint):
        export([cell], "mine", choice)


@pytest.mark.parametrize("text", ["stage1", "12", "1..40", "stage1..3"])
def test_spans_of_updates_read_back(text: str) -> None:
    assert spell(read_updates(text)) == text


@pytest.mark.parametrize("text", ["", "x", "3..1", "1-4", "-1"])
def test_other_words_are_no_updates(text: str) -> None:
    with pytest.raises(HarnessError, match="--updates"):
        read_updates(text)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    spec = write(tmp_path / "home.json", {"skills": [HEAT | {"text": "\ud800"}]})
    with pytest.raises(HarnessError, match="surrogates not allowed"):
        load_library(spec)


# ------------------------------------------------------------------------------------------------ commands


def skills(*words: str) -> int:
    """Run ``harness skills WORDS``."""
    parser = argparse.ArgumentParser()
    command(parser)
    options = parser.parse_args(words)
    return int(options.run(options))


def test_the_commands_export_show_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell, out = toy_cell(tmp_path / "abc", *SKILLS), tmp_path / "mine.json"
    assert skills("export", str(cell), "--out", str(out), "--per-kind", "1", "--per-task", "1") == 0
    printed = capsys.readouterr().out
    assert "5 tasks" in printed
    assert f"7 skills, 3 of them name a numbered instance: {out}" in printed
    assert load_library(str(out)).provenance.command == "--per-env 0 --per-kind 1 --per-task 1 --from successes"

    assert skills("show", str(out), "--env", "Home-v1") == 0
    assert "cell abc: Home-v1 seed tiny seed 0, updates stage1..2, 7 usable of 10 skills" in capsys.readouterr().out
    with pytest.raises(HarnessError, match="'mine' has no skill about 'Homes-v1', only about Home-v1"):
        skills("show", str(out), "--env", "Homes-v1")

    assert skills("list") == 0
    assert "general" in capsys.readouterr().out
