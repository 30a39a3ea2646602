"""Losses and advantages against the official code's values, and what must hold beyond them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import objective
from harness.methods import Advantage

Golden = Callable[[str], Any]

AVERAGES = {"token-mean": "token", "seq-mean-token-mean": "episode"}
"""Upstream's modes that we offer; its two sums over a row's tokens weigh long rows more and are not offered."""


def tensor(values: Any, dtype: str) -> Tensor:
    """Nested lists, in which the strings nan, inf and -inf may stand for numbers."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else float(value)

    return torch.tensor(numbers(values), dtype=getattr(torch, dtype))


class Case:
    """One golden case: its inputs as tensors, and comparison within its tolerance."""

    def __init__(self, case: dict[str, Any], tolerances: dict[str, Any]) -> None:
        self.id, self.dtype = case["id"], case["dtype"]
        self.inputs, self.expected = case["inputs"], case["expected"]
        self.tolerance = case.get("tolerance", tolerances[self.dtype])

    def tensor(self, name: str) -> Tensor:
        return tensor(self.inputs[name], self.dtype)

    def weights(self, active: Tensor) -> Tensor:
        rows = torch.arange(len(active))[:, None]
        return objective.token_weights(active, AVERAGES[self.inputs["loss_agg_mode"]], rows)

    def check(self, actual: Tensor, name: str, **tolerance: float) -> None:
        expected = tensor(self.expected[name], self.dtype)
        torch.testing.assert_close(
            actual.detach().to(expected.dtype),
            expected,
            **(tolerance or self.tolerance),
            msg=lambda m: f"{self.id} {name}: {m}",
        )

    def defect(self, name: str) -> bool:
        """Whether upstream's value holds NaN, which a safe implementation must not copy."""
        return bool(tensor(self.expected[name], self.dtype).isnan().any())


def cases(golden: Golden, group: str) -> list[Case]:
    data = golden("losses")
    found = [Case(case, data["tolerance"]) for case in data["cases"] if case["group"] == group]
    return [case for case in found if case.inputs.get("loss_agg_mode", "token-mean") in AVERAGES]


def test_policy_gradient_equals_golden(golden: Golden) -> None:
    for case in cases(golden, "ppo"):
        mask = case.tensor("response_mask")
        clip = case.inputs["clip_low"], case.inputs["clip_high"]
        if clip[0] != clip[1]:  # we clip symmetrically, as the paper does
            continue
        logp = case.tensor("log_prob").requires_grad_()
        per_token, stats = objective.policy_gradient(
            logp, case.tensor("old_log_prob"), case.tensor("advantages"), clip[0], case.inputs["clip_ratio_c"]
        )
        loss = objective.average(per_token, case.weights(mask))
        (gradient,) = torch.autograd.grad(loss, logp)
        assert gradient.isfinite().all(), case.id
        if not case.defect("pg_loss"):
            case.check(loss, "pg_loss")
        if not case.defect("grad_log_prob"):
            case.check(gradient, "grad_log_prob")
        tokens = objective.token_weights(mask)  # upstream's statistics are always means over tokens
        case.check(objective.average(stats["clip_fraction"], tokens), "pg_clipfrac", rtol=1e-6, atol=1e-6)
        case.check(objective.average(stats["dual_clip_fraction"], tokens), "pg_clipfrac_lower", rtol=1e-6, atol=1e-6)
        case.check(objective.average(stats["approx_kl"], tokens), "ppo_kl")


def test_policy_gradient_survives_an_overflowing_ratio() -> None:
    """Upstream's gradient is NaN here; the clipped branch has none."""
    logp = torch.tensor([-1.0, -900.0, -2.0], requires_grad=True)
    old = torch.tensor([-900.0, -1.0, -2.0])
    for advantage, expected in ((1.0, [0.0, 0.0, -1.0]), (-1.0, [0.0, 0.0, 1.0])):
        per_token, _ = objective.policy_gradient(logp, old, torch.full((3,), advantage))
        (gradient,) = torch.autograd.grad(per_token.sum(), logp)
        assert gradient.tolist() == expected


def test_averages_equal_golden(golden: Golden) -> None:
    data = golden("losses")
    for raw in data["cases"]:
        if raw["group"] != "agg":
            continue
        case = Case(raw, data["tolerance"])
        mask, rows = case.tensor("loss_mask"), torch.arange(len(raw["inputs"]["loss_mask"]))[:, None]
        for mode, normalise in AVERAGES.items():
            value = objective.average(case.tensor("loss_mat"), objective.token_weights(mask, normalise, rows))
            if case.defect(mode):  # a row without tokens: upstream 0 / 0, here the mean over the other rows
                assert value.isfinite()
            else:
                case.check(value, mode)


def test_kl_equals_golden(golden: Golden) -> None:
    for case in cases(golden, "kl"):
        logp = case.tensor("log_prob").requires_grad_()
        k3 = objective.kl_k3(logp, case.tensor("ref_log_prob"))
        loss = objective.average(k3, case.weights(case.tensor("response_mask")))
        (gradient,) = torch.autograd.grad(loss, logp)
        assert gradient.isfinite().all(), case.id
        if "k3" in case.expected:
            case.check(k3, "k3")
        if not case.defect("loss"):
            case.check(loss, "loss")
        if not case.defect("grad_log_prob"):
            case.check(gradient, "grad_log_prob")


def test_entropy_equals_golden(golden: Golden) -> None:
    for case in cases(golden, "entropy"):
        logits = case.tensor("logits").requires_grad_()
        values = objective.entropy(logits / case.inputs["temperature"])
        loss = objective.average(values, case.weights(case.tensor("response_mask")))
        (gradient,) = torch.autograd.grad(loss, logits)
        # Upstream subtracts two large numbers: in float32 its own error is 1.4e-6, ours 1e-7.
        tolerance = {"rtol": 2e-5, "atol": 3e-6} if case.dtype == "float32" else {}
        case.check(values, "token_entropy", **tolerance)
        case.check(loss, "entropy_loss", **tolerance)
        case.check(gradient, "grad_logits")


@pytest.mark.parametrize("group", ["opd", "sdar", "grpo_opsd"])
def test_gated_nll_equals_golden(golden: Golden, group: str) -> None:
    """SEED, SDAR and GRPO+OPSD (constant gate) share one formula."""
    prefix = "opd_" if group == "opd" else ""
    for case in cases(golden, group):
        response = case.tensor("response_mask")
        rows = case.inputs.get("row_or_token_mask")
        usable = torch.ones(len(response)) if rows is None else torch.tensor(rows, dtype=torch.float64)
        active = response * (usable[:, None] if usable.dim() == 1 else usable)
        logp = case.tensor("log_prob").requires_grad_()
        per_token, stats = objective.gated_nll(logp, case.tensor("teacher_log_prob"), case.inputs["gate_beta"])
        weights = case.weights(active)
        loss = objective.average(per_token, weights)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert gradient.isfinite().all(), case.id
        if not case.defect(f"{prefix}loss"):
            case.check(loss, f"{prefix}loss")
            case.check(gradient, "grad_log_prob")
            case.check(loss * case.inputs["coef"], "scaled_loss")
        tokens = objective.token_weights(active)
        case.check(objective.average(stats["gate"], tokens), f"{prefix}gate_mean")
        case.check(objective.average(stats["gap"], tokens), f"{prefix}teacher_gap_mean")
        case.check(objective.average(stats["gate_open"], tokens), f"{prefix}gate_active_ratio", rtol=1e-6, atol=1e-6)


def test_total_equals_golden(golden: Golden) -> None:
    for case in cases(golden, "total"):
        logits = case.tensor("logits").requires_grad_()
        labels = torch.tensor(case.inputs["labels"])
        logp = torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0]
        mask = case.tensor("response_mask")
        usable = mask * case.tensor("row_mask")[:, None]
        pg, _ = objective.policy_gradient(logp, case.tensor("old_log_prob"), case.tensor("advantages"))
        distillation, _ = objective.gated_nll(logp, case.tensor("teacher_log_prob"), case.inputs["gate_beta"])
        response = objective.token_weights(mask)
        terms = {
            "pg_loss": objective.average(pg, response),
            "entropy_loss": objective.average(objective.entropy(logits), response),
            "opd_loss": objective.average(distillation, objective.token_weights(usable)),
            "kl_loss": objective.average(objective.kl_k3(logp, case.tensor("ref_log_prob")), response),
        }
        for name, value in terms.items():
            case.check(value, name)
        loss = (
            terms["pg_loss"]
            - case.inputs["entropy_coef"] * terms["entropy_loss"]
            + case.inputs["opd_coef"] * terms["opd_loss"]
            + case.inputs["kl_coef"] * terms["kl_loss"]
        )
        loss = loss / case.inputs["gradient_accumulation"]
        case.check(loss, "total")
        case.check(torch.autograd.grad(loss, logits)[0], "grad_logits")


# ----------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("statistics", ["trajectory", "step"])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_advantages_equal_golden(golden: Golden, statistics: str, divide_by_std: bool) -> None:
    data = golden("advantages")
    options = Advantage(statistics=statistics, divide_by_std=divide_by_std, std="sample", degenerate="keep")
    name = ("traj" if statistics == "trajectory" else "rows") + ("_mean_std_norm" if divide_by_std else "_mean_norm")
    for raw in (case for case in data["cases"] if case["kind"] == "episode"):
        case = Case(raw, data["tolerance"])
        # Upstream knows rows only and takes the first row's score for its trajectory's: we hand that in as the
        # episode's reward, and what the other rows differ by as their penalty.
        scores = case.tensor("row_score").double()
        numbers = {trajectory: index for index, trajectory in enumerate(dict.fromkeys(raw["inputs"]["traj"]))}
        episodes = torch.tensor([numbers[trajectory] for trajectory in raw["inputs"]["traj"]])
        first = torch.tensor([raw["inputs"]["traj"].index(trajectory) for trajectory in numbers])
        labels = sorted(set(raw["inputs"]["group"]))
        groups = torch.tensor([labels.index(raw["inputs"]["group"][int(row)]) for row in first])
        rewards = scores[first]
        result = objective.advantages(rewards, groups, episodes, rewards[episodes] - scores, options)
        assert result.kept.all()
        if raw["id"].startswith("episode/penalty-all-fail") and name == "traj_mean_std_norm":
            # Upstream divides the penalty by 1e-6 (advantage 100,000); here the std of such a group counts as 1.
            torch.testing.assert_close(result.values, scores - rewards[episodes], rtol=1e-5, atol=1e-9)
        else:
            for key in (name, f"grpo_{name}"):
                case.check(result.values, key)


def rows(rewards: list[float], groups: list[int], penalties: list[float], **options: Any) -> objective.Advantages:
    """Advantages of episodes with one row each."""
    return objective.advantages(
        torch.tensor(rewards),
        torch.tensor(groups),
        torch.arange(len(rewards)),
        torch.tensor(penalties),
        Advantage(**options),
    )


def test_paper_advantage_uses_episode_rewards_and_population_std() -> None:
    result = rows([10.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], [0.0, 0.0, 0.1, 0.0])
    std = math.sqrt(18.75)
    expected = torch.tensor([7.5, -2.5, -2.6, -2.5], dtype=torch.float64) / std
    torch.testing.assert_close(result.values, expected, rtol=1e-6, atol=1e-8)


def test_penalties_do_not_revive_a_group_without_outcome_variance() -> None:
    result = rows([0.0, 0.0, 10.0, 0.0, 5.0], [0, 0, 1, 1, 2], [0.1, 0.0, 0.0, 0.0, 0.0])
    assert result.kept.tolist() == [False, False, True, True, False]
    assert result.values[~result.kept].tolist() == [0.0, 0.0, 0.0]
    assert result.degenerate == pytest.approx(2 / 3)


def test_rounding_of_reward_sums_is_no_outcome_variance() -> None:
    sums = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], dtype=torch.float64)
    assert sums[0] != sums[1]
    zero = torch.zeros(2, dtype=torch.long)
    assert not objective.advantages(sums, zero, torch.arange(2), torch.zeros(2), Advantage()).kept.any()


def test_rows_of_long_episodes_count_more_under_step_statistics_only() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    episodes, penalties = torch.tensor([0, 1, 1, 1]), torch.zeros(4)
    by_episode = objective.advantages(rewards, groups, episodes, penalties, Advantage(divide_by_std=False))
    by_row = objective.advantages(
        rewards, groups, episodes, penalties, Advantage(statistics="step", divide_by_std=False)
    )
    assert by_episode.values.tolist() == [0.5, -0.5, -0.5, -0.5]
    assert by_row.values.tolist() == [0.75, -0.25, -0.25, -0.25]


# ----------------------------------------------------------------------------------------------- properties


def test_weights_sum_to_one_over_active_tokens_and_vanish_without_any() -> None:
    active = torch.tensor([1, 1, 1, 0, 1])
    episodes = torch.tensor([3, 3, 3, 3, 9])
    assert objective.token_weights(active).tolist() == [0.25, 0.25, 0.25, 0.0, 0.25]
    by_episode = objective.token_weights(active, "episode", episodes)
    torch.testing.assert_close(by_episode, torch.tensor([1, 1, 1, 0, 3], dtype=torch.float64) / 6)
    logp = torch.randn(5, requires_grad=True)
    loss = objective.average(logp, objective.token_weights(torch.zeros(5)))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logp)[0].eq(0).all()


def test_values_at_masked_positions_change_nothing() -> None:
    weights = objective.token_weights(torch.tensor([1, 0, 1]))
    plain = objective.average(torch.tensor([1.0, 2.0, 3.0]), weights)
    assert objective.average(torch.tensor([1.0, math.nan, 3.0]), weights) == plain


def test_micro_batches_add_up_to_the_mini_batch() -> None:
    torch.manual_seed(0)
    logp, skill = torch.randn(12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    weights = objective.token_weights(torch.arange(12) % 3 > 0)
    whole = objective.average(objective.gated_nll(logp, skill)[0], weights)
    parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    split = sum(objective.average(objective.gated_nll(logp[p], skill[p])[0], weights[p]) for p in parts)
    torch.testing.assert_close(whole, split)


def test_centred_gate_pulls_nowhere_without_a_shift() -> None:
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    skill = torch.tensor([-1.0, -0.5, -1.5])
    gradient = torch.autograd.grad(objective.gated_nll(logp, skill, beta=5.0, centred=True)[0].sum(), logp)[0]
    assert gradient[0] == 0
    assert gradient[1] < 0 < gradient[2]


def test_sampled_reverse_kl_has_the_gradient_of_the_full_one_in_expectation() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(6, dtype=torch.float64), dim=-1)
    log_distribution = torch.log_softmax(logits, dim=-1)
    exact = torch.autograd.grad(objective.reverse_kl_full(log_distribution, teacher), logits, retain_graph=True)[0]
    old = log_distribution.detach()
    per_token, stats = objective.reverse_kl_sampled(log_distribution, old, teacher)
    expected = torch.autograd.grad((old.exp() * per_token).sum(), logits)[0]
    torch.testing.assert_close(expected, exact)
    full = objective.reverse_kl_full(old, teacher)
    torch.testing.assert_close((old.exp() * stats["teacher_kl"]).sum(), full)


def test_banned_tokens_leave_entropy_and_reverse_kl_finite() -> None:
    logits = torch.tensor([[0.5, -0.5, -math.inf]], requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[0.0, 1.0, -math.inf]]), dim=-1)
    loss = objective.entropy(logits) + objective.reverse_kl_full(torch.log_softmax(logits, dim=-1), teacher)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), logits)[0].isfinite().all()
    two = torch.log_softmax(torch.tensor([[0.5, -0.5]]), dim=-1)
    torch.testing.assert_close(
        objective.reverse_kl_full(two, teacher[:, :2])[0], (two.exp() * (two - teacher[:, :2])).sum()
    )
