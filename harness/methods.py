"""A method is a point in a small space: start x what its prompts hold x advantage x teacher x signal x upkeep.

The trainer reads the point, never the name. A new method is one ``Method`` registered under the entry-point group
``seed_harness.methods``; ``baselines/`` holds ours. Combinations that mean nothing are refused here, with the reason.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.contracts import unknown
from harness.registry import METHODS, load, registered

Name = Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=60)]
"""What a method may be called: its name stands in tables, figures and paths."""


class Frozen(BaseModel):
    """Base of all configuration: immutable; unknown fields and infinite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Advantage(Frozen):
    """Group-relative advantage of an episode among the attempts at its task."""

    estimator: Literal["group", "leave_one_out", "gigpo"] = Field(
        "group",
        description="reward minus the group's mean; minus the mean of the others (RLOO); the group's plus that of the "
        "steps taken from one and the same state (GiGPO)",
    )
    statistics: Literal["trajectory", "step"] = Field(
        "trajectory",
        description="mean and std over the group's episodes (paper) or over all their steps (released code)",
    )
    divide_by_std: bool = Field(True, description="divide by the group's standard deviation")
    std: Literal["population", "sample"] = Field("population", description="population (paper) or sample (code) std")
    degenerate: Literal["keep", "drop"] = Field(
        "drop", description="groups whose episodes all have one outcome: keep their rows or give them no weight"
    )
    gamma: float = Field(0.95, gt=0, le=1, description="GiGPO: discount of the rewards that follow a step")
    step_weight: float = Field(1.0, ge=0, description="GiGPO: omega, weight of the advantage within a state's group")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.estimator == "leave_one_out" and self.divide_by_std:
            raise ValueError("leave_one_out does not divide by the std: set divide_by_std to false")
        if self.estimator != "gigpo" and (self.gamma, self.step_weight) != (0.95, 1.0):
            raise ValueError(f"gamma and step_weight belong to the estimator gigpo, not to {self.estimator}")
        return self


class Teacher(Frozen):
    """Who re-scores the sampled actions, and what it sees that the student does not."""

    weights: Literal["update_start", "current", "start", "external"] = Field(
        description="policy at the update's start (code), being optimised (paper), at the start of RL, or another model"
    )
    context: Literal[
        "plain", "own_skill", "same_task_skill", "other_task_skill", "oracle_skill", "library", "empty_skill"
    ] = Field(
        description="ordinary prompt; skill of this very episode; of another attempt at the same task, of another task "
        "(controls); written by the environment from its hidden state (upper bound); retrieved from a static library; "
        "none (control)"
    )
    analyzer: Literal["update_start", "start", "external"] = Field(
        "update_start",
        description="who writes the skills: this update's weights (self-evolving), the start's (frozen), or the "
        "annotator named in analysis.annotator",
    )
    episodes: Literal["all", "successes", "failures"] = Field("all", description="which episodes are distilled")

    @property
    def needs_analysis(self) -> bool:
        """Whether its context is a skill that somebody writes about the update's episodes."""
        return self.context in ("own_skill", "same_task_skill", "other_task_skill")


class GatedNLL(Frozen):
    """Negative log-likelihood of the own samples under the gate g = sigmoid(beta D) (SEED, SDAR, GRPO+OPSD)."""

    kind: Literal["gated_nll"] = "gated_nll"
    coefficient: float = Field(0.01, ge=0, description="lambda: weight of the distillation term")
    beta: float = Field(5.0, ge=0, description="sharpness of the gate; 0 is a constant gate of 1/2")
    centred: bool = Field(False, description="use 2g - 1 instead of g, so that a token without a shift has no pull")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.centred and self.beta == 0:
            raise ValueError("a centred gate with beta 0 is zero everywhere; set coefficient to 0 to switch it off")
        return self


class ReverseKL(Frozen):
    """KL(policy || teacher) on the policy's own samples."""

    kind: Literal["reverse_kl"] = "reverse_kl"
    coefficient: float = Field(1.0, ge=0, description="lambda: weight of the distillation term")
    vocabulary: Literal["sampled", "full"] = Field(
        "sampled", description="estimated on the sampled token or summed over the vocabulary"
    )
    beta: float | None = Field(
        None, ge=0, description="weigh each token with the gate sigmoid(beta D) of the sampled token; none: no gate"
    )


class ImportanceK3(Frozen):
    """k3 estimate of the divergence from the teacher, weighted by the importance ratio (Skill-SD)."""

    kind: Literal["importance_k3"] = "importance_k3"
    coefficient: float = Field(0.001, ge=0, description="lambda: weight of the distillation term")


class Reweighting(Frozen):
    """The shift scales the advantage of each token and adds no term of its own (RLSD)."""

    kind: Literal["reweighting"] = "reweighting"
    coefficient: float = Field(0.5, ge=0, le=1, description="lambda at the first update: share of the scaled advantage")
    decay_updates: int = Field(100, ge=0, description="updates over which lambda falls to 0 linearly; 0: it stays")
    clip: float = Field(0.2, gt=0, lt=1, description="the scale stays in [1 - clip, 1 + clip]")


Signal = Annotated[GatedNLL | ReverseKL | ImportanceK3 | Reweighting, Field(discriminator="kind")]
"""How the teacher's log-probs enter the loss."""


class Rehearsal(Frozen):
    """Upkeep: go on training on stage 1's (episode -> skill) pairs during RL, so that RL does not undo them."""

    coefficient: float = Field(0.1, gt=0, description="weight of the negative log-likelihood of the answers")
    samples: int = Field(16, ge=1, description="pairs drawn at each update")


class Method(Frozen):
    """One row of the comparison table."""

    name: Name
    summary: str
    start: Literal["base", "hindsight_sft", "teacher_sft"] = Field(
        "base", description="untouched; after hindsight-skill SFT; after SFT on a teacher's episodes"
    )
    rollout: Literal["plain", "library"] = Field("plain", description="what training prompts hold: nothing, or skills")
    evaluation: tuple[Literal["plain", "library"], ...] = Field(
        ("plain",), min_length=1, description="what evaluation prompts hold; with both, each is measured"
    )
    advantage: Advantage | None = Advantage()
    teacher: Teacher | None = None
    signal: Signal | None = None
    rehearsal: Rehearsal | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.teacher is None) != (self.signal is None):
            raise ValueError("a teacher needs a signal and a signal needs a teacher")
        if len(set(self.evaluation)) < len(self.evaluation):
            raise ValueError("evaluation names a kind of prompt twice")
        if self.rehearsal and self.start != "hindsight_sft":
            raise ValueError("rehearsal repeats the pairs of stage 1, and only the start hindsight_sft has one")
        if not self.trains and len(self.evaluation) > 1:
            raise ValueError("a method that trains nothing is measured under one kind of prompt; name two methods")
        if not self.learns and (self.rollout != "plain" or self.rehearsal):
            raise ValueError("a method without advantage and without signal has no updates to play or rehearse in")
        if self.teacher and self.signal:
            reason = _meaningless(self.teacher, self.signal, self.advantage, self.rollout)
            if reason:
                raise ValueError(reason)
        return self

    @property
    def learns(self) -> bool:
        """Whether there are updates; without them a method is its start."""
        return self.advantage is not None or self.signal is not None

    @property
    def trains(self) -> bool:
        """Whether the policy's weights ever change."""
        return self.learns or self.start != "base"

    @property
    def writes_skills(self) -> bool:
        """Whether every update analyses its episodes."""
        return self.teacher is not None and self.teacher.needs_analysis

    @property
    def reads_library(self) -> bool:
        """Whether a skill library is needed."""
        return self.trains_on_library or "library" in self.evaluation

    @property
    def trains_on_library(self) -> bool:
        """Whether updates read it, in prompts or as the teacher's context."""
        return self.rollout == "library" or (self.teacher is not None and self.teacher.context == "library")


def full_vocabulary(signal: object) -> TypeGuard[ReverseKL]:
    """Whether a signal compares whole distributions, so that its teacher is scored inside the loss."""
    return isinstance(signal, ReverseKL) and signal.vocabulary == "full"


def _meaningless(teacher: Teacher, signal: Signal, advantage: Advantage | None, rollout: str) -> str:
    """Why a teacher and a signal make no sense together; empty where they do."""
    same_prompt = teacher.context in ("plain", "empty_skill")
    if teacher.weights == "external" and not isinstance(signal, ReverseKL):
        return f"{signal.kind} compares one model with and without a skill; an external teacher needs reverse_kl"
    if isinstance(signal, Reweighting) and advantage is None:
        return "reweighting scales an advantage, and this method has none"
    if isinstance(signal, Reweighting) and teacher.weights == "current":
        return "reweighting fixes the advantages before the update; its teacher cannot be the policy being optimised"
    if full_vocabulary(signal) and teacher.weights == "update_start":
        return "a full vocabulary is scored inside the loss, where the update's start is gone; use current or start"
    if teacher.context == "empty_skill" and teacher.weights not in ("update_start", "current"):
        return "an empty skill is the control of a policy that teaches itself; another teacher reads plain prompts"
    if teacher.context == "plain" and teacher.weights in ("update_start", "current"):
        return (
            "the policy with an ordinary prompt is the student itself and teaches nothing; use empty_skill as control"
        )
    if teacher.analyzer != "update_start" and not teacher.needs_analysis:
        return f"nobody writes skills for the context {teacher.context}; teacher.analyzer means nothing there"
    if teacher.episodes != "all" and same_prompt and teacher.weights != "external":
        return f"the context {teacher.context} holds no skill; choosing episodes for it means nothing"
    if rollout == "library" and teacher.context == "library":
        return "student and teacher would read the same skills; use rollout: plain"
    return ""


SEED = Method(
    name="seed",
    summary="GRPO plus gated self-distillation from the policy's own hindsight skills",
    start="hindsight_sft",
    teacher=Teacher(weights="update_start", context="own_skill"),
    signal=GatedNLL(coefficient=0.01, beta=5.0),
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
