"""From a view of the episode to a prompt that fits: over-long prompts lose their oldest history first."""

from __future__ import annotations

from dataclasses import replace

from harness.contracts import AgentEnv, Prompt, View
from harness.policy.base import Policy
from harness.skills import insert_skill


def fit_prompt(
    env: AgentEnv, policy: Policy, view: View, max_tokens: int, skill: str = ""
) -> tuple[Prompt | None, int]:
    """The step prompt, with a skill if there is one, and as much history as fits into ``max_tokens``.

    Returns (prompt, dropped turns). The instruction, the task, the skill, the current observation and the admissible
    actions are never cut: where even the prompt without history does not fit, the prompt is None and the episode
    overflows.
    """
    for dropped in range(len(view.history) + 1):
        prompt = env.prompt(replace(view, history=view.history[dropped:]), policy.prompt_style)
        prompt = insert_skill(prompt, skill) if skill else prompt
        if policy.prompt_tokens(prompt) <= max_tokens:
            return prompt, dropped
    return None, len(view.history)
