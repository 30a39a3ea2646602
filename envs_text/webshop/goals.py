"""Goals: what customers want, made from products (synthetic) or read from people's requests (human).

A goal's id and its price cap are drawn from a hash of its content, its place in the one global order from its id. So an
id means the same goal, cap and product in every process, and another product in the catalogue changes none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

from envs_text.webshop.catalogue import Goal, Product
from harness.contracts import digest

KINDS = ("synthetic", "human")

PRICE_CAPS = tuple(10.0 * step for step in range(1, 100))
"""Caps are multiples of ten dollars."""

NO_CAP = 1_000_000.0
"""The cap of a goal whose product is too expensive for a cap."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a person wrote about a product.

    Attributes:
        text: The request, without a price.
        attributes: The product's attributes that it names.
        options: Values of the product's options that it names.
    """

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


def of_row(kind: str, item: Product, requests: Sequence[Request] = ()) -> Sequence[Callable[[], Goal]]:
    """Makers of the goals of a kind that a product gives, in a fixed order.

    Synthetic: one for every combination of its option values, if it has an instruction. Human: one for each request
    that names an attribute. Many goals are counted but few looked at, hence makers.
    """
    if kind == "human":
        return [partial(human, item, request) for request in dict.fromkeys(requests) if request.attributes]
    if not item.instruction or not item.instruction_attributes:
        return ()
    values = (dict.fromkeys(item.options[name]) for name in sorted(item.options))
    return [partial(synthetic, item, chosen) for chosen in product(*values)]


def synthetic(item: Product, values: tuple[str, ...]) -> Goal:
    """The goal for a product's instruction and one value of each option, in alphabetical order of the option names."""
    options = dict(zip(sorted(item.options), values, strict=True))
    wish = ", and ".join(f"{name}: {value}" for name, value in options.items())
    request = f"{item.instruction} with {wish}" if wish else item.instruction
    return make(item, "synthetic", request, item.instruction_attributes, options)


def human(item: Product, request: Request) -> Goal:
    """The goal that a person's request states."""
    return make(item, "human", request.text.strip("."), request.attributes, request.options)


def make(
    item: Product, kind: str, request: str, attributes: tuple[str, ...], options: Mapping[str, str] | tuple[str, ...]
) -> Goal:
    """A goal for a product: its price cap is drawn, and stated at the end of the request."""
    wanted = dict(options) if isinstance(options, Mapping) else list(options)
    name = digest([kind, item.asin, request, attributes, wanted, item.price])
    cap = price_cap(item.price, name)
    return Goal(
        id=f"{kind}/{item.asin}/{name[:12]}",
        asin=item.asin,
        query=item.query,
        name=item.title,
        product_category=item.product_category,
        nouns=item.nouns,
        category=item.category,
        instruction=request if cap == NO_CAP else f"{request}, and price lower than {cap:.2f} dollars",
        attributes=attributes,
        options=options,
        price_upper=cap,
    )


def price_cap(price: float, seed: str) -> float:
    """The larger of two of the next four multiples of ten above a price, all pairs alike; none from 980 dollars on."""
    above = [cap for cap in PRICE_CAPS if cap > price][:4]
    pairs = list(combinations(above, 2))
    if not pairs:
        return NO_CAP
    return max(pairs[int(hashlib.sha256(seed.encode()).hexdigest(), 16) % len(pairs)])


def rank(goal: Goal) -> int:
    """What the one global order sorts by: 64 bits of the hash of the id."""
    return int.from_bytes(hashlib.sha256(goal.id.encode()).digest()[:8], "big")
