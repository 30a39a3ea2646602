"""Skill-Prompt: the untouched start, played with skills of a static library in the prompt. Against GRPO: no updates."""

from harness.methods import Method

METHOD = Method(
    name="skill-prompt",
    summary="the untrained policy with library skills in its prompts",
    evaluation=("library",),
    advantage=None,
)
