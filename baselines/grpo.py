"""GRPO: group-relative policy gradient with a KL term to the start, nothing else."""

from harness.methods import Advantage, Method

METHOD = Method(name="grpo", summary="group-relative policy gradient", advantage=Advantage())
