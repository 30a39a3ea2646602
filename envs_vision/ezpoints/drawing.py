"""Pictures of an EZPoints table: two cards above, the formula below.

Everything lies on a grid of 6 x 6 squares: a card's rank fills one square, its suit the one below, and each entry of
the formula has its own. Scaled to 168 x 168, a square is one visual token (28 pixels) of Qwen2.5-VL.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from envs_vision.ezpoints.rules import LONGEST, RANKS, Card
from harness.contracts import Image

SIDE = 300
SQUARE = SIDE // LONGEST
FELT, PAPER, EDGE, RED, BLACK, GREY = "#1d6b45", "#ffffff", "#b8b8b8", "#c8102e", "#101010", "#606060"
CARDS_ROW, FORMULA_ROW = 1, 4


def draw_table(cards: tuple[Card, Card], formula: tuple[str, ...]) -> Image:
    """The table, shape (300, 300, 3)."""
    table = _cards(cards).copy()
    top = FORMULA_ROW * SQUARE
    for column, entry in enumerate(formula):
        table[top : top + SQUARE, column * SQUARE : (column + 1) * SQUARE] = _entry(entry)
    return table


@lru_cache(maxsize=512)
def _cards(cards: tuple[Card, Card]) -> Image:
    """The table with an empty formula."""
    picture = Pillow.new("RGB", (SIDE, SIDE), FELT)
    pen = ImageDraw.Draw(picture)
    for column, card in zip((1, 4), cards, strict=True):
        _card(pen, column * SQUARE + SQUARE // 2, card)
    pen.rectangle((0, FORMULA_ROW * SQUARE, SIDE, SIDE), fill=PAPER)
    pen.text((SIDE // 2, SIDE - SQUARE // 2), "formula", font=ImageFont.load_default(24), fill=GREY, anchor="mm")
    return np.asarray(picture)


@lru_cache
def _entry(entry: str) -> Image:
    """One square of the formula."""
    picture = Pillow.new("RGB", (SQUARE, SQUARE), PAPER)
    font = ImageFont.load_default(44 if len(entry) == 1 else 38)
    ImageDraw.Draw(picture).text((SQUARE // 2, SQUARE // 2), entry, font=font, fill=BLACK, anchor="mm")
    return np.asarray(picture)


def _card(pen: ImageDraw.ImageDraw, middle: int, card: Card) -> None:
    colour = RED if card.suit in "HD" else BLACK
    pen.rounded_rectangle((middle - 64, 12, middle + 64, 188), radius=12, fill=PAPER, outline=EDGE, width=2)
    rank = (middle, CARDS_ROW * SQUARE + SQUARE // 2 - 3)  # the font's middle allows for descenders; only Q has a tail
    pen.text(rank, RANKS[card.rank], font=ImageFont.load_default(62), fill=colour, anchor="mm", stroke_width=1)
    _suit(pen, middle, (CARDS_ROW + 1) * SQUARE + SQUARE // 2 + 6, card.suit, colour)


def _suit(pen: ImageDraw.ImageDraw, x: int, y: int, suit: str, colour: str) -> None:
    """A suit sign of about 36 pixels, centred at (x, y), from circles and triangles."""

    def circle(dx: int, dy: int, radius: int) -> None:
        pen.ellipse((x + dx - radius, y + dy - radius, x + dx + radius, y + dy + radius), fill=colour)

    def polygon(*corners: tuple[int, int]) -> None:
        pen.polygon([(x + dx, y + dy) for dx, dy in corners], fill=colour)

    if suit == "D":
        polygon((0, -19), (14, 0), (0, 19), (-14, 0))
    elif suit == "H":
        circle(-8, -8, 9)
        circle(8, -8, 9)
        polygon((-16, -4), (16, -4), (0, 18))
    elif suit == "S":
        circle(-8, 4, 9)
        circle(8, 4, 9)
        polygon((-16, 0), (16, 0), (0, -19))
        polygon((0, 0), (7, 19), (-7, 19))
    else:
        circle(0, -9, 9)
        circle(-10, 4, 9)
        circle(10, 4, 9)
        polygon((0, -6), (7, 19), (-7, 19))
