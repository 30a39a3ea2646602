"""The reward against values computed by the original code."""

from __future__ import annotations

from typing import Any

import pytest

from envs_text.webshop.catalogue import Goal, Product
from envs_text.webshop.rewards import Score, normalize_colour, score, similarity

MENDED = {
    "107-opt-colour-word-as-key",  # the option's NAME is a colour: the original drops the value
    "112-opt-empty-value",  # values without a letter or digit match nothing in the original
    "115-opt-emoji",
    *(
        f"{number}-optsame-{value}"  # the value contains a colour name
        for number, value in (
            (121, "tangerine"), (123, "stonewash"), (125, "standard"), (127, "infrared"), (133, "washable_grey"),
            (135, "multicolored"), (143, "lightning"), (145, "sandstone"), (147, "bluetooth"), (149, "with_stand"),
            (151, "credit_card"), (155, "hundred"), (157, "goldenrod"), (159, "pinkish"),
        )
    ),
}  # fmt: skip
"""Cases in which the product was bought exactly as wanted and the original does not say so."""


def judge(case: dict[str, Any], official: bool) -> Score:
    p, g = case["product"], case["goal"]
    options = g["goal_options"]
    product = Product(
        asin="B000000000", title=p["Title"], name=p["name"], category="", query=p["query"],
        product_category=p["product_category"], description=p["Description"], bullets=tuple(p["BulletPoints"]),
        reviews=(), rating="N.A.", attributes=tuple(p["Attributes"]), options={}, price=case["price"], price_text="",
        instruction="", instruction_attributes=(), nouns=tuple(case["product_nouns"]),
    )  # fmt: skip
    goal = Goal(
        id="", asin="B000000000", query=g["query"], name=g["name"], product_category=g["product_category"],
        nouns=tuple(case["goal_nouns"]), category="", instruction="", attributes=tuple(g["attributes"]),
        options=options if isinstance(options, dict) else tuple(options), price_upper=g["price_upper"],
    )  # fmt: skip
    return score(goal, product, case["price"], case["options"], official)


def parts(result: Score) -> dict[str, Any]:
    """A score under the original's names; ratios and weights follow from the counts."""
    count = result.attributes_wanted + result.options_wanted + 1
    named: dict[str, Any] = {
        "total": result.total,
        "r_type": result.type,
        "title_score": result.title,
        "query_match": result.same_query,
        "category_match": result.same_category,
        "num_attr_matches": result.attributes,
        "r_att": result.attributes / result.attributes_wanted,
        "w_att": result.attributes_wanted / count,
        "num_option_matches": result.options,
        "r_price": result.price,
        "w_price": 1 / count,
    }
    if result.options_wanted:
        named["r_option"] = result.options / result.options_wanted
        named["w_option"] = result.options_wanted / count
    return named


def test_official_score_and_parts_equal_the_original(golden: Any) -> None:
    cases = [case for case in golden("webshop_reward")["cases"] if "raised" not in case["expected"]]
    assert len(cases) == 228
    for case in cases:
        assert parts(judge(case, official=True)) == pytest.approx(case["expected"], abs=1e-12), case["id"]


def test_goals_on_which_the_original_crashes_are_scored(golden: Any) -> None:
    totals = {c["id"]: judge(c, True).total for c in golden("webshop_reward")["cases"] if "raised" in c["expected"]}
    assert totals == {"048-price-cap-zero": 0.5, "049-price-cap-negative": 0.5, "079-attr-empty-goal": 1.0}


def test_mended_score_differs_only_where_the_right_option_was_refused(golden: Any) -> None:
    differ = set()
    for case in golden("webshop_reward")["cases"]:
        ours, original = judge(case, official=False), judge(case, official=True)
        if ours != original:
            differ.add(case["id"])
            assert ours.options == ours.options_wanted > original.options
    assert differ == MENDED


def test_fuzzy_match_equals_the_original_library(golden: Any) -> None:
    for pair in golden("webshop_reward")["fuzz_pairs"]:
        assert similarity(pair["a"], pair["b"]) == pair["token_set_ratio_thefuzz_0_19"], pair


def test_colours_equal_the_original(golden: Any) -> None:
    for row in golden("webshop_reward")["normalize_color"]:
        assert normalize_colour(row["input"]) == row["expected"]
