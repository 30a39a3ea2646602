"""A catalogue on disk: products are decoded when they are looked at; the search index and the goals' order are mapped.

A store is a directory, made once by `envs_text.webshop.build`::

    products.jsonl             one product with its requests a line
    offsets.npy                byte at which each product's line starts, and the end of the last one
    asins.npy, sorted.npy      their codes, and the row numbers in the order of the codes
    index/                     the BM25 index
    synthetic.npy, human.npy   goals in the one global order: row, number within the row; absent where there are none
    manifest.json              written last: the store is complete
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from envs_text.webshop import goals
from envs_text.webshop.catalogue import Goal, Product
from envs_text.webshop.goals import KINDS, Request
from envs_text.webshop.search import Index
from harness.contracts import HarnessError, unknown

CACHED_PRODUCTS = 10_000

Row = tuple[Product, tuple[Request, ...]]
"""A product and what people asked of it."""


def encode(product: Product, requests: Sequence[Request]) -> bytes:
    """A row as a line of products.jsonl."""
    fields = {name: getattr(product, name) for name in Product.__slots__}
    asked = [[request.text, request.attributes, request.options] for request in requests]
    return json.dumps([fields, asked], ensure_ascii=False).encode() + b"\n"


def decode(line: bytes) -> Row:
    """The row that a line of products.jsonl holds."""
    fields, asked = json.loads(line)
    for name in ("bullets", "reviews", "attributes", "instruction_attributes", "nouns"):
        fields[name] = tuple(fields[name])
    fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
    return Product(**fields), tuple(Request(text, tuple(names), tuple(values)) for text, names, values in asked)


def mapped(path: Path) -> NDArray[Any]:
    """An array that stays on disk."""
    stored: NDArray[Any] = np.load(path, mmap_mode="r")
    return stored


class Rows:
    """The rows of products.jsonl by number."""

    def __init__(self, directory: Path) -> None:
        self._offsets = mapped(directory / "offsets.npy")
        with (directory / "products.jsonl").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Row:
        start, end = self._offsets[number : number + 2]
        return decode(self._bytes[start:end])


class Goals(Sequence[Goal]):
    """Goals that are made when they are looked at.

    Args:
        order: Row and number within the row of each, shape (goals, 2).
        make: The goal of a row and number.
    """

    def __init__(self, order: NDArray[np.int32], make: Callable[[int, int], Goal]) -> None:
        self._order, self._make = order, make

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> Goal: ...
    @overload
    def __getitem__(self, at: slice) -> Goals: ...
    def __getitem__(self, at: int | slice) -> Goal | Goals:
        if isinstance(at, slice):
            return Goals(self._order[at], self._make)
        row, number = self._order[at].tolist()
        return self._make(row, number)


class DiskShop:
    """A shop whose catalogue is a finished store. Processes that open the same one share its pages in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.version: str = json.loads((directory / "manifest.json").read_text())["version"]
        self._asins, self._sorted = mapped(directory / "asins.npy"), mapped(directory / "sorted.npy")
        self._index = Index.load(directory / "index")
        self._row = lru_cache(CACHED_PRODUCTS)(Rows(directory).__getitem__)
        self._number = lru_cache(CACHED_PRODUCTS)(self._find)

    def __len__(self) -> int:
        return len(self._asins)

    def __contains__(self, asin: str) -> bool:
        return self._number(asin) is not None

    def product(self, asin: str) -> Product:
        number = self._number(asin)
        if number is None:
            raise KeyError(asin)
        return self._row(number)[0]

    def search(self, query: str, most: int = 50) -> list[str]:
        return [self._asins[number].decode() for number in self._index.top(query, most)]

    def goals(self, kind: str) -> Goals:
        if kind not in KINDS:
            raise unknown("kind of goals", kind, KINDS)
        path = self._directory / f"{kind}.npy"
        if not path.exists():
            raise HarnessError(f"the catalogue {self.version!r} holds no {kind} goals")
        return Goals(mapped(path), lambda row, number: goals.of_row(kind, *self._row(row))[number]())

    def _find(self, asin: str) -> int | None:
        code = asin.encode()
        at = bisect_left(self._sorted, code, key=lambda number: self._asins[number])
        number = int(self._sorted[at]) if at < len(self) else 0
        return number if self._asins[number] == code else None
