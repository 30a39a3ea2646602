"""OPSD: self-distillation from library skills. Against GRPO: no reward; the teacher is the same policy with skills."""

from harness.methods import GatedNLL, Method, Teacher

METHOD = Method(
    name="opsd",
    summary="gated self-distillation from library skills, without reward",
    advantage=None,
    teacher=Teacher(weights="update_start", context="library"),
    signal=GatedNLL(coefficient=0.01, beta=5.0),
)
