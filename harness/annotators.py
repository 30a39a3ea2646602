"""Who writes skills in the policy's place, in stage 1 or, where a method says so, in RL: the environment's scripted
analyst or an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from harness.contracts import AgentEnv, Episode, Skill
from harness.policy.api import PREFIX, USUAL, ApiPolicy, Calls, parse_endpoint
from harness.policy.base import Request, Sampling
from harness.skills import read_skill, render_analysis, skill_answer

SCRIPTED = "scripted"


def annotate(
    episodes: Sequence[Episode],
    annotator: str,
    env: AgentEnv,
    style: str = "paper",
    max_tokens: int = 4096,
    update: int = -1,
    calls: Calls = USUAL,
) -> list[Skill]:
    """One skill per episode, in order; unusable where the annotator had no readable answer.

    Args:
        episodes: Finished episodes.
        annotator: ``scripted`` or ``MODEL@BASE_URL``, whose answers are greedy.
        env: The environment, for its scripted analyst.
        style: Style of the analysis prompt an endpoint is sent.
        max_tokens: Longest answer of an endpoint.
        update: Recorded in the skills; -1 is stage 1.
        calls: How an endpoint is called.

    Raises:
        HarnessError: Bad ``annotator``, client not installed, key or model refused, or the endpoint is gone.
    """
    check_annotator(annotator)
    if annotator == SCRIPTED:
        return [_scripted(env, episode, update) for episode in episodes]
    model, _ = parse_endpoint(annotator)
    requests = [
        Request(render_analysis(episode, style, len(episode.steps), env.brief), (update, number))
        for number, episode in enumerate(episodes)
    ]
    answers = ApiPolicy(f"{PREFIX}{annotator}", calls).generate(requests, Sampling(0.0, max_tokens))
    return [read_skill(answer.text, model, update) for answer in answers]


def check_annotator(annotator: str) -> None:
    """Raise HarnessError for what is neither ``scripted`` nor the address of an endpoint."""
    if annotator != SCRIPTED:
        parse_endpoint(annotator, f"annotator (other than {SCRIPTED!r})")


def _scripted(env: AgentEnv, episode: Episode, update: int) -> Skill:
    written = env.annotate(episode)
    return read_skill(skill_answer(*written) if written else "", SCRIPTED, update)
