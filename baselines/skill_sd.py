"""Skill-SD: against GRPO, adds an importance-weighted k3 divergence from the policy that reads library skills."""

from harness.methods import ImportanceK3, Method, Teacher

METHOD = Method(
    name="skill-sd",
    summary="GRPO plus an importance-weighted divergence from the policy with library skills",
    teacher=Teacher(weights="update_start", context="library"),
    signal=ImportanceK3(coefficient=0.001),
)
