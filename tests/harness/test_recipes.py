"""Recipes: overrides, merging, what enters a cell's hash, and errors that name the nearest valid setting."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config import CellConfig, Recipe
from harness.contracts import HarnessError
from harness.methods import ReverseKL, Teacher
from harness.policy import load
from harness.recipes import expand, load_recipe
from harness.registry import make_env

SMALL: dict[str, Any] = {
    "name": "small",
    "policy": "tiny",
    "teacher": "tiny-teacher",
    "methods": ["grpo", "seed", "opd-teacher"],
    "baselines": ["oracle"],
    "seeds": [0, 1],
    "train": {"updates": 5, "tasks": 2},
    "eval": {"panel_size": 4, "every": 2},
    "envs": [
        {"env": {"id": "EZPoints-v1"}, "train": {"updates": 7}},
        {
            "env": {"id": "Sokoban-v1", "max_steps": 9},
            "methods": {"seed": {"signal": {"beta": 1}, "train": {"updates": 8}}},
        },
    ],
}


@pytest.fixture(autouse=True)
def embedded_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded policies count as built."""
    check = load.check_policy_spec
    monkeypatch.setattr(load, "check_policy_spec", lambda spec: spec if spec in load.PACKAGED else check(spec))


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def trained(recipe: Recipe) -> dict[tuple[str, str, int], CellConfig]:
    return {(cell.env.id, cell.method.name, cell.seed): cell for cell in expand(recipe) if cell.method}


def test_the_grid(small: str) -> None:
    cells = expand(load_recipe(small))
    played = [(cell.env.id, cell.policy, cell.seed) for cell in cells if cell.method is None]
    assert len(cells) == len({cell.hash for cell in cells}) == 2 * 2 * (2 + 3)
    assert played[:4] == [("EZPoints-v1", policy, seed) for policy in ("oracle", "tiny") for seed in (0, 1)]


def test_overlays_and_card_defaults(small: str) -> None:
    cells = trained(load_recipe(small))
    updates = {key[:2]: cell.train.updates for key, cell in cells.items() if cell.train}
    assert updates["EZPoints-v1", "grpo"] == 7
    assert updates["Sokoban-v1", "grpo"] == 5
    assert updates["Sokoban-v1", "seed"] == 8
    seed = cells["Sokoban-v1", "seed", 0]
    assert seed.method is not None
    assert seed.method.signal is not None
    assert (seed.method.signal.beta, seed.method.signal.coefficient) == (1, 0.01)
    assert (seed.env.max_steps, seed.env.history) == (9, 0)
    assert cells["EZPoints-v1", "seed", 0].env.max_steps == 8


def test_only_what_matters_enters_a_hash(small: str) -> None:
    before = trained(load_recipe(small))
    after = trained(load_recipe(small, ["stage1.epochs=1", "teacher=tiny", "analysis.max_tokens=7"]))
    changed = {key[1] for key in before if before[key].hash != after[key].hash}
    assert changed == {"seed", "opd-teacher"}
    assert before["EZPoints-v1", "grpo", 0].stage1 is None
    assert before["EZPoints-v1", "seed", 0].teacher == ""
    every = [load_recipe(small, [f"eval.every={n}"]) for n in (2, 3)]
    played = [{cell.hash for cell in expand(recipe) if cell.method is None} for recipe in every]
    assert played[0] == played[1]


def variant(name: str = "mine", **settings: Any) -> str:
    return f"variants={yaml.safe_dump({name: settings}, default_flow_style=True, width=1000).strip()}"


def test_variants_overlay_a_method_and_the_settings(small: str) -> None:
    given = variant(
        of="seed", start="base", signal={"kind": "reverse_kl"}, train={"updates": 3}, teacher={"weights": "start"}
    )
    cells = trained(load_recipe(small, [given, "methods=[seed, mine]"]))
    mine, seed = cells["Sokoban-v1", "mine", 0], cells["Sokoban-v1", "seed", 0]
    assert mine.method is not None
    assert seed.method is not None
    assert (mine.method.start, mine.method.signal) == ("base", ReverseKL())  # another kind replaces the signal
    assert mine.method.teacher == Teacher(weights="start", context="own_skill")
    assert mine.method.advantage == seed.method.advantage
    assert (mine.train and mine.train.updates, mine.stage1) == (3, None)
    assert (seed.train and seed.train.updates) == 8  # what the environment says about seed is not said about mine
    own = load_recipe(small, [given, "methods=[mine]", "envs.Sokoban-v1.methods.mine.signal.coefficient=0.5"])
    assert trained(own)["Sokoban-v1", "mine", 0].method.signal == ReverseKL(coefficient=0.5)  # type: ignore[union-attr]
    alone = trained(load_recipe(small, [variant(of="seed", advantage=None), "methods=[mine]"]))
    assert alone["EZPoints-v1", "mine", 1].method.advantage is None  # type: ignore[union-attr]


def test_methods_that_train_nothing_are_evaluations(small: str) -> None:
    cells = expand(load_recipe(small, ["methods=[vanilla, grpo, sft-teacher]", "seeds=[0]", "envs=[EZPoints-v1]"]))
    rows = {cell.method.name if cell.method else cell.policy: cell for cell in cells}
    assert set(rows) == {"oracle", "vanilla", "grpo", "sft-teacher"}  # vanilla is the base policy
    assert rows["vanilla"].train is None
    assert rows["sft-teacher"].train is not None
    assert (rows["sft-teacher"].train.updates, rows["sft-teacher"].teacher) == (0, "tiny-teacher")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": "base"}, "variants.mine: say of which method it is a variant"),
        ({"of": "sede"}, "unknown method 'sede'; did you mean 'seed'?"),
        ({"of": "seed", "signl": {}}, "variants.mine: unknown setting 'signl'; did you mean 'signal'?"),
        ({"of": "seed", "signal": {"bta": 1}}, "signal: unknown setting 'bta'; did you mean 'beta'?"),
        ({"of": "seed", "signal": {"kind": "reverse_kl", "vocabulary": "ful"}}, "input should be 'sampled' or 'full'"),
        ({"of": "seed", "teacher": {"analyzer": "external"}}, "analysis.annotator: an external analyzer is named here"),
        (
            {"of": "seed", "teacher": {"analyzer": "external"}, "analysis": {"annotator": "me"}},
            "annotator (other than 'scripted') 'me' is not of the form",
        ),
        ({"of": "grpo", "analysis": {"max_tokens": 3}}, "methods.mine: analysis means nothing to this method"),
        ({"of": "vanilla", "train": {"updates": 3}}, "methods.mine: train means nothing to this method"),
        ({"of": "seed", "analysis": {"annotator": "scripted"}}, "analysis.annotator: nobody asks it"),
        ({"of": "seed", "signal": {"coefficient": float("inf")}}, "coefficient: input should be a finite number"),
        ({"of": "seed", "rehearsal": {}, "start": "base"}, "only the start hindsight_sft has one"),
        ({"of": "grpo", "train": {"updatez": 3}}, "train: unknown setting 'updatez'; did you mean 'updates'?"),
    ],
    ids=str,
)
def test_bad_variants(small: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(HarnessError) as error:
        expand(load_recipe(small, [variant(**given), "methods=[mine]"]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_variant_needs_a_name_of_its_own(small: str) -> None:
    with pytest.raises(HarnessError, match="a registered method has this name already"):
        expand(load_recipe(small, [variant("grpo", of="seed")]))
    with pytest.raises(HarnessError, match="unknown method or variant 'mime'; did you mean 'mine'"):
        expand(load_recipe(small, [variant(of="seed"), "methods=[mime]"]))


def test_a_library_must_cover_the_tasks(small: str, tmp_path: Path) -> None:
    library: dict[str, Any] = {"format": "skill-library-1", "name": "few", "provenance": {"author": "me"}}
    path = tmp_path / "few.json"
    path.write_text(json.dumps(library | {"skills": [{"env": "Sokoban-v1", "text": "Push it."}]}))
    chosen = [f"library={path}", "methods=[sdar]"]
    assert trained(load_recipe(small, [*chosen, "envs=[Sokoban-v1]"]))
    with pytest.raises(HarnessError, match="'few' has no skill for EZPoints-v1"):
        expand(load_recipe(small, chosen))
    # A skill for each training task and none for the evaluation's will do for a teacher, not for prompts.
    with closing(make_env("EZPoints-v1")) as env:
        skills = [{"env": "EZPoints-v1", "task": task.id, "text": f"about {task.id}"} for task in env.panel("train", 8)]
    path.write_text(json.dumps(library | {"skills": skills}))
    one = [f"library={path}", "envs=[EZPoints-v1]", "train.panel_size=8"]
    assert trained(load_recipe(small, [*one, "methods=[sdar]"]))
    with pytest.raises(HarnessError, match="no skill for 4 tasks of EZPoints-v1"):
        expand(load_recipe(small, [*one, "methods=[skill-grpo]"]))


def test_overrides(small: str) -> None:
    recipe = load_recipe(small, ["envs=[Sokoban-v1]", "methods=[grpo]", "seeds=[3]", "train.learning_rate=1e-4"])
    (cell,) = trained(recipe).values()
    assert (cell.env.id, cell.seed) == ("Sokoban-v1", 3)
    assert cell.train is not None
    assert cell.train.learning_rate == 1e-4


def test_a_recipe_extends_another(small: str, tmp_path: Path) -> None:
    """What differs is merged, environments are selected by id, lists replace."""
    path = tmp_path / "mine.yaml"
    changed = {"env": {"id": "EZPoints-v1", "max_steps": 4}, "eval": {"every": 3}}
    path.write_text(yaml.safe_dump({"name": "mine", "extends": Path(small).name, "seeds": [7], "envs": [changed]}))
    recipe, base = load_recipe(str(path), ["train.tasks=3"]), load_recipe(small)
    assert (recipe.name, recipe.methods, recipe.seeds) == ("mine", base.methods, [7])
    assert (recipe.train.updates, recipe.train.tasks) == (5, 3)
    (plan,) = recipe.envs
    assert (plan.env.max_steps, plan.train, plan.eval) == (4, {"updates": 7}, {"every": 3})
    path.write_text(yaml.safe_dump({"name": "mine", "extends": Path(small).name, "envs": ["Sokoban-v1"]}))
    assert load_recipe(str(path)).envs == [plan for plan in base.envs if plan.env.id == "Sokoban-v1"]
    path.write_text(yaml.safe_dump({"name": "mine", "extends": "quick", "envs": [{"env": {"id": "WebShop-v1"}}]}))
    assert load_recipe(str(path)).train == load_recipe("quick").train


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "mine", "extends": "qick"}, "unknown recipe 'qick'; did you mean 'quick'?"),
        ({"name": "mine", "extends": "none.yaml"}, "no such recipe file: none.yaml"),
        ({"name": "mine", "extends": ["quick"]}, "extends: expected the name or file of a recipe"),
        ({"name": "mine", "extends": "mine.yaml"}, "mine.yaml extends mine.yaml, which extends it in turn"),
        ({"extends": "quick"}, "has a name of its own"),
        ({"name": "mine", "extends": "quick", "envs": ["Sokban-v1"]}, "envs: unknown environment of this recipe"),
        ({"name": "mine", "extends": "quick", "train": {"updats": 1}}, "mine.yaml: train: unknown setting 'updats'"),
    ],
)
def test_bad_extensions(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(HarnessError, match=re.escape(message)):
        load_recipe(str(path))


def test_a_shared_override_wins_over_environments_and_methods(small: str) -> None:
    cells = trained(load_recipe(small, ["train.updates=3"]))
    assert {cell.train.updates for cell in cells.values() if cell.train} == {3}
    cells = trained(load_recipe(small, ["envs.Sokoban-v1.train.updates=4"]))
    assert {(key[0], key[1], cell.train.updates) for key, cell in cells.items() if cell.train and key[2] == 0} == {
        *(("EZPoints-v1", method, 7) for method in SMALL["methods"]),
        ("Sokoban-v1", "grpo", 4),
        ("Sokoban-v1", "seed", 8),
        ("Sokoban-v1", "opd-teacher", 4),
    }


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="is a directory; name a recipe file in it"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.updatez=3", "unknown setting 'updatez'; did you mean 'updates'?"),
        ("train.updates=x", "train.updates: input should be a valid integer"),
        ("train.normalise=tokens", "input should be 'token' or 'episode'"),
        ("sedes=[0]", "unknown setting 'sedes'; did you mean 'seeds'?"),
        ("envs=[Sokoban]", "unknown environment of this recipe 'Sokoban'; did you mean 'Sokoban-v1'?"),
        ("envs.EZPoint-v1.train.updates=3", "did you mean 'EZPoints-v1'?"),
        ("envs.Sokoban-v1.env.id=Sokobahn-v1", "unknown environment 'Sokobahn-v1'; did you mean 'Sokoban-v1'?"),
        ("envs.Sokoban-v1.env.options.boxs=2", "unknown option of Sokoban-v1 'boxs'; did you mean 'boxes'?"),
        (
            "envs.Sokoban-v1.train.updatez=3",
            "envs.Sokoban-v1.train: unknown setting 'updatez'; did you mean 'updates'?",
        ),
        ("envs.Sokoban-v1.methods.seed.signal.bta=3", "signal: unknown setting 'bta'; did you mean 'beta'?"),
        ("envs.Sokoban-v1.methods.grpo.stage1.epochs=3", "methods.grpo: stage1 means nothing to this method"),
        ("methods=[grp]", "unknown method 'grp'; did you mean 'grpo'?"),
        ("eval.panel=evil", "unknown panel of EZPoints-v1 'evil'; did you mean 'eval'?"),
        ("policy=orakle", "unknown policy 'orakle'; did you mean 'oracle'?"),
        ("policy=random", "policy 'random' cannot be trained"),
        ("teacher=oracle", "policy 'oracle' cannot be a teacher"),
        ("seeds=[]", "has no cells"),
        ("train", "is not of the form key=value"),
        ("train=[", "is not a YAML value"),
        ("engine=vllm", "engine: expected settings: kind, gpu_memory, tensor_parallel, ... (got 'vllm')"),
        ("train.lora=16", "train.lora: expected settings: rank, alpha, targets, ... (got 16)"),
    ],
)
def test_bad_overrides(small: str, override: str, message: str) -> None:
    with pytest.raises(HarnessError) as error:
        expand(load_recipe(small, [override]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="unknown recipe 'quik'; did you mean 'quick'"):
        load_recipe("quik")
    with pytest.raises(HarnessError, match="no such recipe file"):
        load_recipe(str(tmp_path / "none.yaml"))
    for text, message in (("a: [", "is not YAML"), ("- 1", "does not hold a recipe"), ("name: x", "field required")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(HarnessError, match=message) as error:
            load_recipe(str(tmp_path / "bad.yaml"))
        assert "\n" not in str(error.value)
