"""Optimizer steps that are left out because their gradient exploded, and the end of a run that takes no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.contracts import HarnessError
from harness.rows import Row, Streams


@dataclass
class Skips:
    """Counts optimizer steps whose gradient is not finite or has a norm above ``exploding``; after ``limit`` of them in
    a row the run ends."""

    limit: int
    exploding: float
    in_a_row: int = 0

    def steps(self, norm: torch.Tensor, where: str, cause: Callable[[], str]) -> bool:
        """Whether to take a step whose gradient has this norm.

        Raises HarnessError that names ``where`` and the ``cause`` if too many were left out.
        """
        if norm <= self.exploding:  # neither infinite nor NaN
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise HarnessError(
                f"{where}: {self.in_a_row} optimizer steps in a row (train.max_skipped) had a gradient that is not "
                f"finite or above train.exploding={self.exploding:g}, the last of norm {float(norm):g}; {cause()}; "
                "the weights are those before these steps, checkpoints are kept"
            )
        return False


def likely_cause(optimizer: torch.optim.Optimizer, rows: Sequence[Row] = (), streams: Streams | None = None) -> str:
    """Why a gradient may have exploded, in words: the weights, what single rows are told, or the loss itself."""
    (group,) = optimizer.param_groups
    rate = group["lr"]
    if not all(bool(torch.isfinite(parameter).all()) for parameter in group["params"]):
        return "the weights themselves are not finite: the model's files are damaged or a pass overflows"
    if streams is not None:
        told = {"advantage": dict(enumerate(streams.advantage)), "teacher": streams.teacher, "kl": streams.reference}
        told["sampling"] = {i: torch.tensor(row.logp_old) for i, row in enumerate(rows)}
        for what, values in told.items():
            bad = sorted({rows[i].episode for i, value in values.items() if not bool(torch.isfinite(value).all())})
            if bad:
                named = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
                return f"the {_WHAT[what]} of rows of episodes {named} (of {len(rows)} rows) are not finite"
    return (
        f"no row is at fault alone{f' of {len(rows)}' if rows else ''}: the learning rate {rate:g} is "
        "probably too high, or the precision too low"
    )


_WHAT = {
    "advantage": "advantages",
    "teacher": "teacher's log-probs",
    "kl": "reference's log-probs",
    "sampling": "sampling log-probs",
}
