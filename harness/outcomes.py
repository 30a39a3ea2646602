"""How episodes ended: the outcome as journals hold it, and rates over many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from harness.contracts import Episode


class Result(TypedDict):
    """The outcome of an episode as the journals hold it."""

    task: str
    kind: str
    attempt: int
    success: bool
    score: float
    reward: float
    steps: int
    valid: int
    """Steps whose answer was a valid action."""
    dropped_turns: int
    stop_reason: str


def result(episode: Episode) -> Result:
    """The outcome of an episode."""
    return {
        "task": episode.task.id,
        "kind": episode.task.kind,
        "attempt": episode.attempt,
        "success": episode.success,
        "score": episode.score,
        "reward": episode.reward,
        "steps": len(episode.steps),
        "valid": sum(step.valid for step in episode.steps),
        "dropped_turns": sum(step.dropped_turns for step in episode.steps),
        "stop_reason": str(episode.stop_reason),
    }


def success_rate(episodes: Sequence[Episode]) -> float:
    """Share of successes among the counted episodes; 0 where none counts."""
    return share(episode.success for episode in episodes if episode.counted)


def share(truths: Iterable[bool]) -> float:
    """How many of them hold, as a share; 0 where there are none."""
    values = list(truths)
    return sum(values) / len(values) if values else 0.0


def stop_reasons(episodes: Sequence[Episode]) -> dict[str, int]:
    """How often each stop reason occurred."""
    return dict(Counter(str(episode.stop_reason) for episode in episodes))
