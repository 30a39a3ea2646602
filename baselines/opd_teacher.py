"""On-policy distillation: a fixed stronger policy scores the student's own samples; reverse KL, no reward."""

from harness.methods import Method, Signal, Teacher

METHOD = Method(
    name="opd-teacher",
    summary="reverse KL to a fixed stronger policy on the student's own samples",
    advantage=None,
    teacher=Teacher(weights="external", context="plain"),
    signal=Signal(kind="reverse_kl", coefficient=1.0),
)
