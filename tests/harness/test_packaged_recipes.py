"""The packaged recipes: complete, true to the tables they are named after, and clear about what they need."""

from __future__ import annotations

import csv
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from harness import cli
from harness.config import CellConfig, Recipe
from harness.contracts import HarnessError
from harness.methods import GatedNLL, ImportanceK3, Reweighting
from harness.policy import load
from harness.recipes import expand, load_recipe, packaged

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published"
TABLES = {
    1: "table1_main",
    2: "table2_ablation",
    6: "table6_sample_efficiency",
    7: "table7_unseen",
    8: "table8_visual",
}
ABLATIONS = {
    "seed": "seed",
    "w/o hindsight skill sft": "seed-no-sft",
    "w/o self-evolving opd": "seed-no-opd",
    "w/o on-policy skill": "seed-static-library",
}
NEEDS_DATA = [name for name in packaged() if name.endswith("-paper") and name != "table8-paper"]
GENERATED = {
    "ALFWorld-v1": ["env.options={}"],
    "SearchQA-v1": ["env.options={}", "train.panel_size=1000"],
    "WebShop-v1": ["env.options={}"],
}
"""Overrides with which an environment of a recipe at the paper's size generates its tasks and needs no files."""


@pytest.fixture(autouse=True)
def models_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "check_policy_spec", lambda spec: spec)


@cache
def expanded(name: str) -> tuple[Recipe, list[CellConfig]]:
    """A packaged recipe and its cells; one at the paper's size plays generated tasks."""
    recipe = load_recipe(name)
    if name in NEEDS_DATA:
        own = [f"envs.{plan.env.id}.{override}" for plan in recipe.envs for override in GENERATED[plan.env.id]]
        recipe = load_recipe(name, ["eval.panel=eval", *own])
    return recipe, expand(recipe)


def trained(name: str) -> dict[tuple[str, str], CellConfig]:
    """The cells of a recipe's first seed by environment and method."""
    recipe, cells = expanded(name)
    return {(cell.env.id, cell.method.name): cell for cell in cells if cell.method and cell.seed == recipe.seeds[0]}


# ---------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", sorted(packaged()))
def test_expands(name: str) -> None:
    recipe, cells = expanded(name)
    assert recipe.name == name
    assert recipe.summary
    counts = Counter((cell.env.id, cell.method.name) for cell in cells if cell.method)
    assert counts == {(plan.env.id, method): len(recipe.seeds) for plan in recipe.envs for method in recipe.methods}
    assert set(recipe.variants) <= set(recipe.methods), "a variant that nobody runs"


def test_dry_run_prints_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("table6-tiny", "table8-paper"):
        assert cli.main(["run", name, "--dry-run"]) == 0
        printed = capsys.readouterr().out
        for method in load_recipe(name).methods:
            assert f" {method} " in printed


# ------------------------------------------------------------------------------------------- the published tables


def published(table: int) -> list[dict[str, str]]:
    with (PUBLISHED / f"{TABLES[table]}.csv").open() as file:
        return list(csv.DictReader(file))


def ours(name: str) -> str:
    """Our name of a published row."""
    plain = name.lower().replace("+", "-")
    return {**ABLATIONS, "react": "vanilla"}.get(plain, plain)


def rows(cell: CellConfig) -> set[str]:
    """Names of the rows that a cell becomes in a table: a star where skills are in the prompt."""
    assert cell.method
    return {cell.method.name + ("*" if prompts == "library" else "") for prompts in cell.method.evaluation}


@pytest.mark.parametrize("size", ["tiny", "paper"])
@pytest.mark.parametrize("table", [1, 2, 7, 8])
def test_has_the_rows_of_its_table(table: int, size: str) -> None:
    cells = trained(f"table{table}-{size}")
    assert set().union(*map(rows, cells.values())) == {ours(row["method"]) for row in published(table)}
    benchmarks = {row["benchmark"].removesuffix("-6x6").replace("-", "") for row in published(table)}
    assert {env.removesuffix("-v1") for env, _ in cells} == benchmarks - {"Average"}


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_has_the_shares_of_data(size: str) -> None:
    """Each share trains on that share of the tasks, and plays every one of them once."""
    cells = trained(f"table6-{size}")
    shares = sorted({int(row["metric"].partition("train_data_")[2].rstrip("%")) for row in published(6)})
    assert shares == [20, 40, 60, 80, 100]
    assert {env for env, _ in cells} == {"ALFWorld-v1", "WebShop-v1"}
    for (env, name), cell in cells.items():
        method, _, share = name.partition("-")
        full = cells[env, method].train
        assert cell.train
        assert full
        assert cell.train.panel_size == cell.train.updates * cell.train.tasks
        assert cell.train.updates * 100 == full.updates * int(share or 100)
    assert len(cells) == 2 * 2 * len(shares)


# --------------------------------------------------------------------------------------------- the paper's numbers


PROTOCOL = {
    "ALFWorld-v1": {"history": 5, "max_steps": 30, "max_prompt_tokens": 2048, "updates": 150, "tasks": 16},
    "WebShop-v1": {"history": 2, "max_steps": 15, "max_prompt_tokens": 4096, "updates": 150, "tasks": 16},
    "SearchQA-v1": {"history": 4, "max_steps": 4, "max_prompt_tokens": 4096, "updates": 150, "tasks": 128},
    "Sokoban-v1": {"history": 0, "max_steps": 15, "max_prompt_tokens": 1024, "updates": 150, "tasks": 32},
    "EZPoints-v1": {"history": 0, "max_steps": 8, "max_prompt_tokens": 1024, "updates": 100, "tasks": 16},
}
"""As the paper and its launchers state them; the visual tasks show no text history."""


@pytest.mark.parametrize("name", ["table1-paper", "table2-paper", "table7-paper", "table8-paper"])
def test_protocol_of_the_paper(name: str) -> None:
    visual = name == "table8-paper"
    for (env, method), cell in trained(name).items():
        assert cell.policy == f"Qwen/Qwen2.5-{'VL-' if visual else ''}3B-Instruct"
        assert (cell.env.max_response_tokens, cell.eval.temperature) == (512, 0.4)
        if cell.train:
            known = {**cell.env.model_dump(), **cell.train.model_dump()}
            assert {field: known[field] for field in PROTOCOL[env]} == PROTOCOL[env], f"{env} {method}"
            assert (cell.train.group, cell.train.temperature, cell.train.learning_rate) == (8, 1.0, 1e-6)
            assert (cell.train.clip, cell.train.kl, cell.train.weight_decay) == (0.2, 0.01, 0.01)
            assert cell.train.invalid_action_penalty == (0.01 if env == "SearchQA-v1" else 0.1)
            assert cell.train.warmup == (0.1 if env == "SearchQA-v1" else 0.0)
        if cell.stage1:
            assert (cell.stage1.tasks, cell.stage1.attempts, cell.stage1.epochs, cell.stage1.batch) == (180, 8, 3, 8)
            assert cell.stage1.learning_rate == (2e-6 if visual else 5e-6)
            assert cell.stage1.temperature == (1.0 if visual else 0.4)
            assert cell.analysis
            assert cell.analysis.max_tokens == (2048 if visual else 4096)
            assert cell.analysis.max_prompt_tokens == (24576 if env == "Sokoban-v1" else 16384)


def test_panels_of_the_paper() -> None:
    panels = {name: {plan.env.id: plan.eval for plan in load_recipe(name).envs} for name in NEEDS_DATA}
    main = panels["table1-paper"]
    assert main["ALFWorld-v1"]["panel"] == panels["table6-paper"]["ALFWorld-v1"]["panel"] == "valid_seen"
    assert (main["SearchQA-v1"]["panel"], main["WebShop-v1"]["panel_size"]) == ("test", 128)
    for name in ("table1-paper", "table8-paper"):
        recipe = load_recipe(name)
        for plan in recipe.envs:
            train = {**recipe.train.model_dump(), **plan.train}
            assert train["panel_size"] == train["updates"] * train["tasks"], "every training task is played once"
    assert load_recipe("table2-paper").eval.panel == "valid_seen"
    assert load_recipe("table7-paper").eval.panel == "valid_unseen"


def test_losses_of_the_paper() -> None:
    """SEED and SDAR share their loss; GRPO+OPSD has no gate, OPSD no reward."""
    methods = {name: cell.method for (env, name), cell in trained("table1-paper").items() if env == "ALFWorld-v1"}
    gated = GatedNLL(coefficient=0.01, beta=5.0)
    assert {name: method.signal for name, method in methods.items() if method and method.signal} == {
        "seed": gated,
        "sdar": gated,
        "opsd": gated,
        "grpo-opsd": GatedNLL(coefficient=0.01, beta=0.0),
        "skill-sd": ImportanceK3(coefficient=0.001),
        "rlsd": Reweighting(coefficient=0.5, decay_updates=100, clip=0.2),
    }
    rewarded = {name for name, method in methods.items() if method and method.advantage}
    assert rewarded == {"grpo", "skill-grpo", "grpo-opsd", "skill-sd", "rlsd", "sdar", "seed"}


# ----------------------------------------------------------------------------------------------- what they need


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ("ALFWorld-v1", "data=official needs the environment variable ALFWORLD_DATA"),
        ("WebShop-v1", r"no WebShop products at .*data/webshop \(option data\)"),
        ("SearchQA-v1", r"no Search-QA questions at .*data/search-qa \(option data\)"),
    ],
)
def test_missing_data_is_named(env: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(HarnessError, match=line):
        expand(load_recipe("table1-paper", [f"envs=[{env}]"]))


# ------------------------------------------------------------------------------------------------------ controls


def test_controls_change_one_thing() -> None:
    """Apart from the strong signal, every variant differs from SEED in a single setting of a single axis."""
    recipe = load_recipe("controls-tiny")
    for name, variant in recipe.variants.items():
        axes = {axis: change for axis, change in variant.items() if axis not in ("of", "summary", "analysis")}
        if name.startswith("seed-full"):
            assert axes["signal"]["kind"] == "reverse_kl"
            assert axes["teacher"]["weights"] == "start"
        else:
            assert len(axes) == 1, name
            assert all(len(change) <= 1 for change in axes.values()), name
    summaries = [variant["summary"] for variant in recipe.variants.values()]
    assert len(set(summaries)) == len(summaries)
