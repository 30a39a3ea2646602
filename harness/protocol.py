"""The protocol of a measurement: the card that stands beside a number, and the panels it speaks of."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.cards import ProtocolCard
from harness.contracts import AgentEnv, HarnessError, Panel, Turn, View, digest
from harness.rollout import Rules


def protocol_card(env: AgentEnv, panel: Panel, episodes_per_task: int, rules: Rules, style: str) -> ProtocolCard:
    """The conditions under which ``panel`` is played by ``rules`` with prompts of a style."""
    card = env.card
    return ProtocolCard(
        env=card.id,
        panel=panel.name,
        panel_hash=panel.hash,
        episodes_per_task=episodes_per_task,
        history=rules.history,
        max_steps=rules.max_steps,
        truncation=f"oldest history first, beyond {rules.max_prompt_tokens} tokens",
        temperature=rules.sampling.temperature,
        checkpoint="last",
        parser=card.parser,
        decoding=f"free, at most {rules.sampling.max_tokens} tokens",
        invalid_action=card.invalid_action,
        reward=card.reward,
        success=card.success,
        prompt_hash=prompt_hash(env, style),
        engine=card.engine,
        data=card.data,
    )


def prompt_hash(env: AgentEnv, style: str) -> str:
    """Hash of the step prompts' wording: a first and a later step of a made-up view, rendered."""
    picture = (np.zeros((28, 28, 3), np.uint8),) if env.card.modality == "vision" else ()
    past = (Turn(1, "SEEN 1", "DONE 1"), Turn(2, "SEEN 2", "DONE 2"))
    views = [View("TASK", 1, (), "OBS", picture, ("ACTION",)), View("TASK", 3, past, "OBS", picture, ("ACTION",))]
    return digest([style, *(env.prompt(view, style).text for view in views)])[:12]


def require_disjoint(train: Panel, evaluation: Panel) -> None:
    """Raise HarnessError where a task is in both panels."""
    shared = {task.fingerprint for task in train} & {task.fingerprint for task in evaluation}
    if shared:
        raise HarnessError(
            f"panels {train.name!r} and {evaluation.name!r} share {len(shared)} tasks; training on them would leak"
        )


def describe(panel: Panel) -> dict[str, Any]:
    """A panel as manifests name it."""
    return {"name": panel.name, "hash": panel.hash, "tasks": len(panel), "notes": list(panel.notes)}
