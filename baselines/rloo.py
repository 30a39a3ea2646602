"""RLOO: against GRPO, an episode is compared with the mean of the other attempts alone, and nothing is divided."""

from harness.methods import Advantage, Method

METHOD = Method(
    name="rloo",
    summary="policy gradient against the mean of the other attempts",
    advantage=Advantage(estimator="leave_one_out", divide_by_std=False),
)
