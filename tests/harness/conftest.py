"""Policies of random weights that several test files share; each file gets its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_cells import toy_policy
from toy_policies import sharpen, toy_text_policy, toy_tokenizer

from harness.policy.tiny import new_tiny


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture(scope="module")
def tiny(tokenizer):
    return sharpen(new_tiny(tokenizer, seed=0))


@pytest.fixture(scope="module")
def text_only(tokenizer):
    return toy_text_policy(tokenizer)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a saved policy; files that measure policies have a fixture of their own by this name."""
    place = tmp_path_factory.mktemp("toy") / "policy"
    toy_policy().save(place)
    return place
