"""Whatever a recipe, an override or a skill library holds: it is read, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nasty import NASTY, few, texts

from harness import library, recipes
from harness.cli import main
from harness.contracts import HarnessError
from harness.library import load_library
from harness.recipes import expand, load_recipe

WORDS = ("grpo", "tiny", "Sokoban-v1", "train", "updates", "envs", "methods", "variants", "of", "seed", "options", "id")
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**70, float("nan"), float("inf"), -1e300, *WORDS]),
    texts,
    st.dates(),
)
keys = st.one_of(st.sampled_from(WORDS), texts)
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner)), max_leaves=6
)


def refused_or(read: Callable[[], Any]) -> None:
    with suppress(HarnessError):
        read()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "file.yaml"


@few
@given(
    st.one_of(
        values.map(lambda value: yaml.safe_dump(value).encode()),
        st.binary(max_size=40),
        texts.map(lambda t: t.encode("utf-8", "replace")),
    )
)
def test_any_file_is_a_recipe_or_none(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    refused_or(lambda: load_recipe(str(file)))


@few
@given(st.data())
def test_any_value_in_any_place_of_a_recipe(file: Path, data: st.DataObject) -> None:
    recipe = yaml.safe_load(recipes.packaged()["quick"].read_text())
    file.write_text(yaml.safe_dump(planted(recipe, data)))
    refused_or(lambda: expand(load_recipe(str(file))))


@few
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join), st.one_of(texts, values.map(str)))
def test_any_override(key: str, value: str) -> None:
    refused_or(lambda: load_recipe("quick", [f"{key}={value}"]))
    refused_or(lambda: load_recipe("quick", [value]))


@few
@given(st.data())
def test_any_value_in_any_place_of_a_skill_library(file: Path, data: st.DataObject) -> None:
    sound = json.loads(next(iter(library.packaged().values())).read_text())
    sound["skills"] = sound["skills"][:2]
    file.with_suffix(".json").write_text(json.dumps(planted(sound, data), default=str))
    refused_or(lambda: load_library(str(file.with_suffix(".json"))))


def planted(tree: Any, data: st.DataObject) -> Any:
    """The tree with a drawn value in a drawn place."""
    inner = sorted(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    if not inner or data.draw(st.integers(0, 3)) == 0:
        return data.draw(values)
    place = data.draw(st.sampled_from(list(inner)))
    tree[place] = planted(tree[place], data)
    return tree


@pytest.mark.parametrize(
    "text",
    [
        "2000-99-99",
        "[" * 3000,
        "!!python/object/apply:os.system ['exit 3']",
        "!!timestamp x",
        "&a [*a]",
        "0x" + "f" * 5000,
        '"\\ud800"',
        "{[1]: 2}",
    ],
    ids=lambda text: text[:12],
)
def test_what_yaml_can_spell_and_we_cannot_use(file: Path, text: str) -> None:
    file.write_text(f"name: x\nmethods: [grpo]\nenvs: []\nsummary: {text}\n")
    with pytest.raises(HarnessError):
        load_recipe(str(file))
    with pytest.raises(HarnessError):
        load_recipe("quick", [f"train.updates={text}"])


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/../b", "/etc", "a\x00b", "a\nb", "a\\b", ".hidden", "x" * 500, "\x1b[2J"]
)
def test_names_that_are_no_paths_of_ours(file: Path, name: str) -> None:
    recipe = yaml.safe_load(recipes.packaged()["quick"].read_text())
    file.write_text(yaml.safe_dump(recipe | {"name": name}))
    with pytest.raises(HarnessError):
        load_recipe(str(file))
    file.write_text(yaml.safe_dump(recipe | {"variants": {name: {"of": "grpo"}}}))
    with pytest.raises(HarnessError):
        load_recipe(str(file))


def test_seeds_are_what_generators_take() -> None:
    for seed in ("-1", "99999999999999999999"):
        with pytest.raises(HarnessError, match="seeds"):
            load_recipe("quick", [f"seeds=[{seed}]"])


@pytest.mark.parametrize("text", [*NASTY, "x" * 5000])
def test_hostile_arguments_end_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run", "--dry-run", "--", text], ["check", "--", text], ["report", "--", text]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("harness: ")
        assert len(said.rstrip("\n").splitlines()) == 1
        assert "\x1b" not in said
