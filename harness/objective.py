"""Losses and advantages: pure functions on tensors.

Every loss component is a tensor with one value per response token, in flat ``[N]`` or padded ``[B, T]`` layout. What
enters the gradient is ``average(loss, weights)``; the weights of a component sum to one over that component's own
active tokens, so adding a component never rescales another, and cutting a mini-batch into micro-batches (weights
computed once, then sliced) changes nothing.

Symbols of the paper in comments: l, l_old, l_ref, l_s are the log-probs of the sampled token under the policy being
optimised, the policy that sampled, the reference policy, and the policy that also sees the skill.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from harness.methods import Advantage

EPS = 1e-6
"""Added to a group's standard deviation."""

_SAME_REWARD = 1e-9
"""Rewards closer than this are one outcome: sums of equal step rewards in another order differ by about 1e-16."""

_HIGHEST_LOG_RATIO = 60.0
"""exp stays finite in float32. Beyond it every use below is clipped anyway, so values and gradients are exact, where
an uncapped exp would overflow and turn the zero gradient of the clipped branch into NaN."""

_LOWEST_LOGP = -100.0
"""Stands for log 0 where a log-prob is multiplied by its probability."""

Stats = dict[str, Tensor]
"""Per-token statistics, to be averaged with the weights of the component they describe."""


# ------------------------------------------------------------------------------------------------ averaging


def token_weights(
    active: Tensor, normalise: Literal["token", "episode"] = "token", episodes: Tensor | None = None
) -> Tensor:
    """Weights of the active tokens that sum to one; all zero where no token is active.

    Args:
        active: Mask of the tokens that take part, any shape, bool or 0/1.
        normalise: ``"token"`` weighs all active tokens alike; ``"episode"`` averages inside each episode first, then
            over the episodes that have an active token.
        episodes: Number of each token's episode (any integers), broadcastable to ``active``; for ``"episode"`` only.

    Returns:
        Weights of the shape of ``active``, float64.

    Raises:
        ValueError: ``"episode"`` without ``episodes``.
    """
    mask = active.to(torch.float64)
    if normalise == "token":
        return mask / mask.sum().clamp(min=1)
    if episodes is None:
        raise ValueError("averaging over episodes first needs the episode of every token")
    _, index = torch.unique(episodes.expand_as(mask), return_inverse=True)
    tokens = torch.zeros(int(index.max()) + 1 if index.numel() else 0, dtype=torch.float64, device=mask.device)
    tokens = tokens.index_add(0, index.flatten(), mask.flatten())
    return mask / tokens.clamp(min=1)[index] / (tokens > 0).sum().clamp(min=1)


def average(per_token: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum as a scalar; what stands at tokens of weight zero does not matter, be it NaN."""
    weights = weights.to(per_token.dtype)
    return (weights * torch.where(weights > 0, per_token, 0.0)).sum()


# ----------------------------------------------------------------------------------------------- components


def policy_gradient(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float = 0.2, dual_clip: float = 3.0
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate, clipped on both sides, with a dual clip for negative advantages.

    r = exp(l - l_old);  loss = max(-A r, -A clamp(r, 1 - clip, 1 + clip)), and for A < 0 at most -A dual_clip.

    Statistics: ``clip_fraction``, ``dual_clip_fraction`` (0 or 1 per token) and ``approx_kl`` = l_old - l.
    """
    log_ratio = logp - logp_old
    ratio = log_ratio.clamp(max=_HIGHEST_LOG_RATIO).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(plain, clipped)
    cap = -advantage * dual_clip
    negative = advantage < 0
    stats = {
        "clip_fraction": (clipped > plain).to(logp.dtype).detach(),
        "dual_clip_fraction": ((loss > cap) & negative).to(logp.dtype).detach(),
        "approx_kl": -log_ratio.detach(),
    }
    return torch.where(negative, torch.minimum(loss, cap), loss), stats


def kl_k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Low-variance estimate of KL(policy || reference) per token: exp(d) - d - 1 with d = l_ref - l, in [-10, 10].

    Outside that range the value is clamped and its gradient is zero.
    """
    d = logp_ref - logp
    return (d.clamp(max=_HIGHEST_LOG_RATIO).exp() - d - 1).clamp(-10.0, 10.0)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits); shape ``[..., V]`` to ``[...]``. Banned tokens may have logit -inf."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp.clamp(min=_LOWEST_LOGP)).sum(dim=-1)


def gated_nll(logp: Tensor, logp_skill: Tensor, beta: float = 5.0, centred: bool = False) -> tuple[Tensor, Stats]:
    """SEED's distillation: negative log-likelihood of the own samples, weighted by what the skill thinks of them.

    D = sg(l_s - l), g = sigmoid(beta D), loss = g (sg(l_s) - l), so the gradient is -g grad l. ``centred`` replaces g
    by 2g - 1, which is zero where the skill makes no difference and negative where it lowers the token's probability.
    The value may be negative; only the gradient matters.

    Statistics: ``gate`` = g, ``gate_open`` (1 where g > 1/2) and ``gap`` = D.
    """
    gap = (logp_skill - logp).detach()
    gate = torch.sigmoid(beta * gap)
    weight = 2 * gate - 1 if centred else gate
    stats = {"gate": gate, "gate_open": (gate > 0.5).to(gate.dtype), "gap": gap}
    return weight * (logp_skill.detach() - logp), stats


def reverse_kl_sampled(
    logp: Tensor, logp_old: Tensor, logp_teacher: Tensor, clip: float = 0.2, dual_clip: float = 3.0
) -> tuple[Tensor, Stats]:
    """On-policy distillation from the sampled tokens alone: policy gradient with reward l_T - l_old at each token.

    At l = l_old the expected gradient over the policy's own samples is the gradient of KL(policy || teacher) of the
    token at hand (later tokens' divergence is not credited to it). Only ``logp`` carries a gradient.

    Statistics: those of ``policy_gradient`` and ``teacher_kl`` = l_old - l_T, an unbiased estimate of that KL.
    """
    reward = (logp_teacher - logp_old).detach()
    loss, stats = policy_gradient(logp, logp_old, reward, clip, dual_clip)
    return loss, {**stats, "teacher_kl": -reward}


def reverse_kl_full(log_distribution: Tensor, teacher_log_distribution: Tensor) -> Tensor:
    """KL(policy || teacher) summed over the vocabulary, per token: ``[..., V]`` log-probs each to ``[...]``.

    Tokens that both ban (log-prob -inf) count nothing; the teacher's log-probs are bounded below by -100.
    """
    gap = log_distribution.clamp(min=_LOWEST_LOGP) - teacher_log_distribution.detach().clamp(min=_LOWEST_LOGP)
    return (log_distribution.exp() * gap).sum(dim=-1)


# ----------------------------------------------------------------------------------------------- advantages


class Advantages(NamedTuple):
    """Result of ``advantages``.

    Attributes:
        values: Advantage of each row, ``[rows]``, float64; every token of a row has its row's.
        kept: Whether the row enters the policy gradient, ``[rows]``, bool.
        degenerate: Share of the groups whose episodes all have one reward.
    """

    values: Tensor
    kept: Tensor
    degenerate: float


def advantages(rewards: Tensor, groups: Tensor, episodes: Tensor, penalties: Tensor, options: Advantage) -> Advantages:
    """Group-relative advantages of step rows.

    A row's score is its episode's reward minus the row's penalty (for an invalid action). Its advantage is score -
    mean, over std + 1e-6 if asked for, with mean and std of the group's episode rewards (``statistics="trajectory"``,
    the paper) or of all its row scores (``"step"``, the released code, in which long episodes weigh more). A group
    with one entry has mean 0 and std 1, as in the released code.

    A group whose episodes all have one reward is degenerate, whatever the penalties of its rows: ``"drop"`` clears
    ``kept`` and the value of its rows. Where such a group is kept under ``"trajectory"``, its std counts as 1: the
    reward tells nothing, and dividing a penalty of 0.1 by 1e-6 would end the run.

    Args:
        rewards: Reward of each episode, ``[episodes]``.
        groups: Group of each episode, ``[episodes]``, any integers.
        episodes: Index into ``rewards`` of each row's episode, ``[rows]``.
        penalties: What each row's score is lowered by, ``[rows]``, zero for valid actions.
        options: Statistics, division, kind of std, fate of degenerate groups.
    """
    rewards = rewards.to(torch.float64)
    _, group = torch.unique(groups, return_inverse=True)
    count = int(group.max()) + 1 if group.numel() else 0
    scores = rewards[episodes] - penalties.to(torch.float64)
    row_group = group[episodes]

    bounds = rewards.new_zeros(count)
    highest = bounds.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = bounds.scatter_reduce(0, group, rewards, "amin", include_self=False)
    degenerate = highest - lowest <= _SAME_REWARD

    sample = options.std == "sample"
    if options.statistics == "trajectory":
        mean, std = _moments(rewards, group, count, sample)
        std = torch.where(degenerate, 1.0, std)
    else:
        mean, std = _moments(scores, row_group, count, sample)
    values = scores - mean[row_group]
    if options.divide_by_std:
        values = values / (std[row_group] + EPS)

    kept = torch.ones_like(row_group, dtype=torch.bool)
    if options.degenerate == "drop":
        kept = ~degenerate[row_group]
        values = torch.where(kept, values, 0.0)
    return Advantages(values, kept, float(degenerate.double().mean()) if count else 0.0)


def _moments(values: Tensor, group: Tensor, count: int, sample: bool) -> tuple[Tensor, Tensor]:
    """Mean and std of each group, ``[count]`` each; 0 and 1 for groups with one entry."""
    zeros = values.new_zeros(count)
    size = zeros.index_add(0, group, torch.ones_like(values))
    mean = zeros.index_add(0, group, values) / size.clamp(min=1)
    squares = zeros.index_add(0, group, (values - mean[group]) ** 2)
    std = (squares / (size - int(sample)).clamp(min=1)).sqrt()
    return torch.where(size > 1, mean, 0.0), torch.where(size > 1, std, 1.0)
