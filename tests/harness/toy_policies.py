"""Small policies with random weights, and what tests ask of them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from harness.contracts import Prompt
from harness.policy.base import Request, Sampling
from harness.policy.local import LocalPolicy
from harness.policy.tiny import build_tokenizer

TEXTS = [f"put a clean mug in desk {i}. You see a drawer {i}." for i in range(40)]
SAMPLED = Sampling(temperature=1.0, max_tokens=12)
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def picture(seed: int, size: int = 84) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def sharpen(policy: LocalPolicy) -> LocalPolicy:
    """Random weights with a wider spread, so that distributions are not nearly uniform."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return policy


def toy_tokenizer():
    return build_tokenizer(TEXTS, ["Your task: "], vocab_size=400)


def toy_text_policy(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 5,  # padded, as published models are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        use_sliding_window=False,
    )
    return sharpen(LocalPolicy(Qwen2ForCausalLM(config), tokenizer, None, spec="test"))


def requests_for(policy: LocalPolicy, count: int) -> list[Request]:
    """Prompts of many lengths, some equal; with no, one and two pictures where the policy sees."""
    requests = []
    for i in range(count):
        text = "Your task: " + "put a clean mug in desk. " * (i % 4) + f"You see a drawer {i % 5}."
        images: tuple[np.ndarray, ...] = ()
        if policy.image_processor is not None:
            images = tuple(picture(10 * (i % 5) + k, 84 if k == 0 else 56) for k in range(i % 3))
        text += "".join(f" <image> {k}" for k in range(len(images)))
        requests.append(Request(Prompt(text, images), key=(7, i, -1)))
    return requests


def rows_of(requests, responses):
    return [(request.prompt, response.token_ids) for request, response in zip(requests, responses, strict=True)]


def close(a, b, tolerance):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), atol=tolerance, rtol=0)
