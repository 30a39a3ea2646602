"""What an update is made of: step rows, their per-token streams, their scores, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.contracts import Episode, Ledger, Prompt
from harness.credit import Credit
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
    """

    prompt: Prompt
    response: tuple[int, ...]
    logp_old: tuple[float, ...]
    episode: int
    group: int
    advantage: float | None
    teacher_prompt: Prompt | None = None
    watched: bool = False

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


def forward_flops(policy: LocalPolicy, prompts: Iterable[Prompt], response_tokens: int) -> float:
    """Estimated cost of one forward pass: 2 x parameters x tokens, prompts included."""
    return 2.0 * policy.parameters * (sum(policy.prompt_tokens(prompt) for prompt in prompts) + response_tokens)


def score_rows(
    policy: LocalPolicy, pairs: Sequence[tuple[Prompt, Sequence[int]]], temperature: float
) -> list[torch.Tensor]:
    """Log-probs of each response under each prompt, without gradient: one vector per pair."""
    if not pairs:
        return []
    with torch.no_grad():
        scores = policy.score(pairs, temperature=temperature)
    return list(scores.split())


def charge_play(ledger: Ledger, policy: LocalPolicy, episodes: Sequence[Episode]) -> int:
    """Charge what playing the episodes cost; returns the sampled tokens."""
    steps = [step for episode in episodes for step in episode.steps]
    tokens = sum(len(step.response.token_ids) for step in steps)
    ledger.episodes += len(episodes)
    ledger.env_steps += len(steps)
    ledger.sampled_tokens += tokens
    ledger.flops += forward_flops(policy, (step.prompt for step in steps), tokens)
    return tokens
