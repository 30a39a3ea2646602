"""The registry of published numbers tells the truth about its files, and verdicts compare like with like."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run

from harness import cli
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.contracts import HarnessError
from harness.methods import Method
from harness.recipes import load_recipe
from harness.reporting import published
from harness.reporting import statistics as st
from harness.reporting.comparison import Comparison, compare
from harness.reporting.frames import evaluations_of, policy_name, read_cells
from harness.reporting.published import Registry, default_directory, listing, load
from harness.reporting.published_table import identify, published_table, sampling_error
from harness.reporting.tables import Table, latex, markdown, to_csv

ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = default_directory()
KINDS = (
    *("pick_and_place_simple", "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep"),
    *("pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place"),
)
QWEN = "Qwen/Qwen2.5-3B-Instruct"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load(DIRECTORY)


def prints_as(value: float, draws: int) -> bool:
    """Whether a share of so many draws prints as this percentage with one digit, rounded (half up) or cut."""
    tenths = [1000 * wins / draws for wins in range(draws + 1)]
    return round(10 * value) in {math.floor(share + half) for share in tenths for half in (0, 0.5)}


# ---------------------------------------------------------------------------------------------- the registry


def test_every_line_is_covered_once(registry: Registry) -> None:
    files = sorted(DIRECTORY.glob("*.csv"))
    assert len(registry.rows) == sum(len(file.read_text().splitlines()) - 1 for file in files) == 758
    for row, source, entry in registry.rows:
        assert [about for about in source.entries if about.select.holds(row)] == [entry]


def test_averages_are_what_they_are_said_to_be(registry: Registry) -> None:
    """Of all averages with printed cells: macro is the mean of the cells; micro is not, and is a share of the draws."""
    cells = {(*row.place, row.metric): row.value for row, _, _ in registry.rows}
    seen = defaultdict(int)
    for row, _, entry in registry.rows:
        kinds = registry.index.benchmarks[row.benchmark].kinds if row.benchmark in registry.index.benchmarks else {}
        if row.metric not in entry.headlines or any((*row.place, kind) not in cells for kind in kinds) or not kinds:
            continue
        mean = sum(cells[*row.place, kind] for kind in kinds) / len(kinds)
        average = entry.headlines[row.metric].average
        seen[row.table, row.benchmark, average] += 1
        if average == "macro" and "average off" not in registry.remarks(row):
            assert row.value == pytest.approx(mean, abs=0.0501), row
        if average == "micro":
            assert row.value != pytest.approx(mean, abs=0.0501), row
            assert prints_as(row.value, 128), row
    assert seen == {
        ("table1_main", "ALFWorld", "micro"): 30,
        ("table1_main", "ALFWorld", "macro"): 3,
        ("table1_main", "Search-QA", "macro"): 33,
        ("table2_ablation", "ALFWorld", "macro"): 2,
        ("table2_ablation", "ALFWorld", "micro"): 1,
        ("table7_unseen", "ALFWorld", "macro"): 3,
    }


def test_the_numbers_of_draws_fit_the_digits(registry: Registry) -> None:
    for row, _, entry in registry.rows:
        headline = entry.headlines.get(row.metric)
        if headline and headline.measure == "success" and headline.average == "micro":
            assert prints_as(row.value, 128) == (entry.draws == 128), row
        if headline and headline.average == "unknown":
            assert not prints_as(row.value, 128), row


def test_the_check_of_macro_averages_agrees(registry: Registry) -> None:
    """The file of computed means holds what the registry computes."""
    checked = {(r.backbone, r.method): {} for r, _, _ in registry.rows if r.table == "check_alfworld_macro"}
    for row, _, _ in registry.rows:
        if row.table == "check_alfworld_macro":
            checked[row.backbone, row.method][row.metric] = row.value
    numbers = [n for n in registry.numbers if (n.row.table, n.row.benchmark) == ("table1_main", "ALFWorld")]
    assert len(checked) == 33
    for number in numbers:
        file = checked[number.row.backbone, number.row.method]
        assert file["printed_Avg"] == number.row.value
        if number.average == "macro":
            mean = 100 * math.fsum(number.shares) / 6
            assert file["mean_of_6_type_cells(computed)"] == pytest.approx(mean, abs=0.006)


def test_identical_rows_are_identical(registry: Registry) -> None:
    def digits(selection: object) -> dict[str, float]:
        return {row.metric: row.value for row, _, _ in registry.rows if selection.holds(row)}  # type: ignore[attr-defined]

    for same in registry.index.identical:
        assert len(digits(same.these)) == 7
        assert digits(same.these) == digits(same.those)
    cells = {(row.table, row.benchmark, row.method, row.metric): row.value for row, _, _ in registry.rows[:187]}
    whole = [row for row, _, _ in registry.rows if row.metric.endswith("@train_data_100%")]
    assert len(whole) == 4
    for row in whole:
        assert row.value == cells["table1_main", row.benchmark, row.method, row.metric.split("@")[0]]


def test_suspect_cells_stand_out(registry: Registry) -> None:
    cells = {(*row.place, row.metric): row.value for row, _, _ in registry.rows}
    found = 0
    for row, _, _ in registry.rows:
        for suspect in registry.index.suspect:
            if suspect.flag == "Bamboogle broken" and suspect.select.holds(row):
                untrained = row.model_copy(update={"method": "Vanilla"})
                others = [k for k in registry.index.benchmarks["Search-QA"].kinds if k != "Bamboogle"]
                assert row.value < 0.6 * cells[*untrained.place, "Bamboogle"]
                assert all(cells[*row.place, k] > 0.7 * cells[*untrained.place, k] for k in others), row
                found += 1
    assert found == 6
    numbers = [n for n in registry.numbers if n.row.benchmark == "Search-QA"]
    assert sum("Bamboogle broken" in number.flags for number in numbers) == 6
    assert [n.row.method for n in numbers if "average off" in n.flags] == ["SEED"]


def test_protocols_say_only_what_is_published(registry: Registry) -> None:
    protocols = registry.index.protocols
    seed, baselines = protocols["SEED ALFWorld 3B"], protocols["SDAR ALFWorld"]
    assert (seed.history, seed.max_steps, baselines.history, baselines.max_steps) == (5, 30, 2, 50)
    assert baselines.temperature is baselines.checkpoint is None
    assert {number.entry.seeds for number in registry.numbers} == {1}
    assert listing(registry).row_count == sum(len(source.entries) for source in registry.index.tables)


# ------------------------------------------------------------------------------------------- broken registries


def copy(tmp_path: Path) -> Path:
    directory = tmp_path / "published"
    shutil.copytree(DIRECTORY, directory)
    return directory


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "table8_visual.csv",
            "ReAct,Success,11.7",
            "Nobody,Success,11.7",
            "no entry speaks of table8_visual.csv, line 2",
        ),
        ("table8_visual.csv", "11.7,percent", "many,percent", r"line 2: value: input should be a valid number"),
        ("table8_visual.csv", "value,unit", "unit,value", "the columns must be"),
        ("registry.yaml", "select: {benchmark: Average}", "select: {}", "2 entries speak of table8_visual.csv"),
        ("registry.yaml", "protocol: SEED Sokoban", "protocol: SEED Sokobam", "no protocol 'SEED Sokobam'"),
        ("registry.yaml", "  RLSD: rlsd\n", "", "no method 'RLSD' is given"),
        (
            "registry.yaml",
            "method: w/o On-Policy Skill}\n    those",
            "method: w/o}\n    those",
            "no row is table table2",
        ),
        ("registry.yaml", "file: table7_unseen.csv", "file: table9.csv", "names table9.csv, which does not exist"),
        ("registry.yaml", "provenance: stated", "provenance: heard", "provenance: input should be"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    directory = copy(tmp_path)
    text = (directory / file).read_text()
    (directory / file).write_text(text.replace(old, new))
    with pytest.raises(HarnessError, match=message) as error:
        load(directory)
    assert "\n" not in str(error.value)


def test_a_file_without_an_entry_and_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"there is no registry\.yaml"):
        load(tmp_path)
    directory = copy(tmp_path)
    shutil.copy(directory / "table8_visual.csv", directory / "table9.csv")
    with pytest.raises(HarnessError, match=r"no entry for the file table9\.csv"):
        load(directory)


# --------------------------------------------------------------------------------------------------- verdicts


def write(
    directory: Path, rates: dict[str, float], *, env: str = "ALFWorld-v1", policy: str = QWEN, **card: object
) -> None:
    """Trained cells with a final success each, by default as SDAR's table was made: 50 steps, history 2."""
    conditions = {"panel": "valid_seen", "data": "official json_2.1.1", "history": 2, "max_steps": 50} | card
    protocol = replace(synthetic_run.card(env), **conditions)
    for name, rate in rates.items():
        config = CellConfig(
            env=EnvConfig(id=env),
            policy=policy,
            method=Method(name=name, summary="made up"),
            train=TrainConfig(updates=150, tasks=16, group=8),
        )
        synthetic_run.write_cell(directory, config, {0: 0.2, 150: rate}, tasks=140, protocol=protocol)


def compared(directory: Path, registry: Registry) -> tuple[Comparison, Table]:
    cells, _ = read_cells(directory)
    comparison = compare(cells, evaluations_of(cells))
    return comparison, published_table(comparison, registry)


def verdicts(table: Table) -> dict[tuple[str, str], str]:
    names = [column.name for column in table.columns]
    method, average, verdict = (names.index(name) for name in ("Method", "Average", "Verdict"))
    return {(str(row[method]), str(row[average])): str(row[verdict]) for row in table.rows}


@pytest.fixture
def six_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic_run.ENVS, "ALFWorld-v1", KINDS)


@pytest.mark.usefixtures("six_kinds")
def test_verdicts(tmp_path: Path, registry: Registry) -> None:
    """One reproduced, one not, one that was measured with another history and step limit than it was published with."""
    write(tmp_path, {"sdar": 0.83, "grpo": 0.3, "seed": 0.91})
    _, table = compared(tmp_path, registry)
    found = verdicts(table)
    assert found["sdar", "success, micro"] == found["sdar", "success, macro"] == "reproduced"
    assert found["grpo", "success, micro"] == found["grpo", "success, macro"] == "not reproduced"
    assert found["seed", "success, macro"] == "not comparable: history, max steps"
    assert ("seed", "success, micro") not in found
    text = markdown(table)
    assert "SDAR ALFWorld: history 2; max steps 50; too long prompts error; updates 150; unknown: temperature" in text
    assert "history 2 / 5; max steps 50 / 30" in to_csv(table)
    assert "Panel unpublished" in text
    assert latex(table).count("not reproduced") == 2
    assert len(list(csv.reader(to_csv(table).splitlines()))) == len(table.rows) + 1


@pytest.mark.usefixtures("six_kinds")
def test_micro_stands_beside_micro(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, {"grpo": 0.7})
    comparison, table = compared(tmp_path, registry)
    arm = next(iter(comparison.arms.values()))
    by_average = {row[3]: row for row in table.rows}
    micro, macro = by_average["success, micro"], by_average["success, macro"]
    assert (micro[4].value, macro[4].value) == (0.75, pytest.approx(0.707))  # type: ignore[union-attr]
    assert micro[5].value == st.micro(arm.outcomes()) != st.macro(arm.outcomes()) == macro[5].value  # type: ignore[union-attr]
    assert micro[6].value == micro[5].value - micro[4].value  # type: ignore[union-attr]
    assert "mean of printed kinds" in str(macro[8])
    assert "mean of printed kinds" not in str(micro[8])


def test_another_backbone_is_never_comparable(tmp_path: Path, registry: Registry) -> None:
    card = {"panel": "eval", "data": "deals-1", "history": 0, "max_steps": 8}
    write(tmp_path, {"seed": 1.0, "grpo": 0.87, "opd-teacher": 0.9}, env="EZPoints-v1", policy="tiny", **card)
    _, table = compared(tmp_path, registry)
    found = verdicts(table)
    assert set(found) == {("seed", "success, micro"), ("grpo", "success, micro")}
    assert all(v == "not comparable: backbone tiny / Qwen2.5-VL-3B-Instruct, updates" for v in found.values())
    assert all(row[6] is None for row in table.rows)


def test_an_average_of_unknown_kind_is_not_comparable(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, {"seed-20": 0.4}, history=5, max_steps=30)
    _, table = compared(tmp_path, registry)
    assert verdicts(table) == {("seed-20", "success, unknown"): "not comparable: average"}


def test_the_measured_backbone_and_split_count(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, {"grpo": 0.8}, policy="Qwen/Qwen2.5-7B-Instruct")
    _, table = compared(tmp_path, registry)
    assert {row[2] for row in table.rows} == {"Qwen2.5-7B-Instruct"}
    write(tmp_path / "unseen", {"grpo": 0.7}, panel="valid_unseen")
    _, table = compared(tmp_path / "unseen", registry)
    assert [(row[4].value, row[10]) for row in table.rows] == [(pytest.approx(0.709), "SEED, Table 7, GRPO")]  # type: ignore[union-attr]


def test_policies_without_training(tmp_path: Path, registry: Registry) -> None:
    """Released weights are what they are; a published backbone as it is stands for the untrained row."""
    write(tmp_path, {"grpo": 0.5})
    policies = {
        "Jinyang23/Seed-AlfWorld-3B": ("seed, seed (released)", "Qwen2.5-3B-Instruct"),
        "api:Qwen/Qwen3-1.7B@http://localhost:8000/v1": ("vanilla", "Qwen3-1.7B-Instruct"),
        QWEN: ("vanilla", "Qwen2.5-3B-Instruct"),
        "random": None,
        "results/quick/cells/0123/policy": None,
    }
    for policy in policies:
        config = CellConfig(env=EnvConfig(id="ALFWorld-v1"), policy=policy)
        synthetic_run.write_cell(tmp_path, config, {0: 0.2})
    cells, _ = read_cells(tmp_path)
    comparison = compare(cells, evaluations_of(cells))
    found = []
    for arm in comparison.arms.values():
        ours = identify(arm, comparison, registry)
        if not arm.trained:
            found.append((", ".join(ours.methods), ours.backbone) if ours else None)
    assert sorted(found, key=str) == sorted(policies.values(), key=str)


def test_backbones_are_the_last_part_of_a_name() -> None:
    assert policy_name("Qwen/Qwen2.5-3B-Instruct/") == "Qwen2.5-3B-Instruct"
    assert policy_name("api:Qwen/Qwen3-1.7B@http://localhost:8000/v1") == "Qwen3-1.7B"


def test_sampling_error() -> None:
    """Of one share close to the textbook's; of the mean of equal shares about that of all draws together."""
    assert sampling_error([0.5], 128) == pytest.approx(1.96 * math.sqrt(0.25 / 128), rel=0.02)
    assert sampling_error([0.7] * 6, 600) == pytest.approx(sampling_error([0.7], 600), rel=0.03)
    assert sampling_error([1.0], 128) > 0.01


@pytest.mark.usefixtures("six_kinds")
def test_rows_with_skills_in_the_prompt(tmp_path: Path, registry: Registry) -> None:
    """One training measured in both ways stands beside two published rows."""
    write(tmp_path, {"skill-grpo": 0.6})
    (file,) = tmp_path.glob("cells/*/evals.jsonl")
    plain = [json.loads(line) for line in file.read_text().splitlines()]
    records = [{**record, "skills": skills} for record in plain for skills in ("plain", "library")]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, table = compared(tmp_path, registry)
    printed = {(row[1], row[3]): round(100 * row[4].value, 1) for row in table.rows}  # type: ignore[union-attr]
    assert printed == {
        ("skill-grpo", "success, micro"): 60.2,
        ("skill-grpo", "success, macro"): 59.9,
        ("skill-grpo*", "success, micro"): 80.5,
        ("skill-grpo*", "success, macro"): 74.7,
    }


@pytest.mark.parametrize("name", ["paper/table1", "paper/table8"])
def test_recipes_of_the_paper_are_comparable(name: str, registry: Registry) -> None:
    """What a recipe states of SEED's protocol is what is published of it."""
    recipe = load_recipe(name).model_dump()
    for plan in recipe["envs"]:
        env, train = plan["env"], recipe["train"] | plan.get("train", {})
        stated = {
            "history": env.get("history"),
            "max_steps": env["max_steps"],
            "temperature": recipe["eval"]["temperature"],
            **{field: train[field] for field in ("updates", "tasks", "group")},
        }
        seed = next(
            number
            for number in registry.numbers
            if number.method == "seed" and registry.index.benchmarks[number.row.benchmark].env == env["id"]
        )
        protocol = registry.index.protocols[seed.entry.protocol]
        assert seed.row.backbone == policy_name(recipe["policy"])
        for field, value in stated.items():
            assert value is None or value == getattr(protocol, field), (env["id"], field)


# ---------------------------------------------------------------------------------------------- command line


def test_the_report_holds_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"grpo": 0.75})
    assert cli.main(["report", str(tmp_path), "--with-published"]) == 0
    capsys.readouterr()
    for ending in ("csv", "md", "tex"):
        assert "reproduced" in (tmp_path / "tables" / f"published.{ending}").read_text()
    assert "Published and measured" in (tmp_path / "report.html").read_text()
    assert cli.main(["report", str(tmp_path), "--published", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "there is no registry.yaml" in error


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "published"]) == 0
    assert "SEED" in capsys.readouterr().out


def test_numbers_that_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "__file__", str(tmp_path / "lib" / "harness" / "published.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=r"name the directory of registry\.yaml with --published DIR"):
        default_directory()
    shutil.copytree(DIRECTORY, tmp_path / "results" / "published")
    assert default_directory() == tmp_path / "results" / "published"
