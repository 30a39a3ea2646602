"""Skills: parser and insertion against the official code's values, the analysis prompt, controls, annotators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_endpoint import Reply, pictures_of, planned, rejects, says, serving

from harness.annotators import annotate
from harness.contracts import Episode, HarnessError, Image, Prompt, Response, Skill, Step, StopReason, Task
from harness.skill_measures import audit_skills
from harness.skills import (
    PHRASES,
    analysis_prompt,
    insert_skill,
    parse_skill,
    read_skill,
    shuffle_skills,
    skill_answer,
)

Golden = Callable[[str], Any]
ANSWER = skill_answer("The agent opened the drawer first.", "Search closed containers first.")


def picture(shade: int) -> Image:
    return np.full((2, 2, 3), shade, dtype=np.uint8)


def make_episode(shades: tuple[int, ...] = (), steps: int = 4, success: bool = True, name: str = "train/0") -> Episode:
    """An episode with numbered steps, the last of them invalid; one picture per step where shades are given."""
    episode = Episode(Task(name, "Test-v1", "train", "kind", {}, name), 0, "put a mug in the sink.")
    for number in range(steps):
        images = (picture(shades[number]),) if shades else ()
        episode.steps.append(
            Step(
                observation={"text": f"You see drawer {number}.", "images": images},
                prompt=Prompt("prompt"),
                response=Response(f"<think>long thought {number}</think><action>open drawer {number}</action>"),
                action=f"open drawer {number}",
                valid=number < steps - 1,
                reward=0.0,
            )
        )
    episode.stop_reason = StopReason.SUCCESS if success else StopReason.MAX_STEPS
    return episode


def words(prompt: Prompt) -> int:
    return len(prompt.text.split())


# --------------------------------------------------------------------------------------------------- parser


def test_parser_equals_golden(golden: Golden) -> None:
    """All cases of the published (policy) back-end, except that an unhashable key is an error like any other."""
    for case in golden("skill_parser")["cases"]:
        parsed, expected = parse_skill(case["input"]), case["expected"]
        assert bool(parsed.error) == (expected["raised"] is not None), case["id"]
        assert (parsed.summary, parsed.skill) == (expected["episode_summary"], expected["episode_skill"]), case["id"]
        assert parsed.usable == expected["ok_policy"], case["id"]


@pytest.mark.parametrize(
    "answer",
    [
        "{" * 20_000,
        '{"a":' * 5_000,
        '{"episode_skill":' + "9" * 5_000 + "}",
        "{'episode_skill':" + "(" * 5_000,
        "```" * 2_000,
    ],
    ids=["braces", "deep", "digits", "parentheses", "fences"],
)
def test_parser_survives_degenerate_answers(answer: str) -> None:
    assert not parse_skill(answer).usable


def test_skill_text_can_always_be_encoded() -> None:
    assert parse_skill('{"episode_skill": "half \\ud83d pair"}').skill == "half \N{REPLACEMENT CHARACTER} pair"


@pytest.mark.parametrize(
    "skill", ["plain", 'quotes "x" and \\ slashes', "line\nbreak {brace} ```fence``` ,]", "größe 数"]
)
def test_answers_are_read_back_exactly(skill: str) -> None:
    parsed = parse_skill(skill_answer("sum {mary}", skill))
    assert (parsed.summary, parsed.skill, parsed.error) == ("sum {mary}", skill, "")


def test_unreadable_answers_keep_their_provenance() -> None:
    skill = read_skill("no json", "policy", 7)
    assert (skill.usable, skill.author, skill.update, skill.raw) == (False, "policy", 7, "no json")


# ------------------------------------------------------------------------------------------------ insertion


def test_insertion_equals_golden(golden: Golden) -> None:
    for case in golden("skill_insertion")["cases"]:
        expected = case["expected"]
        images = (picture(0),) * case["prompt"].count("<image>")
        text = insert_skill(Prompt(case["prompt"], images), case["skill"]).text
        if not expected["inserted"]:
            assert text == expected["output"], case["id"]
            continue
        assert text.startswith(expected["before"]), case["id"]
        assert text.endswith(expected["after"]), case["id"]
        block = text[len(expected["before"]) : len(text) - len(expected["after"])]
        assert block.startswith("**Episode-Level Skill**\n"), case["id"]
        assert block.endswith(f"\n{expected['block_tail']}"), case["id"]
        assert len(block.split("\n")) == expected["block_lines"], case["id"]


def test_inserted_text_cannot_add_images() -> None:
    prompt = insert_skill(Prompt("Your goal is to win.\n<image>", (picture(3),)), "look at <image>")
    assert "[look at (image)]" in prompt.text
    assert len(prompt.images) == 1


def test_empty_skill_leaves_the_prompt_alone() -> None:
    prompt = Prompt("Your task is to: x\nRest")
    assert insert_skill(prompt, "  ") == prompt


# ------------------------------------------------------------------------------------------ analysis prompt


@pytest.mark.parametrize("style", ["paper", "compact"])
def test_analysis_prompt_depends_on_the_outcome_and_tells_what_was_seen(style: str) -> None:
    won, _ = analysis_prompt(make_episode(), style, 10_000, words)
    lost, _ = analysis_prompt(make_episode(success=False), style, 10_000, words)
    assert won is not None
    assert lost is not None
    assert "success" in won.text
    assert "failure" in lost.text
    for number in range(4):
        assert f"You see drawer {number}." in won.text
        assert f"open drawer {number}" in won.text
    assert "put a mug in the sink." in won.text
    assert ("long thought" in won.text) == (style == "paper")
    assert words(won) < 200


def test_compact_prompt_is_short_and_made_of_phrases() -> None:
    prompt, _ = analysis_prompt(make_episode(steps=2), "compact", 10_000, words)
    assert prompt is not None
    assert prompt.text == (
        "Analyse the episode.\nOutcome: success\nTask: put a mug in the sink."
        "\nObs: You see drawer 0.\nAct: open drawer 0\nObs: You see drawer 1.\nInvalid: open drawer 1"
    )
    assert len(set(PHRASES)) == len(PHRASES)


def test_images_stand_where_they_were_seen() -> None:
    episode = make_episode(shades=(1, 1, 2, 1))
    paper, _ = analysis_prompt(episode, "paper", 10_000, words)
    compact, _ = analysis_prompt(episode, "compact", 10_000, words)
    assert paper is not None
    assert compact is not None
    assert [int(image[0, 0, 0]) for image in paper.images] == [1, 1, 2, 1]
    assert [int(image[0, 0, 0]) for image in compact.images] == [1]
    assert "\nObs: <image>You see drawer 0." in compact.text


@pytest.mark.parametrize("style", ["paper", "compact"])
def test_long_episodes_lose_their_oldest_steps_but_never_the_first(style: str) -> None:
    episode = make_episode(steps=40)
    whole, none = analysis_prompt(episode, style, 100_000, words)
    assert whole is not None
    assert none == 0
    limit = words(whole) * 2 // 3
    prompt, dropped = analysis_prompt(episode, style, limit, words)
    assert prompt is not None
    assert words(prompt) <= limit
    seen = [number for number in range(40) if f"You see drawer {number}." in prompt.text]
    assert seen == [0, *range(dropped + 1, 40)]
    one_more, _ = analysis_prompt(episode, style, words(prompt) - 1, words)
    assert one_more is not None
    assert words(one_more) < words(prompt)
    assert analysis_prompt(episode, style, 5, words) == (None, 39)


# ------------------------------------------------------------------------------------------------- controls


def skills_of(texts: list[str]) -> list[Skill]:
    return [Skill(text, "", "policy", 0, "") for text in texts]


def test_shuffled_skills_come_from_other_groups_and_keep_the_distilled_episodes() -> None:
    groups = [0] * 4 + [1] * 4 + [2] * 4
    skills = skills_of([f"{group}-{index}" if index != 5 else "" for index, group in enumerate(groups)])
    shuffled = shuffle_skills(skills, groups, (1, 2))
    assert shuffled == shuffle_skills(skills, groups, (1, 2))
    assert shuffled != shuffle_skills(skills, groups, (1, 3))
    assert [skill.usable for skill in shuffled] == [skill.usable for skill in skills]
    assert sorted(skill.text for skill in shuffled) == sorted(skill.text for skill in skills)
    assert all(skill.text[0] != str(group) for skill, group in zip(shuffled, groups, strict=True) if skill.usable)


@pytest.mark.parametrize("groups", [[0, 0, 0], [0, 0, 0, 0, 1], [0, 1]])
def test_shuffle_never_returns_the_own_skill(groups: list[int]) -> None:
    skills = skills_of([str(index) for index in range(len(groups))])
    shuffled = shuffle_skills(skills, groups, (0,))
    assert all(before.text != after.text for before, after in zip(skills, shuffled, strict=True))


def test_a_lonely_skill_is_withheld() -> None:
    assert not any(skill.usable for skill in shuffle_skills(skills_of(["only", ""]), [0, 1], (0,)))


def test_audit_counts() -> None:
    episodes = [make_episode() for _ in range(4)]
    audit = audit_skills(skills_of(["open drawer 1 first", "look around", "look around", ""]), episodes)
    assert (audit.count, audit.usable) == (4, 0.75)
    assert audit.words == pytest.approx(8 / 3)
    assert audit.duplicates == pytest.approx(1 / 3)
    assert audit.instances == pytest.approx(1 / 3)


# ----------------------------------------------------------------------------------------------- annotators


class ScriptedEnv:
    """Only what ``annotate`` needs of an environment."""

    def brief(self, text: str) -> str:
        return text

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        return ("sum", 'use "this"') if episode.success else None


def test_scripted_annotator() -> None:
    skills = annotate([make_episode(), make_episode(success=False)], "scripted", ScriptedEnv()).skills  # type: ignore[arg-type]
    assert [(skill.text, skill.author, skill.update) for skill in skills] == [
        ('use "this"', "scripted", -1),
        ("", "scripted", -1),
    ]


def named(task: str) -> Episode:
    episode = make_episode(shades=(5, 6), steps=2)
    episode.task_text = task
    return episode


def test_an_annotator_has_a_proper_name() -> None:
    with pytest.raises(HarnessError, match=r"annotator .*'scriptd' is not of the form MODEL@BASE_URL"):
        annotate([], "scriptd", ScriptedEnv())  # type: ignore[arg-type]


def test_an_endpoint_that_misbehaves_costs_only_the_unreadable_answers() -> None:
    pytest.importorskip("openai")
    plan = {
        "good": [says(ANSWER)],
        "busy": [Reply(status=429), Reply("oops", 500), says(ANSWER)],
        "prose": [says("I would rather not answer in JSON.")],
        "silent": [says(None)],
        "toolong": [rejects("context length")],
        "down": [Reply(status=503)],
    }
    with serving(planned(plan)) as endpoint:
        found = annotate([named(task) for task in plan], endpoint.name, ScriptedEnv())  # type: ignore[arg-type]
    skills = found.skills
    assert [skill.usable for skill in skills] == [True, True] + [False] * 4
    assert skills[1].text == "Search closed containers first."
    assert skills[2].raw == "I would rather not answer in JSON."
    assert {skill.author for skill in skills} == {"some/model"}
    assert endpoint.requests[0]["temperature"] == 0.0
    assert len(pictures_of(endpoint.requests[0])) == 2


def test_an_endpoint_that_never_answers_is_an_error() -> None:
    pytest.importorskip("openai")
    with (
        serving(lambda request: Reply(status=503)) as endpoint,
        pytest.raises(HarnessError, match=r"not one of 2 requests to .* was answered: status 503"),
    ):
        annotate([named("a"), named("b")], endpoint.name, ScriptedEnv())  # type: ignore[arg-type]
