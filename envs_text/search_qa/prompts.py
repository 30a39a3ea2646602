"""Step prompts, and what observations look like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from envs_text.search_qa.encyclopedia import RELATIONS, WORDS
from envs_text.search_qa.questions import ASKED, NAMED
from envs_text.search_qa.retrieval import Passage
from harness.contracts import View

QUESTION = "Your question: "
"""Introduces the question; skills are inserted behind the line that holds it."""
NOTHING_FOUND = "No document found."
UNREADABLE = "Neither a search nor an answer."
NOT_SEARCHED = "No turn is left to read a search's result."
ANSWERED = "Answered."

ROLE = "You are an expert who answers a question with the help of a search engine."
THINK = (
    "It is your turn. First reason about what you know and what is missing, between <think> and </think>. "
    "Then do exactly one of two things."
)
SEARCH = "If something is missing, write what to look up between <search> and </search>."
ANSWER = "If you know enough, write the answer, as short as it can be, between <answer> and </answer>."

COMPACT_WORDS = 30
"""Words of a document that compact prompts show."""

_ACTION = re.compile(r"(search|answer)\[(.*)\]", re.DOTALL)
_DOCUMENT = re.compile(r"^Doc \d+: \(Title: ((?:[^()\n]|\([^()\n]*\))*)\) ?(.*)$", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z]\w*(?: [A-Z]\w*)*")
_STARTERS = re.compile(
    "(An?|And|Are|At|By|Can|Did|Do|Does|For|From|Has|How|In|Is|Its?|On|The|To|Was|Were|What|When|Where|Which|Who|Whom|"
    "Whose|Why)( |$)"
)


def read_action(action: str) -> tuple[str, str] | None:
    """("search" or "answer", what for); None for any other text."""
    match = _ACTION.fullmatch(action)
    return (match.group(1), match.group(2)) if match else None


def show_documents(passages: Sequence[Passage]) -> str:
    """The observation after a search: one document a line."""
    lines = (f"Doc {n}: (Title: {p.title}) {' '.join(p.text.split())}" for n, p in enumerate(passages, start=1))
    return "\n".join(lines) or NOTHING_FOUND


def read_documents(observation: str) -> list[tuple[str, str]]:
    """(title, text) of every document that an observation shows."""
    return _DOCUMENT.findall(observation)


def names_in(text: str) -> list[str]:
    """Runs of capitalised words, each once, in order; words that usually start a sentence do not count."""
    names = (_STARTERS.sub("", run, count=1) if _STARTERS.match(run) else run for run in _NAME.findall(text))
    return [name for name in dict.fromkeys(names) if name]


def choices(view: View) -> tuple[str, ...]:
    """Concrete actions: a search for every name in the question and the titles seen (for the whole question where it
    has no name), then an answer for every name in the documents seen (in the question, before the first one)."""
    documents = [
        document
        for text in (*(turn.observation for turn in view.history), view.observation)
        for document in read_documents(text)
    ]
    asked = names_in(view.task) or [view.task]
    told = list(dict.fromkeys(chain.from_iterable(names_in(text) for _, text in documents))) or asked
    searches = dict.fromkeys([*asked, *(title for title, _ in documents)])
    return (*(f"search[{name}]" for name in searches), *(f"answer[{name}]" for name in told))


# --------------------------------------------------------------------------------------------------------- prompts


def paper(view: View) -> str:
    """The full prompt, in the field order of the paper's code (section 4.3)."""
    closing = f"{THINK}\n{SEARCH}\n{ANSWER}"
    head = f"{ROLE}\n{QUESTION}{view.task}"
    if not view.history:
        return f"{head}\n{closing}"
    past = "\n\n".join(
        f"Step {number}: {_tagged(action)} <information>{result}</information>"
        for number, action, result in _past(view)
    )
    return f"{head}\nYou have taken {view.step - 1} step(s). What you searched for and found:\n{past}\n\n{closing}"


def compact(view: View, max_steps: int) -> str:
    """The same facts for a policy that knows nothing else: question, searches and documents in brief, turn."""
    past = "".join(f"\n{_brief_action(action)}{_brief(result)}" for _, action, result in _past(view))
    return f"{QUESTION}{view.task}{past}\nturn {view.step} of {max_steps}"


def _past(view: View) -> list[tuple[int, str, str]]:
    """(step number, action, what came of it) of the turns that a prompt quotes."""
    results = [*(turn.observation for turn in view.history[1:]), view.observation]
    return [(turn.number, turn.action, result) for turn, result in zip(view.history, results, strict=False)]


def _tagged(action: str) -> str:
    done = read_action(action)
    return f"<{done[0]}>{done[1]}</{done[0]}>" if done else "(unreadable)"


def brief(text: str) -> str:
    """An observation or an action as compact prompts show it."""
    return _brief_action(text) if read_action(text) else _brief(text)


def _brief_action(action: str) -> str:
    done = read_action(action)
    return f"{done[0]}: {done[1]}" if done else "unreadable"


def _brief(result: str) -> str:
    """Documents with at most ``COMPACT_WORDS`` words each; a title that its text starts with is not repeated."""
    documents = read_documents(result)
    if not documents:
        return f"\n{result}"
    lines = []
    for number, (title, text) in enumerate(documents, start=1):
        words = (text if text.startswith(title) else f'"{title}" {text}').split()
        lines.append(f"\nDoc {number}: {' '.join(words[:COMPACT_WORDS])}{' ...' if len(words) > COMPACT_WORDS else ''}")
    return "".join(lines)


def _pieces(wordings: Sequence[str]) -> list[str]:
    """What stands before and behind the name in each wording."""
    return [piece.rstrip() for wording in wordings for piece in wording.split("{}") if piece.strip(" ?")]


PHRASES: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            # frame
            QUESTION,
            "<think>",
            "</think><search>",
            "</search>",
            "</think><answer>",
            "</answer>",
            "\nsearch:",
            "\nunreadable",
            "search[",
            "answer[",
            NOTHING_FOUND,
            UNREADABLE,
            *(f"\nturn {number} of 4" for number in range(1, 5)),
            *(f"\nDoc {number}:" for number in range(1, 4)),
            "Doc 1:",
            "search:",
            "answer:",
            "Doc 1: (Title:",
            *(f"\nDoc {number}: (Title:" for number in range(2, 4)),
            # questions and passages
            *chain.from_iterable(_pieces(wordings) for wordings in ASKED.values()),
            *(f" {piece}" if piece[0] != " " else piece for wordings in NAMED.values() for piece in _pieces(wordings)),
            *(told for relation in RELATIONS.values() for told in relation.told),
            # thoughts and skills
            "find",
            "guess",
            *(relation.brief for relation in RELATIONS.values()),
            "Search",
            ", then",
            ", and answer",
            "Answer",
            " first.",
            " next.",
            "Answered",
            ", which is right.",
            ", which is wrong.",
            "Gave no answer.",
            *(f" {word}" for word in WORDS),
        )
    )
)
"""Fixed pieces that become single tokens of the tiny policy, the words of the encyclopedia's names among them."""
