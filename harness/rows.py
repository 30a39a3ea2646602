"""What an update is made of: step rows, their per-token streams, their scores, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from harness import objective
from harness.cards import Ledger
from harness.config import EngineConfig
from harness.contracts import Episode, Prompt
from harness.credit import Credit
from harness.policy.base import Policy
from harness.policy.local import LocalPolicy


@dataclass(frozen=True)
class Row:
    """One step of one episode, as training sees it.

    Attributes:
        response: Sampled token ids.
        logp_old: Their log-probs when they were sampled (theta_old).
        episode: Index of the episode within the update.
        group: Index of the task within the update; rows of one task share a mini-batch.
        advantage: A, the same for all tokens; None where the row takes no part in the policy gradient.
        teacher_prompt: What the teacher reads in place of ``prompt``; None where the row is not distilled.
        watched: Whether the update tells what each of its tokens learned.
        correction: Factor of each token's policy gradient where an engine sampled it; None where there is none.
    """

    prompt: Prompt
    response: tuple[int, ...]
    logp_old: tuple[float, ...]
    episode: int
    group: int
    advantage: float | None
    teacher_prompt: Prompt | None = None
    watched: bool = False
    correction: tuple[float, ...] | None = None

    @property
    def active(self) -> bool:
        return self.advantage is not None or self.teacher_prompt is not None


Sample = tuple[Prompt, tuple[int, ...]]
"""A prompt and the answer to learn by heart: what SFT and rehearsal train on."""


class Update(NamedTuple):
    """What came of an update.

    Attributes:
        statistics: Means over the mini-batches, by name.
        credit: What the tokens of each watched row that was trained on were told to learn, by the row's index.
    """

    statistics: dict[str, float]
    credit: dict[int, Credit]


@dataclass(frozen=True)
class Streams:
    """Per-row vectors over response tokens, computed before they are needed in a loss.

    Attributes:
        advantage: A of each token; 0 where the row takes no part in the policy gradient.
        policy, distill, every: Weights of each token in the policy-gradient term, in the distillation term and in the
            KL and entropy terms; each sums to 1 over the mini-batch's own active tokens.
        reference: log pi_ref; empty without a KL term.
        teacher: log pi_T for distilled rows; empty where the teacher is scored inside the loss.
    """

    advantage: tuple[torch.Tensor, ...]
    policy: tuple[torch.Tensor, ...]
    distill: tuple[torch.Tensor, ...]
    every: tuple[torch.Tensor, ...]
    reference: dict[int, torch.Tensor]
    teacher: dict[int, torch.Tensor]


def choose(rows: Sequence[Row], limit: int | None, key: tuple[int, ...]) -> list[int]:
    """Places of the rows that any loss term uses, at most ``limit`` of them, drawn without replacement."""
    active = [place for place, row in enumerate(rows) if row.active and row.response]
    if limit is None or len(active) <= limit:
        return active
    chosen = np.random.default_rng(key).choice(len(active), limit, replace=False)
    return [active[i] for i in sorted(chosen)]


def mini_batches(rows: Sequence[Row], count: int, key: tuple[int, ...]) -> list[list[int]]:
    """Split by task, so that equal states stay together and are encoded once; sizes are balanced greedily."""
    by_group: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_group[row.group].append(index)
    order = np.random.default_rng(key).permutation(sorted(by_group))
    batches: list[list[int]] = [[] for _ in range(min(count, len(order)))]
    for group in order:
        min(batches, key=len).extend(by_group[int(group)])
    return batches


def forward_flops(policy: Policy, prompts: Iterable[Prompt], response_tokens: int) -> float:
    """Estimated cost of one forward pass: 2 x parameters x tokens, prompts included."""
    return 2.0 * policy.parameters * (sum(policy.prompt_tokens(prompt) for prompt in prompts) + response_tokens)


def training_flops(policy: LocalPolicy, prompts: Iterable[Prompt], response_tokens: int) -> float:
    """Estimated cost of training on the rows: three times a forward pass, or twice where all but adapters is frozen.

    The backward pass costs one forward for the gradients of activations and one for those of the weights.
    """
    return (2 if policy.adapters else 3) * forward_flops(policy, prompts, response_tokens)


def score_rows(
    policy: LocalPolicy, pairs: Sequence[tuple[Prompt, Sequence[int]]], temperature: float
) -> list[torch.Tensor]:
    """Log-probs of each response under each prompt, without gradient: one vector per pair."""
    if not pairs:
        return []
    with torch.no_grad():
        scores = policy.score(pairs, temperature=temperature)
    return list(scores.split())


def rescored(
    rows: Sequence[Row], scores: Mapping[int, torch.Tensor], engine: EngineConfig
) -> tuple[list[Row], dict[str, float]]:
    """Rows that an engine sampled, under the policy's own log-probs, and how far the engine was from them.

    Args:
        rows: ``logp_old`` holds what the engine reported.
        scores: The policy's log-probs of the rows that are trained on, by index.
        engine: Whether and how the gap is corrected.

    Returns:
        The rows, and in nats per token, with d = l - l_sampler: ``sampler/gap`` = mean |d|, ``sampler/gap_max``,
        ``sampler/kl`` = mean -d, an unbiased estimate of KL(sampler || policy), and under the truncated correction its
        mean ``sampler/weight``. Without tokens there are no statistics.
    """
    new, gaps, weights = list(rows), [], []
    for index, logp in scores.items():
        sampled = logp.new_tensor(rows[index].logp_old)
        gaps.append(logp - sampled)
        weights.append(objective.truncated_importance(logp, sampled, engine.cap))
        new[index] = replace(
            rows[index],
            logp_old=tuple(logp.tolist()),
            correction=tuple(weights[-1].tolist()) if engine.correction == "truncated" else None,
        )
    if not gaps:
        return new, {}
    gap = torch.cat(gaps)
    statistics = {"gap": gap.abs().mean(), "gap_max": gap.abs().max(), "kl": -gap.mean()}
    if engine.correction == "truncated":
        statistics["weight"] = torch.cat(weights).mean()
    return new, {f"sampler/{name}": value.item() for name, value in statistics.items()}


def charge_play(ledger: Ledger, policy: LocalPolicy, episodes: Sequence[Episode]) -> int:
    """Charge what playing the episodes cost; returns the sampled tokens."""
    steps = [step for episode in episodes for step in episode.steps]
    tokens = sum(len(step.response.token_ids) for step in steps)
    ledger.episodes += len(episodes)
    ledger.env_steps += len(steps)
    ledger.sampled_tokens += tokens
    ledger.flops += forward_flops(policy, (step.prompt for step in steps), tokens)
    return tokens
