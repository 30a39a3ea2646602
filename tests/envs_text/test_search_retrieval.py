"""Retrieval of Search-QA: corpora, the BM25 index and its file, and what real questions find."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from envs_text.search_qa import retrieval
from envs_text.search_qa.corpus import Passage, Ticker, passage
from envs_text.search_qa.em import normalise
from envs_text.search_qa.retrieval import BM25, open_corpus, words
from harness.contracts import HarnessError

RIVERS = [
    Passage("0", "Ister", "The Ister flows through Morhaven."),
    Passage("1", "Morhaven", "Morhaven lies in Kestria. Its mayor is Arlo Venn."),
    Passage("2", "Kestria", "Kestria is a country."),
    Passage("3", "Arlo Venn", "Arlo Venn was born in Morhaven."),
]


def write(path: Path, passages: Sequence[Passage]) -> Path:
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in passages))
    return path


# --------------------------------------------------------------------------------------------------- corpora


def test_a_passage_is_read_with_and_without_title() -> None:
    assert passage({"id": "7", "contents": "\"'If Only' Jim\"\nA film."}) == Passage("7", "'If Only' Jim", "A film.")
    assert passage({"id": 7, "contents": "Plain\ntwo\nlines"}) == Passage("7", "Plain", "two\nlines")
    assert passage({"id": "7", "contents": "no title"}) == Passage("7", "", "no title")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "x", "contents": "cut', "line 3: not JSON"),
        (b'{"id": "x"}', "line 3: no field 'contents'"),
        (b'{"contents": "x"}', "line 3: no field 'id'"),
        (b'{"id": "x", "contents": 5}', "line 3: 'id' and 'contents' must be strings"),
        (b"[]", "line 3: not an object but list"),
        (b'{"id": "0", "contents": "again"}', "line 3: id '0' occurs twice"),
        (b'{"id": "x", "contents": "\xff"}', "line 3: not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write(tmp_path / "corpus.jsonl", RIVERS[:2])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(HarnessError, match=re.escape(problem)) as caught:
        open_corpus(path, tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_broken_line_among_many_and_files_without_passages(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    lines = [f'{{"id": "{n}", "contents": "t\\ntext {n}"}}\n' for n in range(100_000)]
    lines[70_000] = lines[70_000][:-10] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(HarnessError, match="line 70001: not JSON"):
        open_corpus(path, tmp_path)
    path.write_text("\n")
    with pytest.raises(HarnessError, match="holds no passage"):
        open_corpus(path, tmp_path)
    with pytest.raises(HarnessError, match="no corpus file"):
        open_corpus(tmp_path / "absent.jsonl", tmp_path)


def test_long_work_says_how_long_it_will_take() -> None:
    said: list[str] = []
    ticker = Ticker("reading x", said.append, interval=0.0)
    ticker.began -= 10
    ticker(1, 4)
    assert said == ["reading x: 25%, about 30 s left"]


# ------------------------------------------------------------------------------------------------------ BM25


def test_scores_are_bm25() -> None:
    query = "Who is the mayor of Morhaven, Morhaven?"
    documents = [words(p.contents) for p in RIVERS]
    average = sum(map(len, documents)) / len(documents)
    expected = []
    for number, document in enumerate(documents):
        counts, score = Counter(document), 0.0
        for word in words(query):
            holders = sum(word in other for other in documents)
            weight = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
            score += weight * counts[word] / (counts[word] + 0.9 * (0.6 + 0.4 * len(document) / average))
        expected.append((number, score))
    expected = sorted((e for e in expected if e[1] > 0), key=lambda e: -e[1])
    [ranking] = BM25(RIVERS, "rivers").ranked([query], top=10)
    assert [found.id for found, _ in ranking] == [str(number) for number, _ in expected]
    assert [score for _, score in ranking] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    index = BM25([Passage(str(n), "same", "words here" if n % 2 else "words there") for n in range(50)], "ties")
    [found] = index.search(["words there"], top=30)
    assert [int(p.id) for p in found] == [*range(0, 50, 2), 1, 3, 5, 7, 9]


def test_queries_that_say_nothing_find_nothing() -> None:
    index = BM25(RIVERS, "rivers")
    assert index.search(["", "  ", "the of is", "Qzxv", "?!"], 3) == [[]] * 5
    assert index.search(["the IST\u00c9R?"], 3) == [[RIVERS[0]]]


# ----------------------------------------------------------------------------------------------- saved index


def test_the_index_is_kept_and_made_anew_only_when_the_corpus_changes(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "corpus.jsonl", RIVERS), tmp_path / "cache"
    first = open_corpus(path, cache)
    assert first.ranked(["mayor of Morhaven"], 3) == BM25(RIVERS, "").ranked(["mayor of Morhaven"], 3)
    assert list(first.passages) == RIVERS
    [place] = [p for p in cache.iterdir() if p.is_dir()]
    made = place.stat().st_ino
    os.utime(path, (1, 1))
    again = open_corpus(path, cache)
    assert (again.version, place.stat().st_ino) == (first.version, made)
    write(path, [*RIVERS[:3], Passage("3", "Arlo Venn", "Arlo Venn was born in Mirhaven.")])
    changed = open_corpus(path, cache)
    assert changed.version != first.version
    assert place.stat().st_ino != made
    assert changed.search(["Mirhaven"], 1)[0][0].id == "3"
    assert first.search(["Ister"], 1) == [[RIVERS[0]]]  # the old index serves on where it is open
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [place.name]


def test_an_interrupted_build_leaves_nothing_and_many_openers_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "corpus.jsonl", RIVERS), tmp_path / "cache"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retrieval.np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(path, cache)
    assert [p for p in cache.iterdir() if p.is_dir()] == []
    made: list[int] = []
    make = retrieval._make
    monkeypatch.setattr(retrieval, "_make", lambda *a: made.append(1) or make(*a))
    with ThreadPoolExecutor(8) as pool:
        assert len({r.version for r in pool.map(lambda _: open_corpus(path, cache), range(8))}) == 1
    assert len(made) == 1


# --------------------------------------------------------------------------------------------- real questions


def test_what_real_questions_find(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answer recall: the share of questions with an accepted answer, whole words, in the passages of one search."""
    began = time.perf_counter()
    index = open_corpus(shared_data / "search_qa" / "corpus.jsonl", tmp_path)
    seconds = time.perf_counter() - began
    text = (shared_data / "search_qa" / "questions_with_passages.jsonl").read_text()
    questions = [json.loads(line) for line in text.splitlines()]
    began = time.perf_counter()
    index.search([question["question"] for question in questions], 3)
    rate = len(questions) / (time.perf_counter() - began)
    began = time.perf_counter()
    open_corpus(shared_data / "search_qa" / "corpus.jsonl", tmp_path)
    reopened = time.perf_counter() - began
    recall = {
        (name, top): _recall(index, questions, name, top) for name in ("hotpotqa", "bamboogle") for top in (3, 10)
    }
    with capsys.disabled():
        print(f"\n{len(index.passages):,} passages: indexed in {seconds:.1f} s, reopened in {reopened:.3f} s")
        print(f"{rate:,.0f} queries/s")
        print("answer recall: " + ", ".join(f"{name} top {top}: {share:.3f}" for (name, top), share in recall.items()))
    assert recall["hotpotqa", 3] > 0.60
    assert recall["hotpotqa", 10] > 0.72
    assert recall["bamboogle", 3] > 0.22
    assert recall["bamboogle", 10] > 0.36


def _recall(index: BM25, questions: Sequence[dict[str, Any]], name: str, top: int) -> float:
    asked = [question for question in questions if question["data_source"] == name]
    found = index.search([question["question"] for question in asked], top)
    hits = 0
    for question, ranking in zip(asked, found, strict=True):
        texts = " | ".join(normalise(p.contents) for p in ranking)
        hits += any(f" {normalise(answer)} " in f" {texts} " for answer in question["golden_answers"])
    return hits / len(asked)


def test_a_corpus_of_stop_words_is_refused_in_one_line() -> None:
    with pytest.raises(HarnessError, match="no passage of the corpus holds a word"):
        BM25([Passage("1", "A", "The.")], "")
