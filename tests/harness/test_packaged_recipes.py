"""The packaged recipes: complete, true to the tables they are named after, and clear about what they need."""

from __future__ import annotations

import csv
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from harness import cli
from harness.cell import Session
from harness.config import CellConfig, Recipe
from harness.contracts import HarnessError
from harness.methods import GatedNLL, ImportanceK3, Reweighting
from harness.policy import load
from harness.recipes import expand, load_recipe, packaged
from harness.store import cell_dir

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
PAPER = [name for name in packaged() if name.startswith("paper/")]
VISUAL = ("paper/table8", "paper/sokoban", "paper/ezpoints")
NEEDS_DATA = [name for name in PAPER if name not in VISUAL]
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
    for name in ("table6-tiny", "paper/table8"):
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


def named(table: int, size: str) -> str:
    """The recipe of a table."""
    return f"paper/table{table}" if size == "paper" else f"table{table}-{size}"


def rows(cell: CellConfig) -> set[str]:
    """Names of the rows that a cell becomes in a table: a star where skills are in the prompt."""
    assert cell.method
    return {cell.method.name + ("*" if prompts == "library" else "") for prompts in cell.method.evaluation}


@pytest.mark.parametrize("size", ["tiny", "paper"])
@pytest.mark.parametrize("table", [1, 2, 7, 8])
def test_has_the_rows_of_its_table(table: int, size: str) -> None:
    cells = trained(named(table, size))
    assert set().union(*map(rows, cells.values())) == {ours(row["method"]) for row in published(table)}
    benchmarks = {row["benchmark"].removesuffix("-6x6").replace("-", "") for row in published(table)}
    assert {env.removesuffix("-v1") for env, _ in cells} == benchmarks - {"Average"}


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_has_the_shares_of_data(size: str) -> None:
    """Each share trains on that share of the tasks, and plays every one of them once."""
    cells = trained(named(6, size))
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


FACTS: dict[str, dict[str, object]] = {
    "every benchmark": {
        # the paper's table of settings: group, clip, KL and learning rate, answers of 512 tokens
        "train.group": 8,
        "train.clip": 0.2,
        "train.kl": 0.01,
        "train.learning_rate": 1e-6,
        "env.max_response_tokens": 512,
        # the released launchers, alike for all: sampling, optimizer, dual clip, checkpoints
        "train.temperature": 1.0,
        "train.weight_decay": 0.01,
        "train.betas": (0.9, 0.999),
        "train.grad_clip": 1.0,
        "train.dual_clip": 3.0,
        "train.checkpoint_every": 10,
        "train.gradient_checkpointing": True,
        "eval.temperature": 0.4,
        "eval.episodes_per_task": 1,
        "precision": "bfloat16",
        # the paper's loss: a mean over tokens, without an entropy bonus
        "train.normalise": "token",
        "train.entropy": 0.0,
        # hindsight-skill SFT: 180 tasks x 8 attempts, 3 epochs of batches of 8
        "stage1.tasks": 180,
        "stage1.attempts": 8,
        "stage1.epochs": 3,
        "stage1.batch": 8,
    },
    "text": {
        "stage1.temperature": 0.4,
        "stage1.learning_rate": 5e-6,
        "stage1.annotator": "glm-5.2@http://127.0.0.1:8001/v1",
        "analysis.max_tokens": 4096,
        "analysis.max_prompt_tokens": 16384,
    },
    "vision": {
        "policy": "Qwen/Qwen2.5-VL-3B-Instruct",
        "stage1.temperature": 1.0,
        "stage1.learning_rate": 2e-6,
        "stage1.annotator": "scripted",  # the paper names none
        "analysis.max_tokens": 2048,
        "env.history": 0,  # launchers keep one and show none
        "eval.panel_size": 128,
        "eval.every": 5,
    },
    # Per benchmark: steps, tasks an update and updates of the paper; history, prompt length, penalty, warm-up of the
    # launchers; every training task is played once.
    "ALFWorld-v1": {
        "env.max_steps": 30,
        "env.history": 5,
        "env.max_prompt_tokens": 2048,
        "train.tasks": 16,
        "train.updates": 150,
        "train.panel_size": 2400,
        "train.invalid_action_penalty": 0.1,
        "train.warmup": 0.0,
        "eval.panel_size": None,  # 140 games, or 134 unseen
        "eval.every": 5,
    },
    "WebShop-v1": {
        "env.max_steps": 15,
        "env.history": 2,
        "env.max_prompt_tokens": 4096,
        "train.tasks": 16,
        "train.updates": 150,
        "train.panel_size": 2400,
        "train.invalid_action_penalty": 0.1,
        "train.warmup": 0.0,
        "eval.panel": "eval",
        "eval.panel_size": 128,
        "eval.every": 5,
    },
    "SearchQA-v1": {
        "env.max_steps": 4,
        "env.history": 4,
        "env.max_prompt_tokens": 4096,
        "train.tasks": 128,
        "train.updates": 150,
        "train.invalid_action_penalty": 0.01,
        "train.warmup": 0.1,
        "eval.panel_size": None,  # 51,713 questions
        "eval.every": 150,
    },
    "Sokoban-v1": {
        "env.max_steps": 15,
        "env.options": {"dim": 6, "boxes": 1, "search_depth": 30},
        "env.max_prompt_tokens": 1024,
        "train.tasks": 32,
        "train.updates": 150,
        "train.panel_size": 4800,
        "train.invalid_action_penalty": 0.1,
        "train.warmup": 0.0,
        "analysis.max_prompt_tokens": 24576,
    },
    "EZPoints-v1": {
        "env.max_steps": 8,
        "env.max_prompt_tokens": 1024,
        "train.tasks": 16,
        "train.updates": 100,
        "train.panel_size": 1600,
        "train.invalid_action_penalty": 0.1,
        "train.warmup": 0.0,
        "analysis.max_prompt_tokens": 16384,
    },
}
"""What the paper states, else its launchers; where they differ, the paper (docs/reproducing.md)."""

BACKBONES = {"paper/table1-7b": "Qwen/Qwen2.5-7B-Instruct", "paper/table1-1.7b": "Qwen/Qwen3-1.7B"}


def setting(cell: CellConfig, path: str) -> object:
    """The value of a setting such as ``train.group``."""
    value: object = cell
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", PAPER)
def test_settings_of_the_paper(name: str) -> None:
    backbone = {} if name in VISUAL else {"policy": BACKBONES.get(name, "Qwen/Qwen2.5-3B-Instruct")}
    for (env, method), cell in trained(name).items():
        kind = FACTS["vision" if name in VISUAL else "text"]
        expected = {**FACTS["every benchmark"], **kind, **backbone, **FACTS[env]}
        if name == "paper/table6":  # shares of the data
            expected |= {"train.updates": setting(cell, "train.updates")}
            expected |= {"train.panel_size": 16 * int(str(expected["train.updates"]))}
        if name in NEEDS_DATA:
            expected.pop("eval.panel", None)  # of generated tasks here, see below
        known = {path: value for path, value in expected.items() if setting(cell, path.partition(".")[0]) is not None}
        if cell.method and not cell.method.trains:
            known.pop("eval.every")  # it is evaluated once
        assert {path: setting(cell, path) for path in known} == known, f"{env} {method}"
        assert cell.env.options == {} or name in VISUAL


def test_panels_of_the_paper() -> None:
    """Which tasks are measured; that the policy measured is the last one is so in every cell."""
    for name in NEEDS_DATA:
        recipe = load_recipe(name)
        sizes = {plan.env.id: plan.train.get("panel_size", recipe.train.panel_size) for plan in recipe.envs}
        assert sizes.items() <= {"ALFWorld-v1": 2400, "SearchQA-v1": 19200, "WebShop-v1": 2400}.items()
        panels = {plan.env.id: plan.eval.get("panel", recipe.eval.panel) for plan in recipe.envs}
        seen = "valid_unseen" if name == "paper/table7" else "valid_seen"
        assert panels.items() <= {"ALFWorld-v1": seen, "SearchQA-v1": "test", "WebShop-v1": "eval"}.items()
        assert {plan.env.id: plan.env.options for plan in recipe.envs}.items() <= {
            "ALFWorld-v1": {"data": "official"},
            "SearchQA-v1": {"data": "data/search-qa", "retriever": "http://127.0.0.1:8000/retrieve"},
            "WebShop-v1": {"data": "data/webshop", "reward": "official"},
        }.items()


def test_the_protocol_card_of_the_paper(tmp_path: Path) -> None:
    """What stands beside every number of a cell at the paper's size."""
    cell = trained("paper/sokoban")["Sokoban-v1", "seed"]
    small = cell.model_copy(update={"policy": "random", "eval": cell.eval.model_copy(update={"panel_size": 2})})
    session = Session.open(small, cell_dir(tmp_path, small), lambda progress: None, 1)
    card = session.protocol()
    session.pool.close()
    session.env.close()
    assert (card.history, card.max_steps, card.temperature, card.checkpoint) == (0, 15, 0.4, "last")
    assert card.truncation == "oldest history first, beyond 1024 tokens"
    assert card.decoding == "free, at most 512 tokens"
    assert card.invalid_action == session.env.card.invalid_action


def test_one_recipe_states_what_others_share() -> None:
    """No setting is written down twice: all recipes of the paper are laid over the main table's."""
    main = yaml.safe_load(packaged()["paper/table1"].read_text())
    for name in PAPER:
        own = yaml.safe_load(packaged()[name].read_text())
        base = own.pop("extends", None)
        assert (base is None) == (name == "paper/table1")
        for section in ("train", "stage1", "analysis", "eval"):
            repeated = own.get(section, {}).items() & main[section].items()
            assert name == "paper/table1" or not repeated, name


def test_losses_of_the_paper() -> None:
    """SEED and SDAR share their loss; GRPO+OPSD has no gate, OPSD no reward."""
    methods = {name: cell.method for (env, name), cell in trained("paper/table1").items() if env == "ALFWorld-v1"}
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
        expand(load_recipe("paper/table1", [f"envs=[{env}]"]))


@pytest.mark.parametrize("name", PAPER)
def test_papers_recipes_tell_what_they_take_without_data_or_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert cli.main(["run", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    absent = {"ALFWorld-v1", "SearchQA-v1", "WebShop-v1"} & {plan.env.id for plan in load_recipe(name).envs}
    assert {
        env for env in absent if re.search(rf"^{env}: .*Its panels are not checked", printed, re.MULTILINE)
    } == absent
    assert "memory of the largest cell" in printed
    assert re.search(r"[1-9][\d,]* GPU hours are [1-9][\d,]* hours on 8 GPUs kept busy", printed)


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
