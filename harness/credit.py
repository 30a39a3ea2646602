"""How a teacher's log-probs become a loss, and what that loss does to every single token.

``distillation`` is the term the trainer optimises. ``pull`` differentiates it together with the policy gradient at the
update's start, so that a reader can see, token by token, what the method adds to the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness import objective
from harness.methods import GatedNLL, ImportanceK3, ReverseKL, Reweighting, Signal, full_vocabulary


@dataclass(frozen=True)
class Credit:
    """What one row was told to learn, one value per response token.

    Attributes:
        teacher: l_s, log-probs under the teacher; None where the row is not distilled.
        gate: sigmoid(beta D); None where there is no teacher or the signal has no gate.
        pull: -dL/dl at the update's start, policy gradient and distillation together, in units of the token's own
            weight in the policy gradient, so that GRPO gives the advantage; where the row has no policy gradient, in
            units of the mini-batch's mean weight.
    """

    teacher: list[float] | None
    gate: list[float] | None
    pull: list[float]


def distillation(
    signal: Signal, logp: Tensor, logp_old: Tensor, logp_teacher: Tensor, clip: float
) -> tuple[Tensor, objective.Stats]:
    """Loss of each sampled token before the signal's coefficient, ``[N]``, and statistics.

    Reweighting, which scales advantages, has no loss of its own: zeros. A full vocabulary's divergence takes whole
    distributions: ValueError.
    """
    match signal:
        case GatedNLL():
            return objective.gated_nll(logp, logp_teacher, signal.beta, signal.centred)
        case ImportanceK3():
            return objective.importance_k3(logp, logp_old, logp_teacher)
        case ReverseKL(vocabulary="sampled"):
            loss, statistics = objective.reverse_kl_sampled(logp, logp_old, logp_teacher, clip)
            return gated(signal, loss, logp, logp_teacher), statistics
        case Reweighting():
            return torch.zeros_like(logp), {"gap": (logp_teacher - logp).detach()}
    raise ValueError("a full vocabulary has no loss on sampled tokens alone")


def gated(signal: ReverseKL, loss: Tensor, logp: Tensor, logp_teacher: Tensor) -> Tensor:
    """The loss weighted by the gate of each sampled token, where the signal has one."""
    return loss if signal.beta is None else loss * objective.gate(logp, logp_teacher, signal.beta)


def beta_of(signal: Signal) -> float | None:
    """Sharpness of the signal's gate; None where it has none."""
    return signal.beta if isinstance(signal, GatedNLL | ReverseKL) else None


def pull(
    advantage: Tensor,
    logp_old: Tensor,
    logp_teacher: Tensor,
    policy: Tensor,
    distill: Tensor,
    unit: Tensor,
    signal: Signal | None,
    clip: float,
    dual_clip: float,
) -> Tensor:
    """-dL/dl of every token at l = l_old, divided by ``unit``; all tensors are flat ``[N]``.

    Args:
        policy, distill: The tokens' weights in the two terms.
        unit: Weight that counts as one, for each token.
        signal: None without a teacher. A full-vocabulary divergence has no gradient in one token's log-prob; its share
            of the pull is left out.
    """
    logp = logp_old.clone().requires_grad_()
    loss = objective.average(objective.policy_gradient(logp, logp_old, advantage, clip, dual_clip)[0], policy)
    if signal is not None and not full_vocabulary(signal):
        per_token, _ = distillation(signal, logp, logp_old, logp_teacher, clip)
        loss = loss + signal.coefficient * objective.average(per_token, distill)
    (gradient,) = torch.autograd.grad(loss, logp)
    return -gradient / unit
