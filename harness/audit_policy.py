"""The part of the skill audit that asks a cell's policy, as RL found and left it: whose skill moves it, and whether
reading one helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from harness.audit_journal import EPISODE, Unmeasurable, cluster_mean, watched
from harness.cards import Ledger
from harness.cell import Session
from harness.contracts import Episode, Panel, Prompt
from harness.policy.local import LocalPolicy
from harness.records import read_prompt, read_trace
from harness.reporting.statistics import Estimate, wilson
from harness.rollout import Job
from harness.rows import score_rows
from harness.seed import analyse
from harness.skills import insert_skill
from harness.store import CellDir

AUDIT = 100
"""Phase of the audit's plays in the keys of all randomness, beside those of ``harness.cell``."""

AT_ONCE = 8
"""Episodes scored between two reports of progress."""


@dataclass(frozen=True)
class Shuffle:
    """How much an episode's own skill moves a policy, against the skill of another task.

    The three estimates are means over episodes of the mean shift l_s - l of a token, in nats, with intervals over
    tasks; ``difference`` is own minus other, episode by episode. ``weights`` says which policy: ``start`` or ``final``.
    """

    weights: str
    episodes: int
    own: Estimate
    other: Estimate
    difference: Estimate


@dataclass(frozen=True)
class Usefulness:
    """Success at training tasks without and with the skill that the policy wrote about its own episode there.

    Attributes:
        weights: Which policy: ``start`` or ``final``.
        after: Outcome of the episode that the skills are about: ``success``, ``failure`` or ``all``.
        tasks: Tasks played, one episode with and one without, with the same random numbers.
        parse_rate: Share of usable skills; where there is none, both episodes are played without.
        without, given: Success rates, Wilson intervals.
        difference: ``given`` minus ``without``, paired by task.
    """

    weights: str
    after: str
    tasks: int
    parse_rate: float
    without: Estimate
    given: Estimate
    difference: Estimate


# ------------------------------------------------------------------------------------------------- shuffle test


def shuffle_test(
    weights: str,
    policy: LocalPolicy,
    cell: CellDir,
    skills: pd.DataFrame,
    limit: int,
    temperature: float,
    report: Callable[[int, int], None],
) -> Shuffle:
    """Score the latest ``limit`` detailed training episodes under their own and under another task's skill.

    Every episode gets one other skill, drawn among those that RL wrote about other tasks and that differ from its own.

    Args:
        skills: :func:`harness.audit_journal.written_skills`.
        temperature: Of the distribution that the tokens were drawn from.

    Raises:
        Unmeasurable: No detailed episode has a usable skill, or there is no other one.
    """
    episodes = _watched(cell, skills).tail(limit)
    if episodes.empty:
        raise Unmeasurable("no training episode with a usable skill was kept in detail (train.detail)")
    pool = skills[skills["usable"] & (skills["update"] > 0)]
    own, other = [], []
    for number, (task, text) in enumerate(zip(episodes["task"], episodes["text"], strict=True)):
        strangers = pool.loc[(pool["task"] != task) & (pool["text"] != text), "text"].tolist()
        if not strangers:
            raise Unmeasurable("all skills are about one task, or alike")
        own.append(text)
        other.append(strangers[int(np.random.default_rng([AUDIT, number]).integers(len(strangers)))])
    shifts = np.empty((len(episodes), 2))
    for start in range(0, len(episodes), AT_ONCE):
        report(start, len(episodes))
        for place in range(start, min(start + AT_ONCE, len(episodes))):
            answers = _answers(cell, episodes.iloc[place])
            shifts[place] = [_shift(policy, answers, text[place], temperature) for text in (own, other)]
    report(len(episodes), len(episodes))
    tasks = list(episodes["task"])
    return Shuffle(
        weights,
        len(episodes),
        cluster_mean(list(shifts[:, 0]), tasks, "shuffle"),
        cluster_mean(list(shifts[:, 1]), tasks, "shuffle"),
        cluster_mean(list(shifts[:, 0] - shifts[:, 1]), tasks, "shuffle"),
    )


def _watched(cell: CellDir, skills: pd.DataFrame) -> pd.DataFrame:
    """Detailed training episodes with the text of their own skill and, step by step, the ids of their answers."""
    if skills.empty:
        return skills
    episodes, credit = watched(cell)
    answers = credit.sort_values("step").groupby(EPISODE, as_index=False).agg({"step": list, "ids": list})
    return episodes.merge(answers, on=EPISODE).merge(skills.loc[skills["usable"], [*EPISODE, "text"]], on=EPISODE)


Answers = list[tuple[Prompt, Sequence[int]]]
"""The steps of an episode: what was asked, and the token ids of the answer."""


def _answers(cell: CellDir, episode: pd.Series) -> Answers:
    steps = read_trace(episode["trace"])
    return [
        (read_prompt(steps[step], cell), [int(token) for token in ids])
        for step, ids in zip(episode["step"], episode["ids"], strict=True)
    ]


def _shift(policy: LocalPolicy, answers: Answers, skill: str, temperature: float) -> float:
    """Mean of l_s - l over the tokens of some answers."""
    told = [(insert_skill(prompt, skill), ids) for prompt, ids in answers]
    scores = score_rows(policy, [*answers, *told], temperature)
    plain, informed = (sum(float(s.sum()) for s in part) for part in (scores[: len(told)], scores[len(told) :]))
    return (informed - plain) / sum(len(ids) for _, ids in answers)


# --------------------------------------------------------------------------------------------------- usefulness


def usefulness(weights: str, policy: LocalPolicy, session: Session, panel: Panel, tasks: int) -> list[Usefulness]:
    """Play training tasks, let the policy write skills about its episodes, play again without and with them.

    The second plays share their random numbers, so that only the skill tells them apart; the first has others, so
    that nobody gains from a lucky start. Sampled as in the cell's evaluations.

    Raises:
        Unmeasurable: The policy was never taught to write skills.
    """
    analysis = session.config.analysis
    if analysis is None:
        raise Unmeasurable("the method never taught its policy to write skills")
    session = replace(session, policy=policy)
    spec, seed = session.config.eval, session.config.seed
    chosen = np.random.default_rng([seed, AUDIT]).permutation(len(panel))[:tasks]

    def play(phase: str, attempt: int, texts: Sequence[str]) -> list[Episode]:
        jobs = [
            Job(panel.tasks[i], attempt, (seed, AUDIT, int(i), attempt), text)
            for i, text in zip(chosen, texts, strict=True)
        ]
        return session.play(f"audit: {phase} ({weights})", jobs, spec.temperature, spec.batch)

    nothing = [""] * len(chosen)
    first = play("play", 0, nothing)
    skills = analyse(policy, first, analysis, 0, Ledger(), session.env.brief)
    texts = [skill.text if skill.usable else "" for skill in skills]
    without, given = play("without skills", 1, nothing), play("with skills", 1, texts)
    rows = [
        (bool(text), before.success, plain.success, told.success)
        for text, before, plain, told in zip(texts, first, without, given, strict=True)
        if before.counted and plain.counted and told.counted
    ]
    parts = {
        "success": [row for row in rows if row[1]],
        "failure": [row for row in rows if not row[1]],
        "all": rows,
    }
    return [_usefulness(weights, after, part) for after, part in parts.items() if part]


def _usefulness(weights: str, after: str, rows: Sequence[tuple[bool, bool, bool, bool]]) -> Usefulness:
    usable, _, without, given = (list(column) for column in zip(*rows, strict=True))
    gained = [float(b) - float(a) for a, b in zip(without, given, strict=True)]
    return Usefulness(
        weights,
        after,
        tasks=len(rows),
        parse_rate=sum(usable) / len(rows),
        without=wilson(sum(without), len(rows)),
        given=wilson(sum(given), len(rows)),
        difference=cluster_mean(gained, [str(number) for number in range(len(rows))], f"usefulness {after}"),
    )
