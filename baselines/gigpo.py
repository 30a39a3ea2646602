"""GiGPO: against GRPO, a step is also compared with the other steps that were taken from the same state."""

from harness.methods import Advantage, Method

METHOD = Method(
    name="gigpo",
    summary="GRPO plus the advantage of each step among the steps from one state",
    advantage=Advantage(estimator="gigpo", gamma=0.95, step_weight=1.0),
)
