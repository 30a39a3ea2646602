"""Policies without a model: the floor (random) and the ceiling (the environment's own expert)."""

from __future__ import annotations

from collections.abc import Sequence

from harness.contracts import AgentEnv, FreeText, HarnessError, Response
from harness.policy.base import Policy, Request, Sampling
from harness.policy.randomness import uniforms


class RandomPolicy(Policy):
    """Takes a uniformly drawn choice of the environment's; where it offers none, one of the action space's examples."""

    spec = "random"
    fingerprint = "random-1"

    def __init__(self, env: AgentEnv) -> None:
        self.env = env

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        return [Response(self.env.respond(self._action(request))) for request in requests]

    def _action(self, request: Request) -> str:
        space = self.env.action_space
        actions = request.choices or (space.examples if isinstance(space, FreeText) else ())
        if not actions:
            raise HarnessError(f"{self.env.card.id} lists no admissible actions and no examples to draw from")
        return actions[int(uniforms(request.key, 1)[0] * len(actions))]


class OraclePolicy(Policy):
    """Takes the scripted expert's action."""

    spec = "oracle"
    fingerprint = "oracle-1"
    needs_expert = True

    def __init__(self, env: AgentEnv) -> None:
        self.env = env

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        return [Response(self.env.respond(request.expert)) for request in requests]
