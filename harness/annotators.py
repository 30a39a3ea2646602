"""Who writes skills in the policy's place, in stage 1 or, where a method says so, in RL: the environment's scripted
analyst or an OpenAI-compatible endpoint.

An answer that cannot be read as a skill is asked for again, sampled and with another seed. Every answer of an endpoint
is kept in the run's directory (:mod:`harness.policy.answers`): a run that is repeated after a kill, or another seed or
method that asks the same about an equal episode, does not pay for it a second time. The ledger is charged all the
same: it tells what a method needs, not what was left to pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cards import Ledger
from harness.contracts import AgentEnv, Episode, Prompt, Response, Skill
from harness.policy.answers import Answers, question
from harness.policy.api import PREFIX, USUAL, ApiPolicy, Calls, parse_endpoint
from harness.policy.base import Request, Sampling
from harness.skills import read_skill, render_analysis, skill_answer

if TYPE_CHECKING:
    from harness.cell import Session

SCRIPTED = "scripted"
TEMPERATURES = (0.0, 0.7, 0.7)
"""Of the tries at a readable answer about an episode: greedy first, then sampled, each with a seed of its own."""
STYLE = "paper"
"""An endpoint gets the analysis prompt that explains itself, whatever the policy's own looks like."""
ANSWERS = "annotations"
"""Directory of a run with the answers of endpoints."""


@dataclass(frozen=True)
class Annotations:
    """Skills about episodes and what they took.

    Attributes:
        skills: One per episode, in order; unusable where the annotator had no readable answer.
        repeated: Questions that were asked once more because the answer could not be read.
        prompt_tokens, answer_tokens: As the endpoint counted them, kept answers included.
    """

    skills: list[Skill]
    repeated: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def charge(self, ledger: Ledger) -> None:
        """Add the tokens to a ledger."""
        ledger.external_prompt_tokens += self.prompt_tokens
        ledger.external_answer_tokens += self.answer_tokens

    @property
    def summary(self) -> str:
        """What went wrong in a line; empty where nothing did."""
        lost = sum(not skill.usable for skill in self.skills)
        if not (lost or self.repeated):
            return ""
        return (
            f"{lost} of {len(self.skills)} episodes have no readable skill; "
            f"{self.repeated} answers could not be read and were asked for again"
        )


def annotate(
    episodes: Sequence[Episode],
    annotator: str,
    env: AgentEnv,
    max_tokens: int = 4096,
    update: int = -1,
    calls: Calls = USUAL,
    answers: Answers | None = None,
) -> Annotations:
    """Have skills written about episodes.

    Args:
        episodes: Finished episodes. About one without a step, or that does not count, no endpoint is asked.
        annotator: ``scripted`` or ``MODEL@BASE_URL``.
        env: The environment, for its scripted analyst.
        max_tokens: Longest answer of an endpoint.
        update: Recorded in the skills; -1 is stage 1.
        calls: How an endpoint is called.
        answers: Where its answers are kept; None keeps none.

    Raises:
        HarnessError: Bad ``annotator``, client not installed, key or model refused, or the endpoint is gone.
    """
    check_annotator(annotator)
    if annotator == SCRIPTED:
        return Annotations([_scripted(env, episode, update) for episode in episodes])
    model, _ = parse_endpoint(annotator)
    skills = [Skill("", "", model, update, raw="")] * len(episodes)
    prompts = {
        number: render_analysis(episode, STYLE, len(episode.steps))
        for number, episode in enumerate(episodes)
        if episode.steps and episode.counted
    }
    repeated, spent = 0, [0, 0]
    endpoint = ApiPolicy(f"{PREFIX}{annotator.removeprefix(PREFIX)}", calls)
    for attempt, temperature in enumerate(TEMPERATURES):
        repeated += len(prompts) if attempt else 0
        found = ask(endpoint, prompts, Sampling(temperature, max_tokens), attempt, answers)
        for number, answer in found.items():
            spent = [total + count for total, count in zip(spent, answer.usage, strict=True)]
            if answer.failure is None:
                skills[number] = read_skill(answer.text, model, update)
        prompts = {n: prompts[n] for n, answer in found.items() if answer.failure is None and not skills[n].usable}
    return Annotations(skills, repeated, *spent)


def ask(
    endpoint: ApiPolicy, prompts: Mapping[int, Prompt], sampling: Sampling, attempt: int, answers: Answers | None
) -> dict[int, Response]:
    """The answer to each prompt, remembered or asked for; equal prompts are asked once."""
    requests = {number: Request(prompt, (attempt,)) for number, prompt in prompts.items()}
    names = {number: question(endpoint.model, request, sampling) for number, request in requests.items()}
    found = {name: answers.find(name) for name in set(names.values())} if answers else {}
    known = {name: answer for name, answer in found.items() if answer is not None}
    todo = {name: requests[number] for number, name in names.items() if name not in known}
    name_of = {id(request): name for name, request in todo.items()}

    def keep(request: Request, response: Response) -> None:
        if answers:
            answers.keep(name_of[id(request)], response)

    if todo:
        known |= zip(todo, endpoint.generate(list(todo.values()), sampling, keep), strict=True)
    return {number: known[name] for number, name in names.items()}


def annotate_in(
    session: Session, episodes: Sequence[Episode], annotator: str, update: int, max_tokens: int = 4096
) -> Annotations:
    """Have skills written in a cell, by the first of its processes, at the ledger's expense."""
    answers = Answers(answers_directory(session.cell.path))
    written = session.world.once(
        lambda: annotate(episodes, annotator, session.env, max_tokens, update, session.calls, answers)
    )
    written.charge(session.ledger)
    return written


def answers_directory(cell: Path) -> Path:
    """Where a run keeps its endpoints' answers: beside its cells; a cell on its own keeps them itself."""
    return (cell.parent.parent if cell.parent.name == "cells" else cell) / ANSWERS


def check_annotator(annotator: str) -> None:
    """Raise HarnessError for what is neither ``scripted`` nor the address of an endpoint."""
    if annotator != SCRIPTED:
        parse_endpoint(annotator, f"annotator (other than {SCRIPTED!r})")


def _scripted(env: AgentEnv, episode: Episode, update: int) -> Skill:
    written = env.annotate(episode)
    return read_skill(skill_answer(*written) if written else "", SCRIPTED, update)
