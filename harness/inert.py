"""Foreign text made harmless: what models, pages, passages, files and servers wrote is data wherever it ends up.

Prompts and files need :func:`readable` text, terminals and exported tables :func:`visible` text.
"""

from __future__ import annotations

import re

_HALF_PAIRS = re.compile("[\ud800-\udfff]")

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks, embeddings, overrides and isolates: they show the text around them in another order than it has."""

_SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **{code: f"\\u{code:04x}" for code in (*range(0x80, 0xA0), *_BIDI, 0x2028, 0x2029, *range(0xD800, 0xE000))},
    **{code: f"\\u{code:04x}" for code in (0xFFFE, 0xFFFF)},  # no XML file, such as a figure, may hold them
}
_STEERING = re.compile(f"[{''.join(map(chr, _SIGNS))}]")


def readable(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair: JSON can spell one, UTF-8 cannot hold it."""
    return text if text.isascii() else _HALF_PAIRS.sub("\N{REPLACEMENT CHARACTER}", text)


def visible(text: str) -> str:
    """The text with a sign for every character that would steer a terminal or reorder a line.

    Escape, carriage return and the other control characters become their symbols (``␛``), those without one and the
    bidirectional controls their code (``\\u202e``). Line feeds and tabs stay.
    """
    return text if text.isprintable() else _STEERING.sub(lambda match: _SIGNS[ord(match[0])], text)


def one_line(text: str) -> str:
    """:func:`visible` text in one line: every stretch of white space that holds a line feed or a tab is a blank."""
    return re.sub(r" *[\t\n][ \t\n]*", " ", visible(text)).strip()
