"""The generated catalogue: a small shop in the schema of the official data, the same on every machine.

25 types of article in 5 departments. In each type, pairs of attributes are sold by two brands, one cheap, one dear,
whose option values overlap only in part: the price cap and the options of a request decide between them. Everything is
in lower case and made of few words, so that a very small policy can learn to read it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs_text.webshop import goals
from envs_text.webshop.catalogue import Goal, Product
from harness.contracts import HarnessError

VERSION = "generated-1"

PRICES = tuple(f"{4 + 2 * step}.99" for step in range(40))
"""From 4.99 to 82.99 dollars."""

CAPS = tuple(f"{10 * step}.00" for step in range(1, 14))
"""Price caps that requests for these prices can state."""

GAP = (11, 15)
"""By how many price steps the second brand of an attribute pair is dearer, inclusive."""

COLORS = ("red", "blue", "green", "black", "white", "yellow", "purple", "silver")
SIZES = ("small", "medium", "large", "petite", "oversized")


@dataclass(frozen=True)
class Department:
    """Types of article, attributes and options (name -> values) of a department."""

    types: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


DEPARTMENTS: Mapping[str, Department] = {
    "fashion": Department(
        ("jacket", "sweater", "dress", "boots", "scarf"),
        (
            *("waterproof", "hooded", "quilted", "woolen", "striped", "stretchy"),
            *("padded", "knitted", "fleece", "cotton", "leather", "washable"),
        ),
        {"color": COLORS, "size": SIZES},
    ),
    "beauty": Department(
        ("shampoo", "lotion", "lipstick", "perfume", "sunscreen"),
        (
            *("vegan", "herbal", "soothing", "nourishing", "hypoallergenic", "lasting"),
            *("fragrant", "moisturizing", "gentle", "natural", "silky", "refreshing"),
        ),
        {
            "scent": ("lavender", "jasmine", "citrus", "vanilla", "peppermint", "coconut"),
            "volume": ("travel", "classic", "jumbo", "salon"),
        },
    ),
    "garden": Department(
        ("lamp", "rug", "curtain", "pillow", "mirror"),
        (
            *("handmade", "foldable", "modern", "rustic", "woven", "antique"),
            *("adjustable", "wooden", "velvet", "decorative", "sturdy", "thermal"),
        ),
        {"color": COLORS, "size": SIZES},
    ),
    "grocery": Department(
        ("coffee", "cookies", "cereal", "popcorn", "chips"),
        (
            *("unsweetened", "roasted", "crunchy", "salted", "keto", "kosher"),
            *("spicy", "creamy", "buttery", "smoky", "wholegrain", "fairtrade"),
        ),
        {
            "flavor": ("honey", "cinnamon", "almond", "chocolate", "blueberry", "maple"),
            "pack": ("single", "double", "family", "bulk"),
        },
    ),
    "electronics": Department(
        ("headphones", "charger", "keyboard", "speaker", "tripod"),
        (
            *("wireless", "portable", "compact", "durable", "rechargeable", "foldaway"),
            *("magnetic", "noiseless", "lightweight", "universal", "ergonomic", "dustproof"),
        ),
        {"color": COLORS, "edition": ("basic", "deluxe", "ultra", "studio")},
    ),
}

TYPES = tuple((name, kind) for name, department in DEPARTMENTS.items() for kind in department.types)
"""(department, type) of every article."""

BRANDS = (
    *("velora", "kentar", "mirado", "osprin", "talvek", "brimso", "quorda", "zenqua", "lumeri", "harvok"),
    *("pelago", "dravin", "solvex", "nimbra", "corvat", "elyndo", "fystra", "gavelo", "ibrant", "jorvik"),
    *("kaloni", "lestra", "morvex", "nortia", "opalen", "prosko", "ravelt", "sentro", "tirell", "umbria"),
    *("vexter", "wolmar", "xantor", "yorvel", "zaphir", "arkeno", "beltra", "cindor", "delmar", "evanto"),
)

HEADS = tuple(str(3041 + 173 * step) for step in range(40))
TAILS = tuple(str(3109 + 271 * step) for step in range(25))
"""An article's code is "B0" + a head (its number within the type, permuted) + a tail (its type)."""

LARGEST = len(HEADS) * len(TYPES)

REVIEWS = ("good value", "arrived on time", "would buy again", "as described")


def products(size: int, seed: int = 0) -> list[Product]:
    """A catalogue of ``size`` articles, types in equal shares, in random order.

    Raises:
        HarnessError: Sizes other than 50 to `LARGEST`.
    """
    if not 2 * len(TYPES) <= size <= LARGEST:
        raise HarnessError(f"WebShop size must be {2 * len(TYPES)} to {LARGEST} generated products, not {size}")
    rng = random.Random(f"webshop products {seed}")
    made = []
    for place, (name, kind) in enumerate(TYPES):
        heads = rng.sample(HEADS, len(HEADS))
        count = size // len(TYPES) + (place < size % len(TYPES))
        for number, draft in enumerate(_drafts(name, kind, count, rng)):
            made.append(_article(f"B0{heads[number]}{TAILS[place]}", draft, rng))
    rng.shuffle(made)
    return made


@dataclass(frozen=True)
class _Draft:
    """What an article is; how its pages put it is drawn separately."""

    department: str
    kind: str
    brand: str
    pair: tuple[str, str]
    options: Mapping[str, tuple[str, ...]]
    price: int
    """Index into `PRICES`."""


def _drafts(name: str, kind: str, count: int, rng: random.Random) -> list[_Draft]:
    """Articles of a type: for each pair of attributes a cheap and a dear one, with different brands."""
    department = DEPARTMENTS[name]
    pairs = [(a, b) for i, a in enumerate(department.attributes) for b in department.attributes[i + 1 :]]
    drafts = []
    for pair in rng.sample(pairs, (count + 1) // 2):
        cheap = rng.randrange(len(PRICES) - GAP[1])
        share = rng.random()
        names = [] if share < 0.05 else rng.sample(list(department.options), 1 if share < 0.3 else 2)
        for brand, price in zip(rng.sample(BRANDS, 2), (cheap, cheap + rng.randint(*GAP)), strict=True):
            options = {
                option: tuple(rng.sample(department.options[option], rng.choice((3, 4))))
                for option in department.options
                if option in names
            }
            drafts.append(_Draft(name, kind, brand, (pair[0], pair[1]), options, price))
    return drafts[:count]


def _article(asin: str, draft: _Draft, rng: random.Random) -> Product:
    """Some titles name one attribute only; the other then stands on the features and attributes pages."""
    shown = draft.pair if rng.random() < 0.75 else (rng.choice(draft.pair),)
    hidden = tuple(attribute for attribute in draft.pair if attribute not in shown)
    title = " ".join((draft.brand, *shown, draft.kind))
    reviewed = rng.random() < 0.1
    ranged = rng.random() < 0.04 and draft.price >= 1
    text = PRICES[draft.price]
    return Product(
        asin=asin,
        title=title,
        name=title,
        category=draft.department,
        query=draft.kind,
        product_category=f"{draft.department} › {draft.kind}",
        description="" if rng.random() < 0.1 else f"{' '.join(draft.pair)} {draft.kind} by {draft.brand}",
        bullets=(" ".join((*hidden, *shown, draft.kind)), f"made by {draft.brand}"),
        reviews=(rng.choice(REVIEWS),) if reviewed else (),
        rating=rng.choice(("3.5", "4.0", "4.5")) if reviewed else "N.A.",
        attributes=draft.pair,
        options=draft.options,
        price=float(text),
        price_text=f"${PRICES[draft.price - 1]} to ${PRICES[draft.price + 1]}" if ranged else f"${text}",
        instruction=f"Find me {', '.join(draft.pair)} {draft.kind}",
        instruction_attributes=draft.pair,
        nouns=(draft.brand, draft.kind),
    )


WORDINGS = (
    "i am looking for a {0} {1} {kind}",
    "i need some {kind} that should be {0} and {1}",
    "show me {1} {kind}, it has to be {0}",
)


def human_goals(catalogue: Sequence[Product], seed: int = 0) -> list[Goal]:
    """One request in freer words for every article; options are named without their kind, as people do."""
    rng = random.Random(f"webshop requests {seed}")
    requests = []
    for product in catalogue:
        chosen = tuple(rng.choice(values) for values in product.options.values())
        options = f", {' and '.join(chosen)}" if chosen else ""
        words = rng.choice(WORDINGS).format(*product.attributes, kind=product.query)
        requests.append(goals.human(product, goals.Request(words + options, product.attributes, chosen)))
    return requests
