"""Losses and advantages: pure functions on tensors.

Every loss component is a tensor with one value per response token, in flat ``[N]`` or padded ``[B, T]`` layout. What
enters the gradient is ``average(loss, weights)``; the weights of a component sum to one over that component's own
active tokens, so adding a component never rescales another, and cutting a mini-batch into micro-batches (weights
computed once, then sliced) changes nothing.

Symbols of the paper in comments: l, l_old, l_ref, l_s are the log-probs of the sampled token under the policy being
optimised, the policy that sampled, the reference policy, and the policy that also sees the skill.
"""

from __future__ import annotations

import math
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

_HIGHEST_K3_EXPONENT, _HIGHEST_IMPORTANCE = 20.0, 10.0
"""Skill-SD's own caps on its two exponents."""

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


def truncated_importance(logp: Tensor, logp_sampler: Tensor, cap: float) -> Tensor:
    """min(exp(l - l_sampler), cap): weight of a token that another than the trainer's policy sampled.

    Multiplied with the advantage it makes the expected policy gradient that of the policy's own samples, with a bias
    where it is cut for the sake of variance (Ionides 2008, J. Comput. Graph. Stat. 17; for rollout engines Yao et al.
    2025, "On the Rollout-Training Mismatch in Modern RL Systems").
    """
    return (logp - logp_sampler).clamp(max=math.log(cap)).exp().detach()


def entropy(log_distribution: Tensor) -> Tensor:
    """Entropy in nats of distributions given as log-probs ``[..., V]``, -inf for banned tokens; shape ``[...]``."""
    return -(log_distribution.exp() * log_distribution.clamp(min=_LOWEST_LOGP)).sum(dim=-1)


def gate(logp: Tensor, logp_teacher: Tensor, beta: float, centred: bool = False) -> Tensor:
    """g = sigmoid(beta D) with D = sg(l_s - l), in (0, 1); no gradient passes.

    ``centred`` gives 2g - 1 instead, which is zero where the teacher makes no difference and negative where it lowers
    the token's probability. ``beta`` 0 is a constant gate: exactly 1/2, and exactly 0 if centred.
    """
    open_share = torch.sigmoid(beta * (logp_teacher - logp).detach())
    return 2 * open_share - 1 if centred else open_share


def gated_nll(logp: Tensor, logp_skill: Tensor, beta: float = 5.0, centred: bool = False) -> tuple[Tensor, Stats]:
    """SEED's distillation: negative log-likelihood of the own samples, weighted by what the skill thinks of them.

    loss = g (sg(l_s) - l) with g = ``gate``, so the gradient is -g grad l. The value may be negative; only the
    gradient matters.

    Statistics: ``gate`` = g, never centred, ``gate_open`` (1 where g > 1/2) and ``gap`` = D = l_s - l.
    """
    weight, g = gate(logp, logp_skill, beta, centred), gate(logp, logp_skill, beta)
    stats = {"gate": g, "gate_open": (g > 0.5).to(g.dtype), "gap": (logp_skill - logp).detach()}
    return weight * (logp_skill.detach() - logp), stats


def importance_k3(logp: Tensor, logp_old: Tensor, logp_teacher: Tensor) -> tuple[Tensor, Stats]:
    """Skill-SD's distillation: k3 estimate of KL(policy || teacher), weighted by the importance ratio.

    loss = rho (exp(d) - d - 1) with d = sg(l_s) - l and rho = exp(l - l_old); the gradient passes through both. As in
    the released code, d is capped at 20 and l - l_old at 10 inside exp only: unlike ``kl_k3`` the value is not.

    Statistics: ``gap`` = d and ``importance`` = rho.
    """
    d = logp_teacher.detach() - logp
    ratio = (logp - logp_old).clamp(max=_HIGHEST_IMPORTANCE).exp()
    k3 = d.clamp(max=_HIGHEST_K3_EXPONENT).exp() - d - 1
    return ratio * k3, {"gap": d.detach(), "importance": ratio.detach()}


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


def advantages(
    rewards: Tensor,
    groups: Tensor,
    episodes: Tensor,
    penalties: Tensor,
    options: Advantage,
    *,
    states: Tensor | None = None,
    step_rewards: Tensor | None = None,
) -> Advantages:
    """Group-relative advantages of step rows.

    A row's score is its episode's reward minus the row's penalty (for an invalid action). ``options.estimator``:

    - ``"group"`` (GRPO): score - mean, over std + 1e-6 if asked for, with mean and std of the group's episode rewards
      (``statistics="trajectory"``, the paper) or of all its row scores (``"step"``, the released code, in which long
      episodes weigh more). A group with one entry has mean 0 and std 1, as in the released code.
    - ``"leave_one_out"`` (RLOO): (score - mean) n / (n - 1) with the n entries of the same statistics, which for a row
      without penalty is its reward minus the mean of the others.
    - ``"gigpo"``: the group's, plus ``step_weight`` times that of the row's step: its return (the rewards from it to
      the episode's end, discounted by ``gamma``) minus its penalty, relative to the rows of its group that were taken
      from the same state. A state visited once gives 0.

    A pool of outcomes (the episode rewards of a group; the returns from one state) that are all one is degenerate,
    whatever the penalties of its rows. ``"drop"`` gives a degenerate pool's part the value 0 and clears ``kept`` of
    the rows that no part speaks about. So GiGPO still learns from a group in which every episode succeeds where one
    of them took a detour from a shared state, but not from one in which every episode fails. Where a degenerate pool
    is kept under ``"trajectory"``, its std counts as 1: the outcomes tell nothing, and dividing a penalty of 0.1 by
    1e-6 would end the run.

    Args:
        rewards: Reward of each episode, ``[episodes]``.
        groups: Group of each episode, ``[episodes]``, any integers.
        episodes: Index into ``rewards`` of each row's episode, ``[rows]``; for GiGPO the rows of an episode follow one
            another in the order of its steps.
        penalties: What each row's score is lowered by, ``[rows]``, zero for valid actions.
        options: Estimator, statistics, division, kind of std, fate of degenerate groups.
        states: State in which each row's step was taken, ``[rows]``, any integers, equal for equal states of a group.
        step_rewards: Reward that each row's step brought, ``[rows]``.

    Raises:
        ValueError: GiGPO without ``states`` or ``step_rewards``.
    """
    rewards, penalties = rewards.to(torch.float64), penalties.to(torch.float64)
    _, group = torch.unique(groups, return_inverse=True)
    row_group = group[episodes]
    scores = rewards[episodes] - penalties
    degenerate = _one_outcome(rewards, group)

    by_episode = options.statistics == "trajectory"
    moments = _moments(rewards, group, options) if by_episode else _moments(scores, row_group, options)
    alone = moments.size <= 1
    moments = moments._replace(mean=torch.where(alone, 0.0, moments.mean))
    values, kept = _relative(scores, row_group, moments, degenerate, options)
    if options.estimator == "leave_one_out":
        values = values * torch.where(alone, 1.0, moments.size / (moments.size - 1))[row_group]

    if options.estimator == "gigpo":
        if states is None or step_rewards is None:
            raise ValueError("GiGPO needs the state and the reward of every step")
        returns = _returns(step_rewards.to(torch.float64), episodes, options.gamma)
        _, state = torch.unique(torch.stack([row_group, states]), dim=1, return_inverse=True)
        scores = returns - penalties
        step, step_kept = _relative(
            scores, state, _moments(scores, state, options), _one_outcome(returns, state), options
        )
        values = values + options.step_weight * step
        kept = kept | step_kept & (options.step_weight > 0)
    return Advantages(values, kept, float(degenerate.double().mean()) if len(degenerate) else 0.0)


class _Moments(NamedTuple):
    """Number of entries, mean and std of each pool; a pool with one entry has std 1."""

    size: Tensor
    mean: Tensor
    std: Tensor


def _moments(values: Tensor, pool: Tensor, options: Advantage) -> _Moments:
    zeros = values.new_zeros(int(pool.max()) + 1 if pool.numel() else 0)
    size = zeros.index_add(0, pool, torch.ones_like(values))
    mean = zeros.index_add(0, pool, values) / size.clamp(min=1)
    squares = zeros.index_add(0, pool, (values - mean[pool]) ** 2)
    std = (squares / (size - int(options.std == "sample")).clamp(min=1)).sqrt()
    return _Moments(size, mean, torch.where(size > 1, std, 1.0))


def _one_outcome(outcomes: Tensor, pool: Tensor) -> Tensor:
    """Whether the outcomes of each pool are all one."""
    zeros = outcomes.new_zeros(int(pool.max()) + 1 if pool.numel() else 0)
    highest = zeros.scatter_reduce(0, pool, outcomes, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, pool, outcomes, "amin", include_self=False)
    return highest - lowest <= _SAME_REWARD


def _relative(
    scores: Tensor, pool: Tensor, moments: _Moments, degenerate: Tensor, options: Advantage
) -> tuple[Tensor, Tensor]:
    """Scores relative to their pool, and which rows the pool's outcomes speak about (all of them under "keep")."""
    values = scores - moments.mean[pool]
    if options.divide_by_std:
        calm = degenerate if options.statistics == "trajectory" else torch.zeros_like(degenerate)
        values = values / (torch.where(calm, 1.0, moments.std)[pool] + EPS)
    kept = ~degenerate[pool] if options.degenerate == "drop" else torch.ones_like(pool, dtype=torch.bool)
    return torch.where(kept, values, 0.0), kept


def _returns(step_rewards: Tensor, episodes: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each row to the end of its episode, ``[rows]``."""
    returns = step_rewards.tolist()
    numbers = episodes.tolist()
    for row in reversed(range(len(returns) - 1)):
        if numbers[row] == numbers[row + 1]:
            returns[row] += gamma * returns[row + 1]
    return torch.tensor(returns, dtype=step_rewards.dtype, device=step_rewards.device)


def reweighted_advantage(
    advantage: Tensor, logp_old: Tensor, logp_teacher: Tensor, share: float, clip: float
) -> Tensor:
    """RLSD: the teacher scales each token's advantage and never turns its sign.

    A ((1 - lambda) + lambda clamp(exp(sign(A) D), 1 - clip, 1 + clip)) with D = l_s - l_old; lambda is ``share``. Where
    ``share`` is 0 the result equals ``advantage`` exactly. ``advantage`` may have any shape that broadcasts to the
    tokens'; no gradient passes.
    """
    gap = (logp_teacher - logp_old).detach()
    evidence = (torch.sign(advantage) * gap).clamp(max=_HIGHEST_LOG_RATIO).exp().clamp(1 - clip, 1 + clip)
    return (advantage * ((1 - share) + share * evidence)).detach()


def decayed(coefficient: float, decay_updates: int, number: int) -> float:
    """Coefficient at update ``number`` (the first is 1): falls linearly to 0 over ``decay_updates``; 0: it stays."""
    return coefficient * max(0.0, 1 - (number - 1) / decay_updates) if decay_updates else coefficient
