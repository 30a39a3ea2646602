"""The WebShop score of a purchase, part by part (Yao et al. 2022; paper section 4.2).

``total = type x (attributes found + options found + price kept) / (attributes + options wanted + 1)``, in [0, 1].

One defect of the original is mended unless ``official=True``: bought options are reduced to the first colour name that
they *contain* before they are compared, wanted ones only where they *are* a colour name. A customer who wants
``"standard"`` and gets ``"standard"`` is then taken to have got ``"tan"``, and the goal cannot be won. Here a wanted
option that was bought exactly as wanted always counts; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from envs_text.webshop.catalogue import Goal, Product

FUZZY = 85
"""Two texts match where their token set ratio (0..100, rounded) is above this."""

_COLOURS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow"""
COLOURS = tuple(_COLOURS.split())
"""Colour names in the order in which they are looked for."""


@dataclass(frozen=True, slots=True)
class Score:
    """A purchase judged against a goal.

    Attributes:
        total: The task score in [0, 1].
        type: Whether it is the right kind of thing: 1, 0.5, 0.1 or 0.
        title: Share of the goal's nouns that the product's name holds; 0.2 where the goal has none.
        same_query: Both were collected under one search.
        same_category: At least two category names are shared.
        attributes: Wanted attributes found, of ``attributes_wanted``.
        options: Wanted options bought, of ``options_wanted``.
        price: Whether the price is within the cap.
    """

    total: float
    type: float
    title: float
    same_query: bool
    same_category: bool
    attributes: int
    attributes_wanted: int
    options: int
    options_wanted: int
    price: bool


def score(goal: Goal, product: Product, price: float, bought: Mapping[str, str], official: bool = False) -> Score:
    """Judge a purchase.

    Args:
        price: What was paid, dollars.
        bought: Chosen option name -> value.
        official: Score as the original does, defect included.
    """
    title = title_overlap(goal.nouns, product.nouns)
    same_query = goal.query == product.query
    same_category = len(categories(goal.product_category) & categories(product.product_category)) >= 2
    kind = type_score(title, same_query or same_category)
    attributes = sum(has_attribute(product, wanted) for wanted in goal.attributes)
    options = options_bought(goal.options, bought, official)
    kept = price <= goal.price_upper
    parts = len(goal.attributes) + len(goal.options) + 1
    return Score(
        total=(attributes + options + kept) / parts * kind,
        type=kind,
        title=title,
        same_query=same_query,
        same_category=same_category,
        attributes=attributes,
        attributes_wanted=len(goal.attributes),
        options=options,
        options_wanted=len(goal.options),
        price=kept,
    )


def type_score(title: float, same_kind: bool) -> float:
    """1, 0.5, 0.1 or 0 from the title overlap and whether query or categories agree."""
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if same_kind or title > 0.2 else 0.5


def title_overlap(wanted: Sequence[str], offered: Sequence[str]) -> float:
    """Shared distinct nouns / number of wanted nouns (repeats counted), 0.2 where none is wanted."""
    return len(set(wanted) & set(offered)) / len(wanted) if wanted else 0.2


def categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def has_attribute(product: Product, wanted: str) -> bool:
    """Whether an attribute of the product resembles the wanted one, or a text of the product states it."""
    return any(alike(attribute, wanted) for attribute in product.attributes) or any(
        wanted in text.lower() for text in (product.title, " ".join(product.bullets), product.description)
    )


def options_bought(wanted: Mapping[str, str] | Sequence[str], bought: Mapping[str, str], official: bool) -> int:
    """How many wanted options were bought. Wanted pairs are compared as the words of name and value together."""
    offered = [normalize_colour(value) for value in bought.values()]
    count = 0
    for text, exact in _wanted_options(wanted, bought):
        count += (exact and not official) or any(alike(value, text) for value in offered)
    return count


def _wanted_options(wanted: Mapping[str, str] | Sequence[str], bought: Mapping[str, str]) -> list[tuple[str, bool]]:
    """For each wanted option, the text that the original compares and whether it was bought exactly."""
    if isinstance(wanted, Mapping):
        return [(_pair_text(name, value), bought.get(name) == value) for name, value in wanted.items()]
    return [(normalize_colour(value), value in bought.values()) for value in wanted]


def _pair_text(name: str, value: str) -> str:
    """Name and value, or the colour alone where either IS a colour name (the first in order of ``COLOURS``)."""
    return next((colour for colour in COLOURS if colour in (name, value)), f"{name} {value}")


def alike(a: str, b: str) -> bool:
    """Whether two texts match: same words in any order, a subset of the words, or small differences in spelling."""
    return similarity(a, b) > FUZZY


def similarity(a: str, b: str) -> int:
    """Token set ratio, 0..100, as the original's library rounds it: of the ASCII letters and digits, in lower case."""
    return round(token_set_ratio(ascii_only(a), ascii_only(b), processor=default_process))


def ascii_only(text: str) -> str:
    return text if text.isascii() else text.encode("ascii", "ignore").decode()


def normalize_colour(text: str) -> str:
    """The first of ``COLOURS`` that the text contains, or the text itself."""
    return next((colour for colour in COLOURS if colour in text), text)
