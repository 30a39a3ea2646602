"""Memory: scoring beside whole logits, and what an update keeps for its backward pass as it grows.

The second is exact: every tensor that autograd keeps is counted while it lives, each storage once, weights excepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from harness.cards import Ledger
from harness.config import TrainConfig
from harness.contracts import Prompt
from harness.methods import Method
from harness.naive import full_logits_scores
from harness.perf.measure import REPEATS, Measurement, Report, Result, Settings, peak_megabytes
from harness.policy.load import load_local
from harness.policy.local import LocalPolicy
from harness.policy.tiny import new_tiny, tiny_config
from harness.rows import Row
from harness.trainer import Trainer

MEMORY_GOAL = 0.5

VOCABULARY = 150_000
ROWS, NUMBERS = 8, 24

GROWTH = (1, 2, 4, 8)
FLAT, LINEAR = 1.1, 1.15
"""Largest growth of what should not grow, and of what grows with the budget beside that."""
UPDATE_ROWS, UPDATE_NUMBERS, BUDGET = 128, 12, 2048


def memory_use(settings: Settings, report: Report) -> Iterator[Result]:
    """All of what this module measures."""
    yield from scoring_memory(settings, report)
    report("memory: update")
    yield from update_memory(load_local(settings.policy))


def scoring_memory(settings: Settings, report: Report) -> Iterator[Result]:
    """Peak memory of scoring answers, forward and backward, against the logits of whole rows."""
    tokenizer = load_local(settings.policy).tokenizer
    config = tiny_config(tokenizer)
    config.get_text_config().vocab_size = VOCABULARY
    policy = new_tiny(tokenizer, 0, config)
    rng = np.random.default_rng(0)
    numbers = rng.integers(1000, size=(ROWS, NUMBERS))
    rows = [(Prompt(" ".join(map(str, row))), policy.answer_ids(" ".join(map(str, row[:8])))) for row in numbers]
    ids = [(policy.encode(prompt).ids.tolist(), answer) for prompt, answer in rows]

    def backward(scores: Tensor) -> None:
        policy.model.zero_grad()
        scores.sum().backward()

    peaks: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS):
        report(f"memory: {repeat + 1} of {REPEATS}")
        peaks[0].append(peak_megabytes(lambda: backward(policy.score(rows).logprobs)))
        peaks[1].append(peak_megabytes(lambda: backward(full_logits_scores(policy.model, ids))))
    tokens = sum(len(prompt) + len(answer) for prompt, answer in ids)
    ours, reference = map(median, peaks)
    yield Measurement("memory", "scoring", ours, reference, "MB", MEMORY_GOAL, "at most")
    yield (
        f"memory: peak of forward and backward over {tokens:,} tokens, {sum(len(answer) for _, answer in ids)} of them "
        f"answers, at a vocabulary of {VOCABULARY:,}, against the logits of every token"
    )


# ------------------------------------------------------------------------------------------------- an update


def update_memory(policy: LocalPolicy) -> Iterator[Result]:
    """Peak of what an update keeps for its backward pass: against rows, length of the rows, and the token budget."""
    grown = {
        "rows": [update_peak(policy, rows=factor * UPDATE_ROWS) for factor in GROWTH],
        "length of a row": [update_peak(policy, numbers=factor * UPDATE_NUMBERS) for factor in GROWTH],
        "token budget": [
            update_peak(policy, rows=GROWTH[-1] * UPDATE_ROWS, budget=factor * BUDGET) for factor in GROWTH
        ],
    }
    table = Table(
        "", *(f"x {factor}" for factor in GROWTH), title="MB kept by an update", title_justify="left", box=None
    )
    for name, peaks in grown.items():
        goal = GROWTH[-1] * LINEAR if name == "token budget" else FLAT
        yield Measurement("memory", f"update, {name} x {GROWTH[-1]}", peaks[-1], peaks[0], "MB", goal, "at most")
        table.add_row(name, *(f"{peak:.2f}" for peak in peaks))
    yield table


def update_peak(
    policy: LocalPolicy, rows: int = UPDATE_ROWS, numbers: int = UPDATE_NUMBERS, budget: int = BUDGET
) -> float:
    """Most megabytes kept at once by an update on made-up rows whose prompts are so many random numbers."""
    rng = np.random.default_rng(0)
    config = TrainConfig(updates=1, token_budget=budget, kl=0.0, learning_rate=1e-9)
    made = []
    for place in range(rows):
        text = " ".join(map(str, rng.integers(1000, size=numbers)))
        answer = policy.answer_ids(text[:12])
        made.append(Row(Prompt(text), answer, (-1.0,) * len(answer), episode=place, group=place, advantage=1.0))
    trainer = Trainer(policy, Method(name="grpo", summary=""), config, seed=0)
    with kept_tensors(policy) as kept:
        trainer.update(made, 1, Ledger())
    return kept.peak / 1e6


@dataclass
class Kept:
    """Bytes that autograd keeps, now and at most so far; ``storages`` counts the holders of each storage."""

    now: int = 0
    peak: int = 0
    storages: Counter[int] = field(default_factory=Counter)


class _Holder:
    """A tensor in the graph; it goes when the graph does."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self.kept = tensor.detach(), kept  # with its history it would keep the graph that keeps it
        self.storage, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if not kept.storages[self.storage]:
            kept.now += self.size
            kept.peak = max(kept.peak, kept.now)
        kept.storages[self.storage] += 1

    def __del__(self) -> None:
        self.kept.storages[self.storage] -= 1
        if not self.kept.storages[self.storage]:
            self.kept.now -= self.size


@contextmanager
def kept_tensors(policy: LocalPolicy) -> Iterator[Kept]:
    """Count what autograd keeps meanwhile, without the policy's weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor | _Holder:
        return tensor if tensor.untyped_storage().data_ptr() in weights else _Holder(tensor, kept)

    def unpack(packed: Tensor | _Holder) -> Tensor:
        return packed.tensor if isinstance(packed, _Holder) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield kept
