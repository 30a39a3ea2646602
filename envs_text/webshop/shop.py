"""Shops: a catalogue with its search engine and goals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from envs_text.webshop import goals
from envs_text.webshop.catalogue import Goal, Product
from envs_text.webshop.search import Index, contents
from harness.contracts import HarnessError, unknown


class MemoryShop:
    """A shop whose catalogue is in memory.

    Args:
        products: The catalogue, in the order that decides ties of the search.
        human: Goals written by people, in any order.
        version: Names data and version, for cards and fingerprints.
    """

    def __init__(self, products: Sequence[Product], human: Sequence[Goal], version: str) -> None:
        self.version = version
        self._products = {product.asin: product for product in products}
        self._asins = [product.asin for product in products]
        self._human = human
        self._index = Index.build(contents(product) for product in products)
        if len(self._products) != len(products):
            raise HarnessError(f"the catalogue {version!r} holds an asin twice")

    def __len__(self) -> int:
        return len(self._asins)

    def __contains__(self, asin: str) -> bool:
        return asin in self._products

    def product(self, asin: str) -> Product:
        return self._products[asin]

    def search(self, query: str, most: int = 50) -> list[str]:
        return [self._asins[number] for number in self._index.top(query, most)]

    def goals(self, kind: str) -> Sequence[Goal]:
        if kind not in goals.KINDS:
            raise unknown("kind of goals", kind, goals.KINDS)
        found = self._synthetic_goals if kind == "synthetic" else self._human_goals
        if not found:
            raise HarnessError(f"the catalogue {self.version!r} holds no {kind} goals")
        return found

    @cached_property
    def _synthetic_goals(self) -> tuple[Goal, ...]:
        made = (make() for item in self._products.values() for make in goals.of_row("synthetic", item))
        return tuple(sorted(made, key=goals.rank))

    @cached_property
    def _human_goals(self) -> tuple[Goal, ...]:
        return tuple(sorted(self._human, key=goals.rank))
