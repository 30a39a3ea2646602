"""Hindsight skills: the prompt that asks for one, the parser of the answer, and its place in a step prompt."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from harness.contracts import IMAGE_PLACEHOLDER, Episode, Image, Prompt, Skill, Step, plain
from harness.inert import readable

# ------------------------------------------------------------------------------------------ analysis prompt

_PAPER_HEAD = """\
You review one finished episode of an acting agent and write down what it teaches. Reply with a single JSON object and \
no other text.

Fields:
1. "episode_summary": in one or two sentences, what happened and what decided the result.
2. "episode_skill": {lesson}

Rules:
- State one short skill, addressed to the agent that will act; do not narrate the episode again.
- Use exactly these two fields, both at the top level.

Shape of the answer:
{{"episode_summary": "...", "episode_skill": "..."}}
"""

_LESSONS = {
    True: "the episode succeeded, so give the workflow behind it: the rule that decided each choice and the order in "
    "which the actions have to come.",
    False: "the episode failed, so give the rule that avoids it: the mistake that decided the result and the signs "
    "that warn of it.",
}

_COMPACT_HEAD = {True: "Analyse the episode.\nOutcome: success\n", False: "Analyse the episode.\nOutcome: failure\n"}
_COMPACT_TASK, _COMPACT_OBS, _COMPACT_ACT, _COMPACT_INVALID = "Task: ", "\nObs: ", "\nAct: ", "\nInvalid: "


def as_it_is(text: str) -> str:
    """The text itself."""
    return text


def analysis_prompt(
    episode: Episode,
    style: str,
    max_tokens: int,
    count_tokens: Callable[[Prompt], int],
    brief: Callable[[str], str] = as_it_is,
) -> tuple[Prompt | None, int]:
    """The message that asks for the summary and the skill of a finished episode (paper, section on the analyser).

    Only what the agent saw is told: task, outcome, observations, its own answers. Rewards and expert actions are not.

    Args:
        episode: A finished episode; the instruction depends on whether it succeeded.
        style: ``"paper"`` quotes whole responses; ``"compact"`` quotes parsed actions under short headings, and shows
            only the first step's images: what follows is told by the actions.
        max_tokens: Limit of the encoded prompt. Longer prompts lose their oldest steps first, but never step 0.
        count_tokens: Length of a prompt in tokens, e.g. ``Policy.prompt_tokens``.
        brief: How the compact style quotes observations and actions, ``AgentEnv.brief``.

    Returns:
        (prompt, dropped steps). The prompt is None where it does not fit even with step 0 alone.
    """
    most = max(len(episode.steps) - 1, 0)
    if count_tokens(whole := render_analysis(episode, style, most, brief)) <= max_tokens:
        return whole, 0
    # Prompt length grows with the number of kept steps, so the largest number that fits is found by bisection.
    best: Prompt | None = None
    fits, too_many = -1, most
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens(prompt := render_analysis(episode, style, middle, brief)) <= max_tokens:
            best, fits = prompt, middle
        else:
            too_many = middle
    return best, most - max(fits, 0)


def render_analysis(episode: Episode, style: str, latest: int, brief: Callable[[str], str] = as_it_is) -> Prompt:
    """The analysis prompt with step 0 and at most the ``latest`` steps of those behind it."""
    numbered = list(enumerate(episode.steps))
    kept = numbered[:1] + numbered[1:][max(len(numbered) - 1 - latest, 0) :]
    return _paper_prompt(episode, kept) if style == "paper" else _compact_prompt(episode, kept, brief)


def _paper_prompt(episode: Episode, steps: Sequence[tuple[int, Step]]) -> Prompt:
    lines = [_PAPER_HEAD.format(lesson=_LESSONS[episode.success])]
    if episode.task_text:
        lines.append(f"Task: {_quoted(episode.task_text)}")
    lines.append(f"Outcome (episode_success): {'success' if episode.success else 'failure'}")
    lines.append("Trajectory:")
    images: list[Image] = []
    for number, step in steps:
        images += step.observation["images"]
        lines.append(f"[Step {number}]")
        lines.append(f"Observation: {_observation(_quoted(step.observation['text']), step.observation['images'])}")
        lines.append(f"Response: {_quoted(step.response.text)}")
        lines.append(f"Action valid: {'yes' if step.valid else 'no'}")
    return Prompt("\n".join(lines), tuple(images))


def _compact_prompt(episode: Episode, steps: Sequence[tuple[int, Step]], brief: Callable[[str], str]) -> Prompt:
    text = _COMPACT_HEAD[episode.success]
    if episode.task_text:
        text += _COMPACT_TASK + plain(episode.task_text)
    images = steps[0][1].observation["images"] if steps else ()
    for number, step in steps:
        if observation := _observation(plain(brief(step.observation["text"])), images if number == 0 else ()):
            text += _COMPACT_OBS + observation
        text += (_COMPACT_ACT if step.valid else _COMPACT_INVALID) + plain(brief(step.action))
    return Prompt(text.strip(), tuple(images))


def _observation(text: str, images: Sequence[Image]) -> str:
    return IMAGE_PLACEHOLDER * len(images) + text.strip()


_FORGED = re.compile(
    r"([\n\r\v\f\x1c-\x1e\x85\u2028\u2029])"
    r"(?=\[Step |(?:Rules|Task|Outcome|Trajectory|Observation|Response|Action valid)\b[^\n:]*:)"
)


def _quoted(text: str) -> str:
    """Text quoted by an analysis prompt of the paper style: none of its later lines passes for one of the prompt's."""
    return _FORGED.sub(r"\1 ", plain(text))


# --------------------------------------------------------------------------------------------------- answer


def skill_answer(summary: str, skill: str) -> str:
    """The answer an analyser should write: what stage 1 trains on. ``parse_skill`` reads it back exactly."""
    return json.dumps({"episode_summary": summary, "episode_skill": skill}, ensure_ascii=False)


class ParsedSkill(NamedTuple):
    """What ``parse_skill`` found.

    Attributes:
        summary, skill: The two fields as text; empty where missing.
        error: Why no object could be read, else empty.
    """

    summary: str
    skill: str
    error: str

    @property
    def usable(self) -> bool:
        """Whether the episode gets a distillation term (v_tau of the paper)."""
        return not self.error and bool(self.skill.strip())


LONGEST, STARTS = 100_000, 200
"""Characters of the longest answer that is read, and at how many braces an object is looked for: both bound time."""


def parse_skill(answer: str) -> ParsedSkill:
    """Read an analyser's answer, forgivingly; never raises.

    Objects are looked for in fenced blocks first, then in the whole text, at every ``{``, also after removal of
    trailing commas; where a text holds no JSON object, balanced braces are read as a Python literal. The first object
    with an ``episode_skill`` counts, else the first object. Values that are no strings become their Python text.
    """
    if len(answer) > LONGEST:
        return ParsedSkill("", "", f"an answer of more than {LONGEST:,} characters")
    *closed, _ = answer.split("```")
    fenced = [re.sub(r"^\w*\s*", "", block) for block in closed[1::2]]
    first: dict[Any, Any] | None = None
    for text in [*fenced, answer]:
        for variant in (text, re.sub(r",\s*([}\]])", r"\1", text)):
            for found in list(_json_objects(variant)) or _literal_objects(variant):
                if "episode_skill" in found:
                    return ParsedSkill(_field(found, "episode_summary"), _field(found, "episode_skill"), "")
                first = found if first is None else first
    if first is None:
        return ParsedSkill("", "", "no JSON object in the answer")
    return ParsedSkill(_field(first, "episode_summary"), "", "")


def read_skill(answer: str, author: str, update: int) -> Skill:
    """The skill in an analyser's answer, with its provenance; its text is empty where the answer is unusable."""
    parsed = parse_skill(answer)
    return Skill(parsed.skill if parsed.usable else "", parsed.summary, author, update, raw=answer)


def _field(found: dict[Any, Any], name: str) -> str:
    """A field as text. Half a surrogate pair, which JSON can spell but UTF-8 cannot, is replaced."""
    try:
        return readable(str(found.get(name, "")))
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested deeper than Python prints
        return ""


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that start at any ``{`` of the text, nested ones included."""
    decoder = json.JSONDecoder(strict=False)
    for match in islice(re.finditer(r'\{(?=[ \t\n\r]*["}])', text), STARTS):
        try:
            yield decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            continue


def _literal_objects(text: str) -> list[dict[Any, Any]]:
    """Dictionaries written as Python literals inside balanced outermost braces; quotes are minded."""
    found = []
    for piece in _balanced(text):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # unknown escapes such as \q
                value = ast.literal_eval(piece)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _balanced(text: str) -> Iterator[str]:
    depth = start = 0
    quote = ""
    escaped = False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "{":
            start = position if depth == 0 else start
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                yield text[start : position + 1]


# ------------------------------------------------------------------------------------------------ insertion

_BLOCK_HEAD = "**Episode-Level Skill**\nConsult this advice whenever you choose an action in this episode.\n["
_BLOCK_TAIL = "]"

_TASK_LINES = [
    re.compile(pattern + r"\s*[^\n]*")
    for pattern in (
        r"\bYour task is to:",
        r"\bYour current task is:",
        r"\bYour task is:",
        r"\bYour question:",
        r"\bYour goal is(?: to)?(?::|\s)",
    )
]
_TURN_LINES = ["Now it's your turn to", "Now it's your turn"]


def insert_skill(prompt: Prompt, skill: str) -> Prompt:
    """The prompt with a skill block: behind the task line, else before "Now it's your turn", else at the end.

    One blank line stands on either side of the block. A blank skill returns the prompt, stripped. Images keep their
    order; a placeholder inside the skill is spelled out, so that the numbers of placeholders and images stay equal,
    and no line of the skill ends in a bracket that would close the block.
    """
    text = prompt.text.strip()
    if not skill.strip():
        return Prompt(text, prompt.images)
    block = _BLOCK_HEAD + _enclosed(plain(skill.strip())) + _BLOCK_TAIL
    position = _block_position(text)
    parts = (text[:position].rstrip(), block, text[position:].lstrip())
    return Prompt("\n\n".join(part for part in parts if part), prompt.images)


def _enclosed(text: str) -> str:
    """Text that cannot end the block and go on below it: a bracket that closes nothing at a line's end turns round."""
    opened = 0

    def rounded(match: re.Match[str]) -> str:
        nonlocal opened
        forged = len(match[0]) > 1 and not opened
        opened = max(opened + (1 if match[0] == "[" else -1), 0)
        return match[0].replace("]", ")") if forged else match[0]

    return re.sub(r"\[|\](?:\s*\n)?", rounded, text)


def _block_position(text: str) -> int:
    for pattern in _TASK_LINES:
        if match := pattern.search(text):
            return match.end()
    for line in _TURN_LINES:
        if (position := text.find(line)) >= 0:
            return position
    return len(text)


PHRASES: tuple[str, ...] = (
    *_COMPACT_HEAD.values(),
    _COMPACT_TASK,
    _COMPACT_OBS,
    _COMPACT_ACT,
    _COMPACT_INVALID,
    '{"episode_summary": "',
    '", "episode_skill": "',
    '"}',
    _BLOCK_HEAD,
)
"""Fixed pieces of the compact analysis prompt, of the answer and of the inserted block: one token each for ``tiny``."""


# ------------------------------------------------------------------------------------------------- controls


def exchange_attempts(skills: Sequence[Skill], groups: Sequence[int], key: Sequence[int]) -> list[Skill]:
    """Control: every usable skill goes to another attempt at the same task.

    Unusable skills stay where they are. A group's only usable skill has no other attempt to come from; it is withheld.

    Args:
        skills: One per episode.
        groups: The group (task) of each episode.
        key: Non-negative integers that name the exchange, e.g. (seed, update).
    """
    rng = np.random.default_rng(list(key))
    exchanged = list(skills)
    for group in sorted(set(groups)):
        usable = [index for index, skill in enumerate(skills) if skill.usable and groups[index] == group]
        order = [usable[place] for place in rng.permutation(len(usable))]
        for giver, taker in zip(order, [*order[1:], *order[:1]], strict=True):
            exchanged[taker] = skills[giver] if giver != taker else replace(skills[giver], text="")
    return exchanged


def shuffle_skills(skills: Sequence[Skill], groups: Sequence[int], key: Sequence[int]) -> list[Skill]:
    """Control: every usable skill goes to another episode, of another group wherever the group sizes allow it.

    Unusable skills stay where they are, so the very same episodes are distilled as without shuffling. With a single
    usable skill there is no other one to give; it is withheld (its text cleared).

    Args:
        skills: One per episode.
        groups: The group (task) of each episode.
        key: Non-negative integers that name the shuffle, e.g. (seed, update).
    """
    usable = [index for index, skill in enumerate(skills) if skill.usable]
    shuffled = list(skills)
    if len(usable) == 1:
        shuffled[usable[0]] = replace(skills[usable[0]], text="")
    if len(usable) < 2:
        return shuffled
    # With groups side by side in random order, a rotation by the largest group leaves every group behind.
    rng = np.random.default_rng(list(key))
    rank = {
        group: int(place) for group, place in zip(sorted(set(groups)), rng.permutation(len(set(groups))), strict=True)
    }
    order = sorted((int(index) for index in rng.permutation(usable)), key=lambda index: rank[groups[index]])
    largest = max(sum(groups[index] == group for index in usable) for group in rank)
    shift = min(largest, len(order) - 1)
    for place, index in enumerate(order):
        shuffled[index] = skills[order[(place + shift) % len(order)]]
    return shuffled
