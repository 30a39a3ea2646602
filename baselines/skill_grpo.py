"""Skill-GRPO: against GRPO, training prompts hold skills of a static library; measured without them and with them."""

from harness.methods import Method

METHOD = Method(
    name="skill-grpo",
    summary="GRPO with library skills in the training prompts",
    rollout="library",
    evaluation=("plain", "library"),
)
