"""Exact match of answers, normalised as the field does it (paper section 4.3)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case; ASCII punctuation deleted (``"well-known"`` gives ``"wellknown"``); then the articles a, an, the, and
    runs of white space, replaced by one blank."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether a prediction equals any of the answers, both normalised."""
    found = normalise(prediction)
    return any(normalise(answer) == found for answer in answers)
