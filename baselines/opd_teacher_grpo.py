"""OPD+GRPO: against GRPO, adds the reverse KL to a fixed stronger policy on the student's own samples."""

from harness.methods import Method, ReverseKL, Teacher

METHOD = Method(
    name="opd-teacher-grpo",
    summary="GRPO plus reverse KL to a fixed stronger policy",
    teacher=Teacher(weights="external", context="plain"),
    signal=ReverseKL(coefficient=1.0),
)
