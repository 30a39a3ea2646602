"""GRPO+OPSD: against GRPO, adds self-distillation from library skills with every token weighted alike (gate 1/2)."""

from harness.methods import GatedNLL, Method, Teacher

METHOD = Method(
    name="grpo-opsd",
    summary="GRPO plus ungated self-distillation from library skills",
    teacher=Teacher(weights="update_start", context="library"),
    signal=GatedNLL(coefficient=0.01, beta=0.0),
)
