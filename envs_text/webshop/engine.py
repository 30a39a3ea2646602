"""The shop as a visitor sees it: pages, links and the choices made, for one request.

Pages and links are those of the original's text mode: a search page, pages of ten results, item pages with their
options, and four sub-pages. Links are clicked by their lower-case text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from envs_text.webshop.catalogue import Goal, Product

SEPARATOR = " [SEP] "
INSTRUCTION = "Instruction:"
SEARCH, BACK, PREVIOUS, NEXT, BUY = "Search", "Back to Search", "< Prev", "Next >", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews", "Attributes")
SEARCH_BAR = "search[<your query>]"
"""How lists of actions offer a search."""

WINDOW = 10
"""Results on a page."""

_ACTION = re.compile(r"(search|click)\[(.+)\]")


class Visit:
    """One visit to the shop, from the search page to the purchase.

    Attributes:
        page: ``"search"``, ``"results"``, ``"item"``, the lower-case name of a sub-page, or ``"bought"``.
        results: Codes that the last search found, best first.
        number: 1-based number of the results page.
        asin: Code of the article looked at last, upper case.
        chosen: Option name -> value chosen on its page; forgotten on return to the results.
        text: The page, its parts joined by ``[SEP]``.
        clicks: What can be clicked, lower case -> what it is: a button, ``"product"``, or ``"option NAME"``.
    """

    def __init__(self, goal: Goal, search: Callable[[str], Sequence[str]], product: Callable[[str], Product]) -> None:
        self.goal = goal
        self._search, self._product = search, product
        self.page, self.number, self.asin = "search", 1, ""
        self.results: Sequence[str] = ()
        self.chosen: dict[str, str] = {}
        self._show()

    @property
    def product(self) -> Product:
        """The article looked at last."""
        return self._product(self.asin)

    @property
    def admissible(self) -> tuple[str, ...]:
        """All actions that this page offers, in the original's order: buttons, products, options."""
        bar = (SEARCH_BAR,) if self.page == "search" else ()
        return bar + tuple(f"click[{text}]" for text in self.clicks)

    def act(self, action: str) -> bool:
        """Search or click; False for what this page does not offer, which changes nothing.

        As in the original a search works on every page, and the button beside the search bar does nothing by itself.
        """
        match = _ACTION.match(action.strip().lower())
        if match is None or self.page == "bought":
            return False
        kind, text = match[1], match[2].strip()
        if kind == "search":
            if not text:
                return False
            self.results = self._search(text)
            self._list(1)
        elif text not in self.clicks:
            return False
        else:
            self._click(text, self.clicks[text])
        self._show()
        return True

    def _click(self, text: str, what: str) -> None:
        if what == "product":
            self.page, self.asin = "item", text.upper()
        elif what.startswith("option "):
            self.chosen[what.removeprefix("option ")] = text
        elif what == BACK:
            self.page = "search"
        elif what == NEXT:
            self._list(self.number + 1)
        elif what == PREVIOUS:
            if self.page == "results":
                self._list(self.number - 1)
            elif self.page == "item":
                self._list(self.number)
            else:
                self.page = "item"
        elif what in SUBPAGES:
            self.page = text
        elif what == BUY:
            self.page = "bought"

    def _list(self, number: int) -> None:
        self.page, self.number, self.chosen = "results", number, {}

    def _show(self) -> None:
        parts, buttons = [INSTRUCTION, self.goal.instruction], [BACK]
        products: Sequence[str] = ()
        options: dict[str, str] = {}
        if self.page == "search":
            parts, buttons = ["WebShop", *parts, SEARCH], [SEARCH]
        elif self.page == "results":
            last = self.number * WINDOW
            buttons += [PREVIOUS] * (self.number > 1) + [NEXT] * (last < len(self.results))
            parts += [BACK, f"Page {self.number} (Total results: {len(self.results)})", *buttons[1:]]
            products = self.results[last - WINDOW : last]
            for product in map(self._product, products):
                parts += [product.asin, product.title, product.price_text]
        elif self.page == "item":
            product = self.product
            buttons += [PREVIOUS, *SUBPAGES, BUY]
            parts += [BACK, PREVIOUS]
            for name, values in product.options.items():
                parts += [name, *values]
                options |= dict.fromkeys(values, f"option {name}")
            parts += [product.title, f"Price: {product.price_text}", f"Rating: {product.rating}", *SUBPAGES, BUY]
        elif self.page == "bought":
            parts, buttons = [f"Bought {self.asin}"], []
        else:
            buttons += [PREVIOUS]
            parts += [BACK, PREVIOUS, *_details(self.product, self.page)]
        self.text = SEPARATOR.join(parts)
        self.clicks = (
            {text.lower(): text for text in buttons} | {asin.lower(): "product" for asin in products} | options
        )


def _details(product: Product, page: str) -> Sequence[str]:
    """The parts of a sub-page."""
    if page == "description":
        return [product.description or "No description"]
    if page == "features":
        return product.bullets or ["No features"]
    if page == "reviews":
        return product.reviews or ["No reviews"]
    return [*product.attributes, product.category, product.query, product.product_category]
