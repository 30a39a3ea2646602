"""GRPO: group-relative policy gradient with a KL term to the start, nothing else. Every field has its default."""

from harness.methods import Method

METHOD = Method(name="grpo", summary="group-relative policy gradient")
