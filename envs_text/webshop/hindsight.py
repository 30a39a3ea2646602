"""What a visit teaches, in one short regular language: the scripted analyzer and the words of demonstrations.

A skill is one of two sentences::

    Search waterproof hooded jacket, open b030413109, choose red and large, then buy.
    Search waterproof hooded jacket first.

The first is what a successful visit did, or, after a failure, the best-fitting product among the results that the agent
saw, with the options that the request names. The second is for a visit that saw no such product.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from envs_text.webshop.prompts import Page, read_page

_CAP = re.compile(r",? and price lower than ([\d.]+) dollars$")
_OPTIONS = re.compile(r" with ((?:(?! with )[^:,])+): (.+)$")
_IDLE = frozenset(
    re.findall(
        r"\w+",
        "a all also am an and any are as at be but buy can find for from get give has have help i in is it its like"
        " look looking me my need of on one or price see shop should show some something that the them these they this"
        " to up want wants which will with would you your",
    )
)
"""Words of requests that describe no product."""


@dataclass(frozen=True)
class Request:
    """A request taken apart.

    Attributes:
        words: What describes the product, in order, without repetition; options of synthetic requests are not in it.
        options: Values of the options that a synthetic request names, in order.
        cap: The price cap in dollars, None where none is stated.
        cap_text: The cap as the request words it.
    """

    words: tuple[str, ...]
    options: tuple[str, ...]
    cap: float | None
    cap_text: str

    @property
    def query(self) -> str:
        """The search that the request suggests."""
        return " ".join(self.words)


def read_request(sentence: str) -> Request:
    """Take a request apart; any sentence is one."""
    capped = _CAP.search(sentence)
    body = sentence[: capped.start()] if capped else sentence
    named = _OPTIONS.search(body)
    options: list[str] = []
    if named:
        body = body[: named.start()]
        options = [pair.partition(": ")[2] for pair in f"{named[1]}: {named[2]}".split(", and ")]
    words = [word for word in re.findall(r"[\w'&/.-]*\w", body.lower()) if word not in _IDLE]
    return Request(
        tuple(dict.fromkeys(words)),
        tuple(options),
        float(capped[1]) if capped else None,
        f"{capped[1]} dollars" if capped else "",
    )


def searches(sentence: str) -> tuple[str, ...]:
    """Searches that a request suggests: each word that describes the product or an option, and all of them."""
    request = read_request(sentence)
    words = dict.fromkeys((*request.words, *(word for value in request.options for word in value.split())))
    return tuple(dict.fromkeys((*words, " ".join(words)))) or ("a",)


# --------------------------------------------------------------------------------------------------------- trail


@dataclass
class Trail:
    """What an agent knows from the pages it saw and the actions it took."""

    queries: list[str] = field(default_factory=list)
    """All searches, in order."""
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Code (lower case) -> title and price of every product on a results page, in the order of discovery."""
    texts: dict[str, str] = field(default_factory=dict)
    """Code -> what the product's own pages said, lower case."""
    offered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Code -> names and values of the options of every product looked at."""
    asin: str = ""
    """The product looked at last."""
    chosen: list[str] = field(default_factory=list)
    """Option values clicked since it was opened, in order."""
    bought: bool = False

    def see(self, page: Page) -> None:
        """Take in a page."""
        for asin, title, price in page.products:
            self.seen.setdefault(asin.lower(), (title.lower(), price))
        if page.kind == "item":
            self.offered[self.asin] = page.choices
        if page.kind == "details":
            self.texts[self.asin] = f"{self.texts.get(self.asin, '')} {' '.join(page.details).lower()}"

    def do(self, page: Page, action: str) -> None:
        """Take in an action taken on a page; what the page does not offer does nothing."""
        match = re.match(r"(search|click)\[(.+)\]", action.strip())
        if not match:
            return
        kind, text = match[1], match[2].strip()
        if kind == "search":
            self.queries.append(text)
            self.chosen = []
        elif page.kind == "results" and text in self.seen:
            self.asin, self.chosen = text, []
        elif page.kind == "item" and text in page.choices:
            self.chosen = [value for value in self.chosen if value != text] + [text]
        elif page.kind == "item" and text == "buy now":
            self.bought = True


def follow(observations: Sequence[str], actions: Sequence[str]) -> Trail:
    """The trail of an episode: observation i was seen before action i."""
    trail = Trail()
    for text, action in zip(observations, actions, strict=True):
        page = read_page(text)
        trail.see(page)
        trail.do(page, action)
    return trail


def describe(trail: Trail, request: Request, success: bool) -> tuple[str, str]:
    """Summary and skill of the visit that left this trail."""
    summary = (
        f"Bought {trail.asin}, which {'fits' if success else 'does not fit'}." if trail.bought else "Bought nothing."
    )
    if success:
        named = [value for value in trail.chosen if value in request.options] or trail.chosen
        return summary, workflow(trail.queries[-1], trail.asin, named)
    asin = _best(trail, request)
    return summary, workflow(request.query, asin, request.options) if asin else f"Search {request.query} first."


def workflow(query: str, asin: str, options: Sequence[str]) -> str:
    """The skill: search, open, choose, buy."""
    choose = f", choose {' and '.join(options)}" if options else ""
    return f"Search {query}, open {asin}{choose}, then buy."


def _best(trail: Trail, request: Request) -> str:
    """The seen product that fits best, the first of equals; empty if none fits well enough.

    It has to have every word of the request, or all but one if a search for all of them showed nothing better.
    """
    fits = {asin: _fit(trail, request, asin) for asin in trail.seen}
    best = max(fits, key=lambda asin: fits[asin], default="")
    searched = any(set(request.words) <= set(query.split()) for query in trail.queries)
    return best if best and fits[best] >= max(len(request.words) - searched, 1) else ""


def _fit(trail: Trail, request: Request, asin: str) -> float:
    """How many words of the request a product's known texts hold; 0 for one that cannot be right.

    That is one above the price cap, one that lacks an option of the request, or one that was bought in vain although
    all options were chosen. A product known to have the options counts a little more.
    """
    title, price = trail.seen[asin]
    lowest = float((re.findall(r"\d+(?:\.\d+)?", price.replace(",", "")) or ["0"])[0])
    offered = trail.offered.get(asin)
    in_vain = trail.bought and asin == trail.asin and set(request.options) <= set(trail.chosen)
    too_dear = request.cap is not None and lowest > request.cap
    if too_dear or in_vain or (offered is not None and not set(request.options) <= set(offered)):
        return 0
    text = f"{title} {trail.texts.get(asin, '')}"
    return sum(word in text for word in request.words) + 0.5 * (offered is not None)
