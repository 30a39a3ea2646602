"""Questions: generated ones about the encyclopedia, and files of the field's seven sets."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs_text.search_qa.encyclopedia import NAME, Entry, entries
from harness.contracts import DataMissing, HarnessError, digest, unknown

SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The field's evaluation sets."""
GENERATED_SETS = ("one_hop", "two_hop")
SPLITS = {"train": 4, "eval": 2, "demo": 4}
"""Split -> how many of ten subjects it owns."""


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        id: Unique within a set.
        source: The set it belongs to, which is the task's kind.
        chain: Of generated questions: the things it leads through, from the subject to the answer.
    """

    id: str
    source: str
    text: str
    answers: tuple[str, ...]
    chain: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------- generated

ASKED: Mapping[str, tuple[str, str]] = {
    "birthplace": ("Where was {} born?", "From which town does {} come?"),
    "employer": ("Which company does {} work for?", "Who employs {}?"),
    "spouse": ("Who is {} married to?", "Who is the spouse of {}?"),
    "country": ("In which country is {}?", "Which country does {} belong to?"),
    "river": ("Which river flows through {}?", "On which river does {} lie?"),
    "mayor": ("Who is the mayor of {}?", "Who leads {}?"),
    "founder": ("Who founded {}?", "Who is the founder of {}?"),
    "seat": ("Where does {} have its seat?", "In which town is {} based?"),
    "capital": ("What is the capital of {}?", "From which town is {} governed?"),
    "source": ("In which country does {} rise?", "Where is the source of {}?"),
}
"""Relation -> two ways to ask for it."""

NAMED: Mapping[str, tuple[str, str]] = {
    "birthplace": ("the birthplace of {}", "the town where {} was born"),
    "employer": ("the employer of {}", "the company that employs {}"),
    "spouse": ("the spouse of {}", "the person married to {}"),
    "country": ("the country of {}", "the country that {} belongs to"),
    "river": ("the river of {}", "the river that flows through {}"),
    "mayor": ("the mayor of {}", "the person who leads {}"),
    "founder": ("the founder of {}", "the person who founded {}"),
    "seat": ("the seat of {}", "the town where {} is based"),
    "capital": ("the capital of {}", "the town that governs {}"),
}
"""Relation -> two ways to name the thing it leads to inside another question."""

CHAINS: tuple[tuple[str, str], ...] = (
    ("birthplace", "country"),
    ("birthplace", "river"),
    ("birthplace", "mayor"),
    ("employer", "founder"),
    ("employer", "seat"),
    ("spouse", "birthplace"),
    ("spouse", "employer"),
    ("country", "capital"),
    ("river", "source"),
    ("mayor", "birthplace"),
    ("mayor", "employer"),
    ("founder", "birthplace"),
    ("seat", "country"),
    ("seat", "river"),
    ("seat", "mayor"),
    ("capital", "river"),
    ("capital", "mayor"),
)
"""The two-hop questions, as relations from the subject on."""

PER_PERSON = {1: 2, 2: 3}
"""Questions about one person, by number of hops: there are many more people than other things."""


@lru_cache(maxsize=1)
def generated() -> Mapping[str, tuple[Question, ...]]:
    """The questions of each split, balanced over one and two hops; every subject belongs to one split."""
    found: dict[str, list[Question]] = {split: [] for split in SPLITS}
    owners = [split for split, tenths in SPLITS.items() for _ in range(tenths)]
    for entry in entries().values():
        split = owners[_number(entry.name) % len(owners)]
        found[split] += (question for hops in (1, 2) for question in _about(entry, hops))
    return {split: balanced(questions) for split, questions in found.items()}


def _about(entry: Entry, hops: int) -> list[Question]:
    """Questions whose subject is an entry; of people, those that chance (the hash) picks."""
    wanted = [(relation,) for relation in entry.facts] if hops == 1 else CHAINS
    questions = [_ask(entry.name, relations) for relations in wanted if _leads_on(entry.name, relations)]
    questions.sort(key=lambda question: _number(question.id))
    return questions[: PER_PERSON[hops]] if entry.kind == "person" else questions


def _chain(subject: str, relations: Sequence[str]) -> tuple[str, ...]:
    """The things that relations lead to, as far as they do."""
    chain = [subject]
    for relation in relations:
        if relation not in entries()[chain[-1]].facts:
            break
        chain.append(entries()[chain[-1]].facts[relation])
    return tuple(chain)


def _leads_on(subject: str, relations: Sequence[str]) -> bool:
    """Whether relations lead from a subject through distinct things to an answer."""
    return len(set(_chain(subject, relations))) == len(relations) + 1


def _ask(subject: str, relations: Sequence[str]) -> Question:
    """The question in one of its wordings, chosen by hash."""
    id = f"{'.'.join(relations)}/{subject}"
    number = _number(id)
    text = subject
    for place, relation in enumerate(relations):
        wordings = (ASKED if place == len(relations) - 1 else NAMED)[relation]
        text = wordings[number >> place & 1].format(text)
    chain = _chain(subject, relations)
    return Question(id, GENERATED_SETS[len(relations) - 1], text, chain[-1:], chain)


def _number(text: str) -> int:
    return int(digest(text)[:12], 16)


def _pattern(wording: str, inner: str) -> str:
    return re.escape(wording).replace(r"\{\}", inner)


_PATTERNS = [
    (relations, re.compile(pattern))
    for relations, pattern in (
        *(((last,), _pattern(asked, f"({NAME})")) for last, wordings in ASKED.items() for asked in wordings),
        *(
            ((first, last), _pattern(asked, _pattern(named, f"({NAME})")))
            for first, last in CHAINS
            for asked in ASKED[last]
            for named in NAMED[first]
        ),
    )
]


@lru_cache(maxsize=4096)
def read_question(text: str) -> tuple[str, tuple[str, ...]] | None:
    """Subject and relations of a generated question; None for any other text."""
    for relations, pattern in _PATTERNS:
        if match := pattern.fullmatch(text):
            return match.group(1), relations
    return None


def balanced(questions: Iterable[Question]) -> tuple[Question, ...]:
    """All questions, set by set in turn, each set in the order of its ids' hashes: the first n are mixed evenly."""
    by_set: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_set[question.source].append(question)
    ranked = [
        (rank, source, question)
        for source, members in by_set.items()
        for rank, question in enumerate(sorted(members, key=lambda q: digest([q.source, q.id])))
    ]
    return tuple(question for _, _, question in sorted(ranked, key=lambda row: row[:2]))


# ----------------------------------------------------------------------------------------------------------- files


def read_panels(path: Path) -> dict[str, list[Path]]:
    """Question files of each panel under a path.

    A file holds evaluation questions. In a directory, ``train*.jsonl`` hold training and ``test*.jsonl`` evaluation
    questions. Raises HarnessError where there are no evaluation questions.
    """
    if path.is_file():
        return {"train": [], "eval": [path]}
    if not path.is_dir():
        raise DataMissing(
            f"no Search-QA questions at {path} (option data): expected a JSONL file or a directory with test*.jsonl"
        )
    files = {"train": sorted(path.glob("train*.jsonl")), "eval": sorted(path.glob("test*.jsonl"))}
    if not files["eval"]:
        raise HarnessError(f"no test*.jsonl in {path}")
    return files


def read_questions(files: Sequence[Path]) -> list[Question]:
    """Questions of JSONL files, lines of {"id", "data_source", "question", "golden_answers"}; blank lines are skipped.

    Raises HarnessError, naming file and line, for anything else, for an unknown set and for an id used twice in a set.
    """
    seen: dict[tuple[str, str], str] = {}
    questions = []
    for path in files:
        for where, record in _records(path):
            question = _question(record, where)
            key = (question.source, question.id)
            if key in seen:
                raise HarnessError(f"{where}: id {question.id!r} of {question.source} is used before, at {seen[key]}")
            seen[key] = where
            questions.append(question)
    return questions


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of every line that is not blank."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line.decode())
                    except ValueError as error:  # also UnicodeDecodeError
                        raise HarnessError(f"{path}:{number}: no JSON object in UTF-8: {error}") from error
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}") from error


def _question(record: Any, where: str) -> Question:
    if not isinstance(record, dict):
        raise HarnessError(f"{where}: expected a JSON object, found {type(record).__name__}")
    for field in ("id", "data_source", "question"):
        if not (isinstance(record.get(field), str) and record[field].strip()):
            raise HarnessError(f"{where}: field {field!r} must be a text that is not blank")
    answers = record.get("golden_answers")
    if not (isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers)):
        raise HarnessError(f"{where}: field 'golden_answers' must be a list of one or more texts")
    source = record["data_source"]
    if source not in SETS:
        raise HarnessError(f"{where}: {unknown('question set', source, SETS)}")
    return Question(record["id"], source, " ".join(record["question"].split()), tuple(answers))
