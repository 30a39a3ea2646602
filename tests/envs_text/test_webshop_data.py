"""Official files: how they are read, stored, searched, and which goals they give."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plays import oracle, play

from envs_text.webshop import WebShop, build, nouns, records
from envs_text.webshop.goals import NO_CAP, price_cap
from envs_text.webshop.official import open_shop
from envs_text.webshop.records import stream
from envs_text.webshop.search import contents, words
from envs_text.webshop.shop import MemoryShop
from envs_text.webshop.store import DiskShop
from harness.contracts import HarnessError

RAW = ("asin", "name", "full_description", "product_category", "small_description", "customization_options", "category")
"""Fields that the reference products hold as the official file does."""

Converted = list[dict[str, Any]]


@pytest.fixture(scope="module")
def converted(shared_data: Path) -> Converted:
    """100 real products as the original engine converts them."""
    return [json.loads(line) for line in (shared_data / "webshop" / "products_100.jsonl").open()]


@pytest.fixture(scope="module")
def real(converted: Converted) -> Converted:
    """The same products as the official file holds them."""
    products = [row["product"] for row in converted]
    return [{name: p[name] for name in RAW} | {"query": p["query"], "pricing": p["Price"]} for p in products]


@pytest.fixture
def write(tmp_path: Path, shared_data: Path) -> Callable[..., Path]:
    """Writes a directory of official files."""

    def files(products: Converted, requests: Any = None, name: str = "data") -> Path:
        pytest.importorskip("spacy")
        directory = tmp_path / name
        directory.mkdir()
        text = "[\n" + ",\n".join(json.dumps(product, ensure_ascii=False) for product in products) + "\n]"
        (directory / "items_shuffle_1000.json").write_text(text)
        attributes = shared_data / "webshop" / "items_ins_v2_1000.json"
        (directory / "items_ins_v2_1000.json").write_bytes(attributes.read_bytes())
        if requests is not None:
            (directory / "items_human_ins.json").write_text(json.dumps(requests, indent=1))
        return directory

    return files


@pytest.fixture
def shop(write: Callable[..., Path], real: Converted) -> DiskShop:
    return open_shop(write(real))


def in_memory(shop: DiskShop, asins: list[str]) -> MemoryShop:
    return MemoryShop([shop.product(asin) for asin in asins], (), "copy")


def test_products_are_read_as_the_original_reads_them(shop: DiskShop, converted: Converted) -> None:
    assert len(shop) == 100
    for row in converted:
        product, original = shop.product(row["id"]), row["product"]
        assert contents(product) == row["contents"]
        assert product.title == original["Title"]
        assert list(product.options.items()) == [(k, tuple(v)) for k, v in original["options"].items()]
        assert product.price_text == original["Price"]
        assert min(original["pricing"]) <= product.price <= max(original["pricing"])
        assert list(product.attributes) == original["Attributes"]
        assert list(product.bullets) == original["BulletPoints"]
        assert product.rating == original["Rating"]
    assert "B000000000" not in shop
    with pytest.raises(KeyError):
        shop.product("B000000000")


def test_nouns_equal_the_tagger_of_the_reference_values(golden: Any) -> None:
    pytest.importorskip("spacy")
    cases = golden("webshop_reward")["cases"]
    assert [list(found) for found in nouns.tag([case["goal"]["name"] for case in cases])] == [
        case["goal_nouns"] for case in cases
    ]


def test_first_of_two_products_counts_and_bad_codes_are_left_out(write: Callable[..., Path], real: Converted) -> None:
    again = {**real[0], "name": "another"}
    shop = open_shop(write([*real[:3], again, {**real[3], "asin": "nan"}, {**real[4], "asin": "B0000000000"}]))
    assert len(shop) == 3
    assert shop.product(real[0]["asin"]).title == real[0]["name"]


def test_search_finds_by_title_and_ranks_ties_by_catalogue_order(shop: DiskShop, converted: Converted) -> None:
    asins = [row["id"] for row in converted]
    queries = [" ".join(words(row["product"]["Title"])[:6]) for row in converted]
    copies = [replace(shop.product(asin), asin=f"{asin[:8]}{n:02d}") for n in range(10) for asin in asins]
    thousand = MemoryShop(copies, (), "1000")
    start = time.perf_counter()
    found = [thousand.search(query) for query in queries]
    print(f"\n{len(queries) / (time.perf_counter() - start):,.0f} queries/s on {len(thousand)} products")
    for asin, best in zip(asins, found, strict=True):
        assert best[:10] == [f"{asin[:8]}{n:02d}" for n in range(10)]
        assert len(best) <= 50
    assert shop.search("") == shop.search("the of") == shop.search("qqqq") == []
    assert [shop.search(query, 7) for query in queries] == [in_memory(shop, asins).search(q, 7) for q in queries]


def test_goals_are_one_order_of_every_option_combination(shop: DiskShop, converted: Converted) -> None:
    goals = shop.goals("synthetic")
    assert list(goals) == list(in_memory(shop, [row["id"] for row in converted]).goals("synthetic"))
    assert len({goal.id for goal in goals}) == len(goals) > 400
    for goal in goals:
        product = shop.product(goal.asin)
        assert set(goal.options) == set(product.options)
        assert all(value in product.options[name] for name, value in goal.options.items())
        assert goal.instruction.startswith(product.instruction)
        assert goal.price_upper > product.price
        assert (f"lower than {goal.price_upper:.2f} dollars" in goal.instruction) == (goal.price_upper < NO_CAP)
    assert list(goals[3:5]) == [goals[3], goals[4]]
    fewer = in_memory(shop, [row["id"] for row in converted[::2]]).goals("synthetic")
    kept = {goal.asin for goal in fewer}
    assert list(fewer) == [goal for goal in goals if goal.asin in kept]  # other products do not change a goal


def test_goals_are_the_same_in_every_process(write: Callable[..., Path], real: Converted) -> None:
    directory = write(real)
    code = (
        "import sys; from envs_text.webshop.official import open_shop; from dataclasses import astuple;"
        "from harness.contracts import digest; s = open_shop(sys.argv[1]);"
        "print(s.version, digest([astuple(g) for g in s.goals('synthetic')]), digest(s.search('red shoes women')))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code, str(directory)], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_price_caps_are_drawn_as_in_the_original() -> None:
    drawn = Counter(price_cap(19.99, f"{seed:x}") for seed in range(6000))
    assert set(drawn) == {30.0, 40.0, 50.0}  # the larger of two of 20, 30, 40, 50
    assert [round(drawn[cap] / 1000) for cap in (30.0, 40.0, 50.0)] == [1, 2, 3]
    assert price_cap(20.0, "a") > 30
    assert price_cap(975.0, "a") == 990.0
    assert price_cap(980.0, "a") == NO_CAP


def test_human_goals(write: Callable[..., Path], real: Converted) -> None:
    asin = real[0]["asin"]
    wish = {"instruction": "i want a console table.", "instruction_attributes": ["solid wood"]}
    asked = [
        {**wish, "instruction_options": ["walnut"], "worker_id": "A1"},
        {**wish, "instruction_options": ["walnut"], "worker_id": "A2"},
        {**wish, "instruction_attributes": [], "instruction_options": []},
    ]
    shop = open_shop(write(real[:5], {asin: asked, "B000000000": asked}))
    (goal,) = shop.goals("human")
    assert (goal.asin, goal.attributes, goal.options) == (asin, ("solid wood",), ("walnut",))
    assert goal.instruction == f"i want a console table, and price lower than {goal.price_upper:.2f} dollars"
    with pytest.raises(HarnessError, match="holds no human goals"):
        open_shop(write(real[:5], name="without")).goals("human")


def test_interrupted_build_goes_on(
    write: Callable[..., Path], real: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_shop(write(real, name="whole"))
    directory = write(real, name="interrupted")
    tag, batches = nouns.tag, []

    def interrupted(texts: list[str]) -> list[tuple[str, ...]]:
        batches.append(len(texts))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return tag(texts)

    monkeypatch.setattr(build, "BATCH", 30)
    monkeypatch.setattr(nouns, "tag", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_shop(directory)
    (half,) = directory.rglob("products.jsonl")
    with half.open("ab") as file:
        file.write(b'[{"asin": "B0')  # what a killed process may leave
    assert open_shop(directory).version == whole.version
    assert batches == [30, 30, 30, 30, 10]


def test_spacy_is_needed_once_and_its_absence_is_explained(
    write: Callable[..., Path], real: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = write(real[:5], name="built")
    open_shop(built)
    monkeypatch.setattr(nouns, "find_spec", lambda name: None)
    nouns._model.cache_clear()
    assert len(open_shop(built)) == 5
    with pytest.raises(HarnessError, match=r"pip install 'seed-harness\[webshop\]'"):
        open_shop(write(real[:5], name="new"))


def test_store_lies_elsewhere_where_the_directory_is_read_only(
    write: Callable[..., Path], real: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(real[:5])
    (directory / ".seed-harness").touch()  # a file of that name stops even the superuser
    blocked = tmp_path / "blocked"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(HarnessError, match=r"written neither to .*data.* nor to .*blocked"):
        open_shop(directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(open_shop(directory)) == 5
    assert list((tmp_path / "cache" / "seed-harness").iterdir())


PRODUCTS, ATTRIBUTES, HUMAN = "items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json"


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        (PRODUCTS, '"}\n]', "", f"{PRODUCTS}, line 3 (record 2): the file ends within a record"),
        (PRODUCTS, '"asin"', '"isin"', f"{PRODUCTS}, line 2 (record 1): field 'asin' is missing"),
        (PRODUCTS, '"pricing": "$', '"pricing": "', f"{PRODUCTS}, line 2 (record 1): pricing '877.8' holds no price"),
        (PRODUCTS, '"query": "console tables"', '"query": 7', "line 2 (record 1): field 'query' must be a text, not 7"),
        (PRODUCTS, "},\n{", "}\n{", f"{PRODUCTS}, line 3 (record 1): ',' expected, not '{{'"),
        (ATTRIBUTES, "B07DJJXGB5", "B08GFNJN5R", "line 1 (record 2): 'B08GFNJN5R' stands here for the second time"),
        (ATTRIBUTES, '"instruction_attributes"', '"x"', "line 1 (record 2): field 'instruction_attributes' is missing"),
        (HUMAN, '"wish"', "7", f"{HUMAN}, line 2 (record 1): field 'instruction' must be a text, not 7"),
        (HUMAN, '"instruction_options": []', '"instruction_options": [7]', "must be a list of texts, not [7]"),
    ],
)
def test_malformed_file_is_one_line_with_file_and_line(
    write: Callable[..., Path], real: Converted, file: str, old: str, new: str, complaint: str
) -> None:
    wish = {"instruction": "wish", "instruction_attributes": [], "instruction_options": []}
    path = write(real[:2], {"B000000000": [wish]}) / file
    text = path.read_text().replace("[\n    ]", "[]").replace("[]\n", "[]")
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(HarnessError) as caught:
        open_shop(path.parent)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(write: Callable[..., Path], real: Converted, tmp_path: Path) -> None:
    directory = write(real[:2])
    (directory / ATTRIBUTES).rename(directory / "elsewhere")
    with pytest.raises(HarnessError, match=f"not {ATTRIBUTES}, which belongs to it"):
        open_shop(directory)
    (directory / "items_shuffle.json").touch()
    with pytest.raises(HarnessError, match="two catalogues: name one of the files"):
        open_shop(directory)
    with pytest.raises(HarnessError, match=r"items_shuffle_1000.json or items_shuffle.json is needed"):
        open_shop(tmp_path)
    with pytest.raises(HarnessError, match="holds no products"):
        open_shop(write([], name="empty"))


def test_stream_equals_json_and_goes_on_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"a": 'é\n"[{', "b": [1, -2.5e3, None]}, [], "x\\", 12, True, {"long": "ü" * 50}]
    path = tmp_path / "file.json"
    for chunk in (1, 7, 1 << 20):
        monkeypatch.setattr(records, "CHUNK", chunk)
        for indent in (None, 2):
            path.write_text(json.dumps(values, indent=indent, ensure_ascii=False) + "\n")
            found = list(stream(path))
            assert [record.value for record in found] == values
            for number, record in enumerate(found):
                assert [rest.value for rest in stream(path, record.after)] == values[number + 1 :]
            assert path.read_text().splitlines()[found[-1].line - 1].strip().startswith(("{", "["))
            path.write_text(json.dumps(dict(zip("abcdef", values, strict=True)), indent=indent))
            assert [(record.key, record.value) for record in stream(path)] == list(zip("abcdef", values, strict=True))
    for broken in ("", "{", "[1", "[1,", "[1]]", "[1 2]", '{"a" 1}', "{1: 2}", "[tru]", "7", '["a\n"]'):
        path.write_text(broken)
        with pytest.raises(HarnessError, match=r"file.json, line \d"):
            list(stream(path))


@pytest.mark.parametrize(("reward", "wins"), [("fixed", 1.0), ("official", 0.9)])
def test_the_environment_plays_official_files(
    write: Callable[..., Path], real: Converted, reward: str, wins: float
) -> None:
    """Panels, their disjointness and the expert on real products; the original's defect makes some goals unwinnable."""
    env = WebShop(data=str(write(real)), reward=reward)
    train, evaluation = env.panel("train", 60), env.panel("test")
    assert env.panel("eval").hash == evaluation.hash
    assert not {task.fingerprint for task in train} & {task.fingerprint for task in evaluation}
    assert evaluation.notes
    won = [play(env, task, oracle).success for task in (*train, *evaluation.tasks[:40])]
    assert sum(won) / len(won) >= wins
