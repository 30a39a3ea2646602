"""Step prompts, the full one and the compact one, and how both read a page's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs_text.webshop import generator
from envs_text.webshop.engine import BACK, BUY, INSTRUCTION, NEXT, PREVIOUS, SEARCH, SEARCH_BAR, SEPARATOR, SUBPAGES
from harness.contracts import View

TASK = "Your task is: "
"""Introduces the task; skills are inserted behind the line that holds it."""

MOST_CHARACTERS = 20_000
"""Longer prompts leave their history out, as in the paper's code."""

ROLE = "You shop in an online store, which you use by text actions alone: searching and clicking."
THINK = "First think about what is asked for, what this page offers and what comes next, between <think> and </think>."
ACT = "Then choose one action from the list, a query in your own words, and write it between <action> and </action>."


def task_in(page: str) -> str:
    """The request stated on a page, without outer blanks."""
    return page.partition(INSTRUCTION + SEPARATOR)[2].partition(SEPARATOR)[0].strip()


def without_task(page: str, task: str) -> str:
    """What a page shows behind the request, each part in quotes; a page without the request as it is."""
    parts = page.split(SEPARATOR)
    if task not in parts:
        return page
    return SEPARATOR.join(f"'{part}'" for part in parts[parts.index(task) + 1 :])


def paper(view: View) -> str:
    """The full prompt, in the field order of the paper's code (section 4.2)."""
    text = _paper(view)
    return text if len(text) <= MOST_CHARACTERS else _paper(replace(view, history=()))


def _paper(view: View) -> str:
    page = without_task(view.observation, view.task)
    actions = "\n".join(f"'{action}'" for action in view.admissible)
    closing = f"Actions you can take now: [\n{actions}\n]\n\nIt is your turn. {THINK} {ACT}"
    if not view.history:
        return f"{ROLE}\n{TASK}{view.task}\nWhat you observe now: {page}\n{closing}"
    past = "\n".join(
        f"[Step {turn.number}: observed '{without_task(turn.observation, view.task)}', took '{turn.action}']"
        for turn in view.history
    )
    return (
        f"{ROLE}\n{TASK}{view.task}\n"
        f"You have taken {view.step - 1} step(s). The last {len(view.history)}, oldest first:\n{past}\n"
        f"You are now at step {view.step} and observe: {page}\n"
        f"{closing}"
    )


# ------------------------------------------------------------------------------------------------ reading a page


@dataclass(frozen=True)
class Page:
    """A page's text taken apart.

    Attributes:
        kind: ``"search"``, ``"results"``, ``"item"`` or ``"details"`` (a sub-page).
        heading: Of results: where in the list this page is.
        products: Of results: (code, title, price) of each, as shown.
        title, price, rating: Of an item.
        choices: Of an item: names and values of its options as one list, in page order.
        details: Of a sub-page: its lines.
    """

    kind: str
    heading: str = ""
    products: tuple[tuple[str, str, str], ...] = ()
    title: str = ""
    price: str = ""
    rating: str = ""
    choices: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


def read_page(page: str) -> Page:
    """Take the text of a page apart."""
    before, _, behind = page.partition(INSTRUCTION + SEPARATOR)
    parts = behind.split(SEPARATOR)[1:]
    if before or parts == [SEARCH]:
        return Page("search")
    parts = parts[1:]  # back to search
    if parts and parts[0].startswith("Page "):
        heading, *rows = parts
        rows = rows[sum(button in rows[:2] for button in (PREVIOUS, NEXT)) :]
        return Page("results", heading, tuple(zip(rows[::3], rows[1::3], rows[2::3], strict=False)))
    parts = parts[1:]  # previous
    if parts and parts[-1] == BUY:
        *choices, title, price, rating = parts[: -1 - len(SUBPAGES)]
        price, rating = price.removeprefix("Price: "), rating.removeprefix("Rating: ")
        return Page("item", title=title, price=price, rating=rating, choices=tuple(choices))
    return Page("details", details=tuple(parts))


# ------------------------------------------------------------------------------------------------- compact prompt


def compact(view: View) -> str:
    """The same facts for a policy that knows nothing else: request, last actions, the page in brief, what to click."""
    past = "".join(f"\n> {turn.action}" for turn in view.history)
    lines, told = _brief(read_page(view.observation), view.admissible)
    buttons = (action for action in view.admissible if action not in told)
    return f"{TASK}{view.task}{past}\n" + "\n".join((*lines, *buttons))


def _brief(page: Page, admissible: Sequence[str]) -> tuple[list[str], set[str]]:
    """The lines that describe a page in lower case, and the actions that they state or that need no line."""
    if page.kind == "search":
        return [], set(admissible) - {SEARCH_BAR}
    if page.kind == "results":
        clicks = [f"click[{asin.lower()}]" for asin, _, _ in page.products]
        rows = [
            f"{click} {title.lower()} {price}" for click, (_, title, price) in zip(clicks, page.products, strict=True)
        ]
        return [_place(page.heading), *rows], set(clicks)
    if page.kind == "item":
        rated = "" if page.rating == "N.A." else f" rated {page.rating}"
        return [f"item: {page.title.lower()} {page.price}{rated}", *_option_lines(page, admissible)], {
            f"click[{text}]" for text in page.choices
        }
    return [f"about: {_ascii(line.lower())}" for line in page.details], set()


def brief(text: str) -> str:
    """A page or an action as compact analysis prompts quote it."""
    if INSTRUCTION not in text:
        return text
    page = read_page(text)
    lines, _ = _brief(replace(page, choices=()), ())
    return " ".join(("\n".join(lines), *page.choices)) if lines else "search"


def _place(heading: str) -> str:
    """``"page 2 of 5"`` for ``"Page 2 (Total results: 50)"``."""
    number, total = (int(found) for found in re.findall(r"\d+", heading))
    return f"page {number} of {-(-total // 10)}"


def _option_lines(page: Page, admissible: Sequence[str]) -> list[str]:
    """One line an option: its name and what to click for each value."""
    lines: list[str] = []
    for text in page.choices:
        if f"click[{text}]" in admissible and lines:
            lines[-1] += f" click[{text}]"
        else:
            lines.append(f"{text}:")
    return lines


def _ascii(line: str) -> str:
    return line.replace("›", ">")


_WORDS = sorted({name for department in generator.DEPARTMENTS.values() for name in department.options})

PHRASES: tuple[str, ...] = (
    # frame
    TASK,
    "\n\n" + TASK,
    "Find me",
    "\n> search[",
    "\n> click[",
    "\n> click[b0",
    *(f"\n> click[{button.lower()}]" for button in (BACK, PREVIOUS, NEXT, *SUBPAGES)),
    "<think>",
    "</think><action>search[",
    "</think><action>click[",
    "</think><action>click[b0",
    *(f"</think><action>click[{button.lower()}]</action>" for button in (BACK, PREVIOUS, NEXT, *SUBPAGES, BUY)),
    "]</action>",
    # actions in lists
    "\n" + SEARCH_BAR,
    "\nclick[",
    "\nclick[b0",
    " click[",
    *(f"\nclick[{button.lower()}]" for button in (BACK, PREVIOUS, NEXT, BUY)),
    "".join(f"\nclick[{button.lower()}]" for button in (BACK, PREVIOUS)),
    "".join(f"\nclick[{button.lower()}]" for button in (BACK, PREVIOUS, *SUBPAGES, BUY)),
    # pages
    "\npage",
    "\nitem:",
    "\nabout:",
    *(f"\n{name}:" for name in _WORDS),
    # requests
    *(f"{start} {name}:" for name in _WORDS for start in (" with", ", and")),
    ", and price lower than",
    *(f" {cap} dollars" for cap in generator.CAPS),
    *(f" ${price}" for price in generator.PRICES),
    # codes
    *generator.HEADS,
    *generator.TAILS,
    # as analysis prompts quote them
    "page",
    "item:",
    "about:",
    "\nAct: search[",
    "\nAct: click[",
    "\nAct: click[b0",
    *(f"\nAct: click[{button.lower()}]" for button in (BACK, PREVIOUS, NEXT, *SUBPAGES, BUY)),
    # thoughts and skills
    ", open b0",
    ", choose",
    ", then buy.",
    " first.",
    "Bought b0",
    ", which fits.",
    ", which does not fit.",
    "Bought nothing.",
)
"""Fixed pieces that become single tokens of the tiny policy; words of goods and requests stay words."""
