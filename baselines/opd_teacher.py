"""OPD: a fixed stronger policy scores the student's own samples. Against GRPO: reverse KL to it, no reward."""

from harness.methods import Method, ReverseKL, Teacher

METHOD = Method(
    name="opd-teacher",
    summary="reverse KL to a fixed stronger policy on the student's own samples",
    advantage=None,
    teacher=Teacher(weights="external", context="plain"),
    signal=ReverseKL(coefficient=1.0),
)
