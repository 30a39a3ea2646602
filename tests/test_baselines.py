"""The registered methods: each is a valid point with its own page, ties to its neighbours, and refuses nonsense."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from harness.contracts import HarnessError
from harness.methods import Advantage, GatedNLL, Method, get_method
from harness.recipes import vary
from harness.registry import METHODS, registered

ROOT = Path(__file__).resolve().parents[1]

NAMES = {
    *("vanilla", "skill-prompt", "sft-teacher", "grpo", "grpo-sft-start", "rloo", "gigpo", "skill-grpo", "opsd"),
    *("grpo-opsd", "skill-sd", "rlsd", "sdar", "opd-teacher", "opd-teacher-grpo", "seed"),
}


def points() -> list[Method]:
    return [get_method(name) for name in sorted(NAMES)]


def axes(method: Method) -> dict[str, Any]:
    """What the trainer reads of a method."""
    return method.model_dump(exclude={"name", "summary"})


def test_the_whole_family_is_registered() -> None:
    assert set(registered(METHODS)) >= NAMES
    assert [point.name for point in points()] == sorted(NAMES)


def test_every_baseline_file_is_registered() -> None:
    modules = {f"baselines.{path.stem}" for path in (ROOT / "baselines").glob("*.py") if path.stem != "__init__"}
    ours = {entry.module for entry in entry_points(group=METHODS) if entry.module.startswith("baselines.")}
    assert modules == ours


def test_methods_differ_in_summary_and_in_what_the_trainer_reads() -> None:
    summaries = [point.summary for point in points()]
    assert all(summaries)
    assert len(set(summaries)) == len(summaries)
    assert len({point.model_dump_json(exclude={"name", "summary"}) for point in points()}) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_method_has_a_page(name: str) -> None:
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.is_file(), f"{page.relative_to(ROOT)} is missing"
    assert f"methods/{name}.md" in (ROOT / "docs" / "README.md").read_text(), "docs/README.md does not list it"


# ------------------------------------------------------------------------------------------------------- neighbours


NEIGHBOURS = [
    ("grpo", {"start": "hindsight_sft"}, "grpo-sft-start"),
    ("grpo", {"rollout": "library", "evaluation": ["plain", "library"]}, "skill-grpo"),
    ("grpo", {"advantage": {"estimator": "gigpo"}}, "gigpo"),
    ("grpo", {"advantage": {"estimator": "leave_one_out", "divide_by_std": False}}, "rloo"),
    ("sdar", {"signal": {"beta": 0.0}}, "grpo-opsd"),
    ("sdar", {"advantage": None}, "opsd"),
    ("sdar", {"signal": {"kind": "reweighting"}}, "rlsd"),
    ("sdar", {"signal": {"kind": "importance_k3"}}, "skill-sd"),
    ("seed", {"start": "base", "teacher": {"context": "library"}}, "sdar"),
    ("opd-teacher-grpo", {"advantage": None}, "opd-teacher"),
    ("vanilla", {"evaluation": ["library"]}, "skill-prompt"),
    ("vanilla", {"start": "teacher_sft"}, "sft-teacher"),
]


@pytest.mark.parametrize(("name", "overlay", "neighbour"), NEIGHBOURS, ids=str)
def test_a_method_becomes_its_neighbour(name: str, overlay: dict[str, Any], neighbour: str) -> None:
    assert axes(vary(get_method(name), overlay, "here")) == axes(get_method(neighbour))


def test_only_methods_with_updates_or_a_fine_tuned_start_train() -> None:
    assert {point.name for point in points() if not point.trains} == {"vanilla", "skill-prompt"}
    assert {point.name for point in points() if not point.learns} == {"vanilla", "skill-prompt", "sft-teacher"}


def test_only_seed_writes_skills_and_who_reads_a_library() -> None:
    assert {point.name for point in points() if point.writes_skills} == {"seed"}
    assert {point.name for point in points() if point.reads_library} == {
        *("skill-prompt", "skill-grpo", "opsd", "grpo-opsd", "skill-sd", "rlsd", "sdar"),
    }


SEED_VARIANTS: dict[str, dict[str, Any]] = {
    "without hindsight SFT": {"start": "base"},
    "frozen analyzer": {"teacher": {"analyzer": "start"}},
    "external analyzer": {"teacher": {"analyzer": "external"}},
    "static library": {"teacher": {"context": "library"}},
    "another attempt's skill": {"teacher": {"context": "same_task_skill"}},
    "another task's skill": {"teacher": {"context": "other_task_skill"}},
    "empty skill": {"teacher": {"context": "empty_skill"}},
    "oracle's skill": {"teacher": {"context": "oracle_skill"}},
    "gate off": {"signal": {"beta": 0.0}},
    "centred gate": {"signal": {"centred": True}},
    "successes only": {"teacher": {"episodes": "successes"}},
    "failures only": {"teacher": {"episodes": "failures"}},
    "current teacher": {"teacher": {"weights": "current"}},
    "frozen teacher": {"teacher": {"weights": "start"}},
    "full-vocabulary reverse KL": {
        "teacher": {"weights": "current"},
        "signal": {"kind": "reverse_kl", "vocabulary": "full"},
    },
    "rehearsal": {"rehearsal": {"coefficient": 0.1}},
}
"""Ablations and controls of SEED, as what differs from it."""


@pytest.mark.parametrize("variant", SEED_VARIANTS)
def test_every_control_of_seed_is_one_option(variant: str) -> None:
    varied = vary(get_method("seed"), SEED_VARIANTS[variant], "here")
    assert axes(varied) != axes(get_method("seed"))


# ---------------------------------------------------------------------------------------------------------- refusals


OWN: dict[str, Any] = {"weights": "update_start", "context": "own_skill"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"teacher": OWN}, "a teacher needs a signal"),
    ("grpo", {"signal": {"kind": "gated_nll"}}, "a signal needs a teacher"),
    ("grpo", {"evaluation": ["plain", "plain"]}, "names a kind of prompt twice"),
    ("seed", {"start": "base", "rehearsal": {}}, "rehearsal repeats the pairs of stage 1"),
    ("vanilla", {"rollout": "library"}, "has no updates to play"),
    ("vanilla", {"start": "hindsight_sft", "rehearsal": {}}, "or rehearse in"),
    ("seed", {"teacher": {"weights": "external"}}, "an external teacher needs reverse_kl"),
    ("rlsd", {"advantage": None}, "scales an advantage, and this method has none"),
    ("rlsd", {"teacher": {"weights": "current"}}, "cannot be the policy being optimised"),
    ("seed", {"signal": {"kind": "reverse_kl", "vocabulary": "full"}}, "use current or start"),
    ("sdar", {"teacher": {"context": "plain"}}, "use empty_skill as control"),
    ("sdar", {"teacher": {"weights": "current", "context": "plain"}}, "is the student itself"),
    ("sdar", {"teacher": {"analyzer": "start"}}, "nobody writes skills for the context library"),
    ("seed", {"teacher": {"context": "empty_skill", "episodes": "failures"}}, "holds no skill"),
    (
        "seed",
        {"teacher": {"context": "empty_skill", "weights": "start"}},
        "the control of a policy that teaches itself",
    ),
    ("sdar", {"rollout": "library"}, "would read the same skills"),
    ("rloo", {"advantage": {"divide_by_std": True}}, "set divide_by_std to false"),
    ("grpo", {"advantage": {"step_weight": 0.5}}, "belong to the estimator gigpo"),
    ("grpo", {"advantage": {"gamma": 0.9}}, "belong to the estimator gigpo"),
    ("seed", {"signal": {"centred": True, "beta": 0.0}}, "zero everywhere"),
]


@pytest.mark.parametrize(("name", "overlay", "reason"), REFUSED, ids=str)
def test_what_means_nothing_is_refused_with_the_reason(name: str, overlay: dict[str, Any], reason: str) -> None:
    with pytest.raises(HarnessError, match=reason) as refusal:
        vary(get_method(name), overlay, "variants.mine")
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("variants.mine")


def test_signals_do_not_take_each_others_settings() -> None:
    with pytest.raises(HarnessError, match="vocabulary"):
        vary(get_method("seed"), {"signal": {"vocabulary": "full"}}, "here")
    with pytest.raises(HarnessError, match="beta"):
        vary(get_method("rlsd"), {"signal": {"beta": 1.0}}, "here")


def test_defaults_are_those_of_the_released_scripts() -> None:
    assert get_method("seed").signal == GatedNLL(coefficient=0.01, beta=5.0)
    assert get_method("grpo").advantage == Advantage(
        estimator="group", statistics="trajectory", divide_by_std=True, std="population", degenerate="drop"
    )
