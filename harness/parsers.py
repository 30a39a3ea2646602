"""Reading ``<think>...</think><action>...</action>`` answers, as text environments share it."""

from __future__ import annotations

import re

_CHINESE = re.compile("[\u4e00-\u9fff]")


def parse_tags(
    response: str, fallback_chars: int = 30, require_think: bool = True, allow_chinese: bool = False
) -> tuple[str, bool]:
    """The action in a tagged answer and whether the answer has the asked form (paper, section 4.1).

    The action is the lower-cased text between the first ``<action>`` and the first ``</action>``, in any case, without
    outer blanks; it may be empty. Without the pair it is the last ``fallback_chars`` characters, and the answer is
    invalid. An answer is also invalid if it contains a Chinese character (U+4E00..U+9FFF), unless ``allow_chinese``,
    or, with ``require_think``, no ``<think>`` and ``</think>`` (lower case, in any order). The action is not compared
    with any list.
    """
    text = response.lower()
    start, end = text.find("<action>"), text.find("</action>")
    if start < 0 or end < 0:
        return text[max(len(text) - fallback_chars, 0) :], False
    action = text[start + len("<action>") : end].strip()
    thinks = "<think>" in response and "</think>" in response
    return action, (allow_chinese or not _CHINESE.search(response)) and (thinks or not require_think)


def write_tags(action: str, thought: str = "") -> str:
    """The answer that :func:`parse_tags` reads as ``action``."""
    return f"<think>{thought}</think><action>{action}</action>"
