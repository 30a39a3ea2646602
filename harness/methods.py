"""A method is a point in a small space: advantage x teacher (weights x context) x signal x start.

The trainer reads the point, never the name. A new method is one ``Method`` registered under the entry-point group
``seed_harness.methods``; ``baselines/`` holds ours.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.contracts import unknown
from harness.registry import METHODS, load, registered


class Frozen(BaseModel):
    """Base of all configuration: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Advantage(Frozen):
    """Group-relative advantage of an episode among the attempts at its task."""

    statistics: Literal["trajectory", "step"] = Field(
        "trajectory",
        description="mean and std over the group's episodes (paper) or over all their steps (released code)",
    )
    divide_by_std: bool = Field(True, description="divide by the group's standard deviation")
    std: Literal["population", "sample"] = Field("population", description="population (paper) or sample (code) std")
    degenerate: Literal["keep", "drop"] = Field(
        "drop", description="groups whose episodes all have one outcome: keep their rows or give them no weight"
    )


class Teacher(Frozen):
    """Who re-scores the sampled actions, and what it sees that the student does not."""

    weights: Literal["update_start", "current", "start", "external"] = Field(
        description="policy at the update's start (code), being optimised (paper), at the start of RL, or another model"
    )
    context: Literal["plain", "own_skill", "shuffled_skill", "empty_skill"] = Field(
        description="ordinary prompt; skill of this very episode; skill of another episode (control); none (control)"
    )
    analyzer: Literal["update_start", "start"] = Field(
        "update_start",
        description="whose weights write the skills: this update's (self-evolving) or the start's (frozen)",
    )


class Signal(Frozen):
    """How the teacher's log-probs enter the loss."""

    kind: Literal["gated_nll", "reverse_kl"]
    coefficient: float = Field(0.01, ge=0, description="lambda: weight of the distillation term")
    beta: float = Field(5.0, ge=0, description="sharpness of the gate sigmoid(beta * D); 0 is a constant gate of 1/2")
    centred: bool = Field(False, description="use 2g - 1 instead of g, so that a token without a shift has no pull")
    vocabulary: Literal["sampled", "full"] = Field(
        "sampled", description="reverse KL estimated on the sampled token or summed over the vocabulary"
    )


class Method(Frozen):
    """One row of the comparison table."""

    name: str
    summary: str
    start: Literal["base", "hindsight_sft"] = "base"
    advantage: Advantage | None = Advantage()
    teacher: Teacher | None = None
    signal: Signal | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.teacher is None) != (self.signal is None):
            raise ValueError("a teacher needs a signal and a signal needs a teacher")
        if self.advantage is None and self.signal is None:
            raise ValueError("a method without advantage and without signal learns nothing")
        if self.signal and self.teacher and self.signal.kind == "gated_nll" and self.teacher.weights == "external":
            raise ValueError(
                "the gate compares one model with and without a skill; an external teacher needs reverse_kl"
            )
        full = self.signal is not None and self.signal.vocabulary == "full"
        if full and self.signal and self.signal.kind == "gated_nll":
            raise ValueError("the gate weighs sampled tokens; a full vocabulary needs reverse_kl")
        if full and self.teacher and self.teacher.weights == "update_start":
            raise ValueError(
                "a full vocabulary is scored inside the loss, where the update's start is gone; use current"
            )
        return self

    @property
    def writes_skills(self) -> bool:
        """Whether every update analyses its episodes."""
        return self.teacher is not None and self.teacher.context in ("own_skill", "shuffled_skill")


SEED = Method(
    name="seed",
    summary="GRPO plus gated self-distillation from the policy's own hindsight skills",
    start="hindsight_sft",
    teacher=Teacher(weights="update_start", context="own_skill"),
    signal=Signal(kind="gated_nll", coefficient=0.01, beta=5.0),
)
"""The paper's method; ``harness.seed`` holds its loop, ``harness.objective.gated_nll`` its loss."""


def get_method(name: str) -> Method:
    """The method registered under a name; HarnessError with the nearest name if there is none."""
    points = registered(METHODS)
    if name not in points:
        raise unknown("method", name, points)
    method = load(points[name])
    if not isinstance(method, Method):
        raise TypeError(f"entry point {name!r} must name a harness.methods.Method, not {type(method).__name__}")
    return method
