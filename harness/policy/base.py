"""What every policy offers: answers to prompts. Local policies can also score given answers and be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from harness.contracts import HarnessError, Prompt, Response


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: Longest answer in tokens, end-of-sequence token included.
    """

    temperature: float = 1.0
    max_tokens: int = 512


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        prompt: The user message.
        key: Integers that name this answer, e.g. (seed, update, task, attempt, step). All randomness of the answer is
            derived from the key alone, so it does not depend on the batch the prompt happens to be in.
        choices: Concrete actions to draw from (:meth:`AgentEnv.choices`); only scripted policies read them.
        expert: The scripted expert's action where the policy asked for it (``needs_expert``), else empty.
    """

    prompt: Prompt
    key: tuple[int, ...]
    choices: tuple[str, ...] = ()
    expert: str = ""


class Policy(ABC):
    """Generates responses."""

    spec: str
    """How the user named it: ``random``, ``oracle``, ``tiny``, a directory, a hub id, ``api:MODEL@BASE_URL``."""
    fingerprint: str
    """Hash of what determines its behaviour (weights, tokenizer, template)."""
    prompt_style: str = "paper"
    """Which prompt style it was made for: ``"paper"`` or ``"compact"``."""
    longest: int = 2**62
    """Tokens of the longest prompt with its answer that it can read."""
    needs_expert: bool = False
    """Whether requests must carry the scripted expert's action."""

    @property
    def parameters(self) -> int:
        """Number of parameters, shared ones counted once; 0 for policies without weights of their own."""
        return 0

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Answer every request, in order."""

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Length of the encoded prompt in tokens, images included; 0 where the policy has no token limit."""
        return 0


def check_length(policy: Policy, longest: int) -> None:
    """Raise HarnessError where a cell's prompts and answers may be longer than what its policy can read."""
    if longest > policy.longest:
        raise HarnessError(
            f"{policy.spec!r} reads {policy.longest} tokens at most, prompts and answers may have {longest}: lower "
            "max_prompt_tokens or the answers' limit (of env or analysis)"
        )
