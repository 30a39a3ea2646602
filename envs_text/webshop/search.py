"""The shop's search engine: BM25 over the texts that the original indexes, with its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from envs_text.webshop.catalogue import Product

K1, B = 0.9, 0.4
"""BM25 parameters of the original's engine (Lucene through Pyserini, its defaults)."""

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Index terms of a text: lower case, no stop words, possessive and plural endings removed."""
    lowered = text.lower().replace("'s", "").replace("’s", "")
    return [singular(word) for word in _WORD.findall(lowered) if word not in STOP_WORDS]


def singular(word: str) -> str:
    """The word without a plural ending (a light stand-in for the original's stemmer)."""
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("shes", "ches", "xes", "sses")) else word[:-1]


def contents(product: Product) -> str:
    """What is indexed of a product: title, description, first feature and all option values, in lower case."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, first, options]).lower()


class Index:
    """A BM25 index over documents numbered from 0."""

    def __init__(self, bm25: bm25s.BM25) -> None:
        self._vocabulary: dict[str, int] = bm25.vocab_dict
        self._bm25: Any = bm25

    @classmethod
    def build(cls, texts: Iterable[str]) -> Index:
        """Index texts in memory. The result depends on nothing but the texts."""
        vocabulary: dict[str, int] = {}
        documents = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts]
        vocabulary.setdefault("", len(vocabulary))
        bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
        bm25.index((documents, vocabulary), show_progress=False)
        return cls(bm25)

    @classmethod
    def load(cls, directory: Path) -> Index:
        """Open a saved index; the postings stay on disk and are mapped into memory."""
        return cls(bm25s.BM25.load(directory, mmap=True, show_progress=False))

    def save(self, directory: Path) -> None:
        self._bm25.save(directory, show_progress=False)

    def top(self, query: str, most: int) -> NDArray[np.intp]:
        """Numbers of the best documents, best first, ties by number; only documents that hold a word of the query."""
        ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not ids:
            return np.empty(0, dtype=np.intp)
        scores = self._bm25.get_scores_from_ids(ids)
        found = np.flatnonzero(scores)
        if len(found) > most:
            worst = np.partition(scores[found], len(found) - most)[len(found) - most]
            found = found[scores[found] >= worst]
        best: NDArray[np.intp] = found[np.argsort(-scores[found], kind="stable")][:most]
        return best
