"""SDAR: against GRPO, adds gated self-distillation from library skills; SEED's loss with another context and start."""

from harness.methods import GatedNLL, Method, Teacher

METHOD = Method(
    name="sdar",
    summary="GRPO plus gated self-distillation from library skills",
    teacher=Teacher(weights="update_start", context="library"),
    signal=GatedNLL(coefficient=0.01, beta=5.0),
)
