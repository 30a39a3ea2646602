"""RLSD: against GRPO, what library skills change in a token's log-prob scales that token's advantage, ever less."""

from harness.methods import Method, Reweighting, Teacher

METHOD = Method(
    name="rlsd",
    summary="GRPO with token advantages scaled by the shift under library skills",
    teacher=Teacher(weights="update_start", context="library"),
    signal=Reweighting(coefficient=0.5, decay_updates=100, clip=0.2),
)
