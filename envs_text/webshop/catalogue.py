"""Products and goals, as every part of WebShop sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Product:
    """One article of the shop.

    Attributes:
        asin: Its code, upper case, 10 characters.
        title: What result and item pages show.
        name: What the goal is compared with (the original's ``name``).
        category: Department, e.g. ``"fashion"``.
        query: The search under which the original catalogue was collected; two products with one query are of a kind.
        product_category: Path of categories, e.g. ``"Clothing › Men › Shirts"``.
        description: Text of the description page.
        bullets: Lines of the features page.
        reviews: Lines of the reviews page.
        rating: Text, ``"N.A."`` where there is none.
        attributes: What the attributes page lists and the reward compares.
        options: Option name -> values, both lower case, in page order.
        price: Dollars; what the reward compares with the goal's cap.
        price_text: As pages show it, e.g. ``"$10.0 to $20.0"``.
        instruction: Request from which synthetic goals are made; empty where there is none.
        instruction_attributes: The attributes that the request names.
        nouns: Nouns of ``name`` in lower case, in order of appearance, repeats kept (for the reward's type part).
    """

    asin: str
    title: str
    name: str
    category: str
    query: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    reviews: tuple[str, ...]
    rating: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    price_text: str
    instruction: str
    instruction_attributes: tuple[str, ...]
    nouns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a customer wants.

    Attributes:
        id: Stable name, the same in every process.
        asin: Code of the product that it was made from.
        query, name, product_category, nouns: That product's.
        category: That product's department; what scores are broken down by.
        instruction: The request in words, price cap included.
        attributes: Attributes wanted.
        options: Wanted option name -> value (synthetic goals), or values alone (human goals).
        price_upper: Price cap in dollars.
    """

    id: str
    asin: str
    query: str
    name: str
    product_category: str
    nouns: tuple[str, ...]
    category: str
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    price_upper: float


class Shop(Protocol):
    """A catalogue with its search engine and goals."""

    version: str
    """Names data and version, for cards and fingerprints, e.g. ``"generated-1"``."""

    def __len__(self) -> int: ...

    def product(self, asin: str) -> Product:
        """The product with this (upper-case) code; KeyError where there is none."""
        ...

    def __contains__(self, asin: str) -> bool: ...

    def search(self, query: str, most: int = 50) -> Sequence[str]:
        """Codes of the best products by BM25, best first, ties by catalogue order; empty for a query without words."""
        ...

    def goals(self, kind: str) -> Sequence[Goal]:
        """All goals of a kind, ``"synthetic"`` or ``"human"``, after the one global shuffle; read-only.

        Raises HarnessError where the data holds none of that kind.
        """
        ...
