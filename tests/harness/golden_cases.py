"""Golden cases of losses and advantages: inputs as tensors, and comparison within each case's tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness import objective

Golden = Callable[[str], Any]

AVERAGES = {"token-mean": "token", "seq-mean-token-mean": "episode"}
"""Upstream's ways of averaging that we offer, and our names for them."""


def tensor(values: Any, dtype: str) -> Tensor:
    """Nested lists, in which the strings nan, inf and -inf may stand for numbers."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else float(value)

    return torch.tensor(numbers(values), dtype=getattr(torch, dtype))


class Case:
    """One golden case."""

    def __init__(self, case: dict[str, Any], tolerances: dict[str, Any]) -> None:
        self.id, self.dtype = case["id"], case["dtype"]
        self.inputs, self.expected = case["inputs"], case["expected"]
        self.tolerance = case.get("tolerance", tolerances[self.dtype])

    def tensor(self, name: str) -> Tensor:
        return tensor(self.inputs[name], self.dtype)

    def weights(self, active: Tensor) -> Tensor:
        """Weights of the active tokens in the case's way of averaging.

        The two sums over a row's tokens weigh long rows more and are not offered; they are written out here so that
        the values per token are compared in these cases as well.
        """
        mode = self.inputs["loss_agg_mode"]
        rows, tokens = active.shape
        if mode in AVERAGES:
            return objective.token_weights(active, AVERAGES[mode], torch.arange(rows)[:, None])
        return active.to(torch.float64) / {"seq-mean-token-sum": rows, "seq-mean-token-sum-norm": tokens}[mode]

    def check(self, actual: Tensor, name: str, **tolerance: float) -> None:
        """Equality within the tolerance; where upstream has NaN, a finite value is all that is asked for."""
        expected = tensor(self.expected[name], self.dtype)
        actual = actual.detach().to(expected.dtype)
        known = ~expected.isnan()
        assert actual.isfinite().all(), f"{self.id} {name}"
        torch.testing.assert_close(
            actual[known],
            expected[known],
            **(tolerance or self.tolerance),
            msg=lambda message: f"{self.id} {name}: {message}",
        )

    def check_loss(self, per_token: Tensor, weights: Tensor, logp: Tensor, prefix: str = "") -> None:
        """Loss and gradient with respect to ``logp``, plain and times the case's coefficient.

        A loss that is NaN upstream comes with a gradient of no meaning; ours must be finite.
        """
        loss = objective.average(per_token, weights)
        (gradient,) = torch.autograd.grad(loss, logp)
        if tensor(self.expected[f"{prefix}loss"], self.dtype).isnan():
            assert torch.stack([loss, gradient.sum()]).isfinite().all(), self.id
            return
        self.check(loss, f"{prefix}loss")
        self.check(gradient, "grad_log_prob")
        if "coef" in self.inputs:
            self.check(loss * self.inputs["coef"], "scaled_loss")
            self.check(gradient * self.inputs["coef"], "scaled_grad_log_prob")


def cases(golden: Golden, file: str, key: str, value: str) -> list[Case]:
    """The cases of a golden file whose ``key`` (group or kind) is ``value``."""
    data = golden(file)
    found = [Case(case, data["tolerance"]) for case in data["cases"] if case[key] == value]
    assert found, f"no golden case of {key} {value}"
    return found
