"""What skills look like before anything is trained on them: how many are usable, long, new, tied to one episode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.contracts import Episode, Skill


@dataclass(frozen=True)
class SkillAudit:
    """What a set of skills looks like before anything is trained on it.

    Attributes:
        count: Episodes analysed.
        usable: Share of them with a usable skill.
        words: Mean length of the usable skills in words.
        duplicates: Share of the usable skills whose text occurred before.
        instances: Share of the usable skills that name an object instance of their own episode, e.g. ``drawer 3``.
    """

    count: int
    usable: float
    words: float
    duplicates: float
    instances: float


def audit_skills(skills: Sequence[Skill], episodes: Sequence[Episode]) -> SkillAudit:
    """Audit the skills of some episodes, one each; all shares are 0 where there is nothing to count."""
    seen = ["\n".join(f"{step.observation['text']}\n{step.action}" for step in episode.steps) for episode in episodes]
    return audit_texts([skill.text if skill.usable else "" for skill in skills], seen)


def audit_texts(texts: Sequence[str], seen: Sequence[str]) -> SkillAudit:
    """:func:`audit_skills` of texts, empty where a skill is unusable, and the observations and actions behind each."""
    pairs = [(text, shown) for text, shown in zip(texts, seen, strict=True) if text]
    many = max(len(pairs), 1)
    return SkillAudit(
        count=len(texts),
        usable=len(pairs) / max(len(texts), 1),
        words=sum(len(text.split()) for text, _ in pairs) / many,
        duplicates=(len(pairs) - len({text for text, _ in pairs})) / many,
        instances=sum(bool(instances(text) & instances(shown)) for text, shown in pairs) / many,
    )


def instances(text: str) -> set[str]:
    """The numbered instances that a text names, such as ``drawer 3``; another task may not have them."""
    return set(re.findall(r"\b[a-z]+ \d+\b", text.lower()))
