"""The sampling loop: every distinct prompt is read once, finished answers leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.policy.base import Sampling
from harness.policy.encode import Encoded
from harness.policy.forward import AnswerKeys, Decoder
from harness.policy.randomness import uniforms

SAMPLED_AT_ONCE = 2**24
"""Logits whose distribution is held in float64 at a time."""

COMPACT_BELOW = 0.8
"""Finished answers leave the batch when fewer than this share of its rows is still growing."""


@dataclass
class Answer:
    """One sampled token sequence and the log-probability of each token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


@torch.no_grad()
def generate(
    decoder: Decoder,
    logits: Callable[[Tensor], Tensor],
    prompts: Sequence[Encoded],
    owner: Sequence[int],
    keys: Sequence[tuple[int, ...]],
    sampling: Sampling,
    token_budget: int,
    eos_ids: frozenset[int],
) -> list[Answer]:
    """Sample one answer for each key.

    Args:
        decoder: The model.
        logits: Maps hidden states (rows, width) to logits (rows, vocabulary) in float32, banned tokens pushed down.
        prompts: Distinct prompts.
        owner: For each answer, the index of its prompt.
        keys: For each answer, the integers all of its randomness is derived from.
        sampling: Temperature and token limit.
        token_budget: Padded prompt tokens read at a time.
        eos_ids: Tokens that end an answer; they are kept.
    """
    device = decoder.device
    owners = torch.tensor(owner, device=device)
    last, layers = decoder.prefill_in_parts(prompts, token_budget)
    cache = AnswerKeys(layers, owners)
    longest = cache.length
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    seen = (torch.arange(longest, device=device) < lengths[:, None])[owners]
    positions = torch.tensor([prompt.next_position for prompt in prompts], device=device)[owners]
    noise = None
    if sampling.temperature > 0:
        noise = torch.from_numpy(np.stack([uniforms(key, sampling.max_tokens) for key in keys])).to(device)
    ends = torch.tensor(sorted(eos_ids), device=device)

    answers = [Answer() for _ in keys]
    rows = torch.arange(len(keys), device=device)
    growing = torch.ones(len(keys), dtype=torch.bool, device=device)
    scores = logits(last)[owners]
    for step in range(sampling.max_tokens):
        chosen, logprobs = choose(scores, sampling.temperature, None if noise is None else noise[rows, step])
        ended = torch.isin(chosen, ends)
        for row, alive, token, logprob, end in zip(
            rows.tolist(), growing.tolist(), chosen.tolist(), logprobs.tolist(), ended.tolist(), strict=True
        ):
            if alive:
                answers[row].ids.append(token)
                answers[row].logprobs.append(logprob)
                answers[row].finished = end
        growing &= ~ended
        count = int(growing.sum())
        if count == 0 or step + 1 == sampling.max_tokens:
            break
        if count < COMPACT_BELOW * len(rows):
            kept = growing.nonzero()[:, 0]
            rows, growing, chosen = rows[kept], growing[kept], chosen[kept]
            positions, seen = positions[kept], seen[kept]
            cache.keep(kept)
        seen = torch.cat([seen, seen.new_ones(len(rows), 1)], dim=1)
        hidden = decoder.extend(chosen[:, None], positions[:, None] + step, seen[:, None, None], cache)
        scores = logits(hidden[:, 0])
    return answers


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution, or take the likeliest where noise is None.

    Args:
        logits: Shape (rows, vocabulary), float32.
        temperature: Divides the logits; ignored for greedy choices.
        noise: Uniform numbers, shape (rows,), float64.

    Returns:
        Tokens and their log-probabilities, shape (rows,) each.
    """
    if noise is None:
        chosen = logits.argmax(dim=-1)
        return chosen, logits.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(logits), device=logits.device)
    block = max(1, SAMPLED_AT_ONCE // logits.shape[1])
    for start in range(0, len(logits), block):
        span = slice(start, start + block)
        distribution = (logits[span] / temperature).log_softmax(dim=-1)
        cumulative = distribution.exp().cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # Below the total even after rounding, so that the token found has a probability above 0.
        target = torch.minimum(noise[span, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen[span] = torch.searchsorted(cumulative, target, right=True)[:, 0]
        logprobs[span] = distribution.gather(1, chosen[span, None])[:, 0]
    return chosen, logprobs
