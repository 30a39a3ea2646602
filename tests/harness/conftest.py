"""Policies of random weights that several test files share; each file gets its own."""

from __future__ import annotations

import pytest
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
