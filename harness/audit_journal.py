"""The part of the skill audit that a finished cell's journal answers: what was written, and which way it pulled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.contracts import AgentEnv, HarnessError, Panel, Task, mentions
from harness.records import read_credit, read_episodes, read_trace
from harness.reporting.statistics import Estimate, interval, ratio, seed_draws, wilson
from harness.skill_measures import audit_texts
from harness.store import CellDir

EPISODE = ["update", "task", "attempt"]
"""Columns that name an episode of a journal."""

TRENDS = ("parse_rate", "words", "duplicates", "repeated", "instances", "leaks", "shift")
"""Fields of :class:`UpdateAudit` whose drift is reported."""


class Unmeasurable(HarnessError):
    """A question that this cell cannot answer; the text says why."""


@dataclass(frozen=True)
class UpdateAudit:
    """The skills of one update. Shares lie in [0, 1]; None: there is nothing to count.

    Attributes:
        update: -1 is stage 1.
        skills: Episodes analysed.
        parse_rate: Share of them with a usable skill.
        words: Mean length of the usable skills.
        duplicates: Share of the usable skills whose text another episode of the update has already.
        repeated: Share of the usable skills whose text an earlier update has already.
        instances: Share of the usable skills that name an instance of their own episode, e.g. ``drawer 3``.
        leaks: Share of the usable skills, at tasks with secrets, that name one which their episode never showed.
        shift: Mean of l_s - l over the tokens of the update's detailed episodes, in nats.
    """

    update: int
    skills: int
    parse_rate: float
    words: float
    duplicates: float
    repeated: float
    instances: float
    leaks: float | None
    shift: float | None


@dataclass(frozen=True)
class Drift:
    """Mean of a quantity over the first and over the last third of the updates."""

    quantity: str
    first: float
    last: float


@dataclass(frozen=True)
class Outcome:
    """Which way the teacher pulled detailed training episodes with one outcome.

    Attributes:
        outcome: ``success``, ``failure`` or ``all``.
        episodes: How many.
        agreement: Share whose summed shift is positive after a success, negative after a failure; Wilson interval.
        gap: Mean over episodes of the mean shift of a token, in nats; interval over tasks.
    """

    outcome: str
    episodes: int
    agreement: Estimate
    gap: Estimate


def written_skills(cell: CellDir) -> pd.DataFrame:
    """One row per skill: what ``skills.jsonl`` holds, and of its episode ``shown`` (observations and actions) and
    ``known`` (beside them task and answers: all that its author may know). Empty where none was written.

    Raises HarnessError where an episode is missing.
    """
    skills = pd.DataFrame(cell.records("skills.jsonl"))
    if skills.empty:
        return skills
    episodes = training_episodes(cell)
    steps = [read_trace(text) for text in episodes["trace"]]
    shown = ["\n".join(f"{step['observation']}\n{step['action']}" for step in trace) for trace in steps]
    said = ["\n".join(step["response"] for step in trace) for trace in steps]
    known = [
        f"{task}\n{seen}\n{answers}" for task, seen, answers in zip(episodes["task_text"], shown, said, strict=True)
    ]
    joined = skills.merge(episodes[EPISODE].assign(shown=shown, known=known), on=EPISODE, validate="one_to_one")
    if len(joined) < len(skills):
        raise HarnessError(f"{cell.path}: episodes.parquet lacks {len(skills) - len(joined)} episodes of skills.jsonl")
    return joined


def training_episodes(cell: CellDir) -> pd.DataFrame:
    """The episodes of stage 1 and of the updates; evaluations are left out."""
    episodes = read_episodes(cell)
    return episodes[episodes["phase"].isin(("stage1", "train"))].reset_index(drop=True)


def secrets_of(env: AgentEnv, tasks: Iterable[Task]) -> dict[str, tuple[str, ...]]:
    """The secrets of each task, by its id; resets the environment."""
    found = {}
    for task in tasks:
        env.reset(options={"task": task})
        found[task.id] = env.secrets()
    return found


def leaks(text: str, known: str, secrets: Sequence[str]) -> bool:
    """Whether a text names a secret that is nowhere in what its author may know."""
    return any(mentions(text, secret) and not mentions(known, secret) for secret in secrets)


def audit_updates(skills: pd.DataFrame, shifts: pd.DataFrame, env: AgentEnv, panel: Panel) -> list[UpdateAudit]:
    """Audit each update's skills.

    Args:
        skills: :func:`written_skills`.
        shifts: :func:`episode_shifts`.
        env: Asked for its secrets, hence reset.
        panel: The tasks that were trained on.

    Raises:
        Unmeasurable: No skills were written.
        HarnessError: A task is not in the panel.
    """
    if skills.empty:
        raise Unmeasurable("the method writes no skills")
    tasks = {task.id: task for task in panel}
    if gone := sorted(set(skills["task"]) - tasks.keys()):
        raise HarnessError(f"{env.card.id} has no training task {gone[0]!r} any more, which skills.jsonl names")
    secrets = secrets_of(env, [tasks[name] for name in sorted(set(skills["task"]))])
    audits, before = [], set[str]()
    for update, group in skills.groupby("update"):
        texts = [text if usable else "" for text, usable in zip(group["text"], group["usable"], strict=True)]
        audit = audit_texts(texts, list(group["shown"]))
        leaking = [
            leaks(text, known, secrets[task])
            for text, known, task in zip(texts, group["known"], group["task"], strict=True)
            if text and secrets[task]
        ]
        scored = shifts[shifts["update"] == update]
        audits.append(
            UpdateAudit(
                update=int(str(update)),
                skills=audit.count,
                parse_rate=audit.usable,
                words=audit.words,
                duplicates=audit.duplicates,
                repeated=sum(text in before for text in texts) / max(sum(map(bool, texts)), 1),
                instances=audit.instances,
                leaks=sum(leaking) / len(leaking) if leaking else None,
                shift=float(scored["shift"].sum() / scored["tokens"].sum()) if len(scored) else None,
            )
        )
        before |= {text for text in texts if text}
    return audits


def drifts(audits: Sequence[UpdateAudit]) -> list[Drift]:
    """How the skills of RL changed, quantity by quantity. Raises Unmeasurable where there are too few updates."""
    rl = [audit for audit in audits if audit.update > 0]
    third = len(rl) // 3
    if not third:
        raise Unmeasurable(f"skills of {len(rl)} updates: a drift takes three")
    found = []
    for name in TRENDS:
        first, last = ([getattr(audit, name) for audit in part] for part in (rl[:third], rl[-third:]))
        if None not in (*first, *last):
            found.append(Drift(name, float(np.mean(first)), float(np.mean(last))))
    return found


# ------------------------------------------------------------------------------------------- shift and outcome


def watched(cell: CellDir) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The detailed training episodes, and the credit of their steps, which names its episode by the same columns."""
    episodes, credit = training_episodes(cell), read_credit(cell)
    return episodes[episodes["detail"].astype(bool) & (episodes["phase"] == "train")], credit


def episode_shifts(cell: CellDir) -> pd.DataFrame:
    """One row per detailed training episode with a teacher: its name, ``success``, the summed ``shift`` l_s - l of its
    tokens in nats, and their number ``tokens``. Rows that training left out (``train.max_rows``) are not in it."""
    episodes, credit = watched(cell)
    credit = credit[credit["teacher"].notna()]
    steps = credit[EPISODE].assign(
        shift=[float(np.sum(a) - np.sum(b)) for a, b in zip(credit["teacher"], credit["logp"], strict=True)],
        tokens=[len(ids) for ids in credit["ids"]],
    )
    return steps.groupby(EPISODE, as_index=False).sum().merge(episodes[[*EPISODE, "success"]], on=EPISODE)


def outcomes(shifts: pd.DataFrame) -> list[Outcome]:
    """Sign agreement and teacher gap after successes, after failures and over all episodes.

    Raises Unmeasurable where there are none.
    """
    if shifts.empty:
        raise Unmeasurable("no training episode with a teacher was kept in detail (train.detail)")
    parts = {"success": shifts[shifts["success"]], "failure": shifts[~shifts["success"]], "all": shifts}
    return [_outcome(name, part) for name, part in parts.items() if len(part)]


def _outcome(name: str, shifts: pd.DataFrame) -> Outcome:
    wanted = np.where(shifts["success"], 1, -1)
    agreeing = int((np.sign(shifts["shift"]) == wanted).sum())
    gap = cluster_mean(list(shifts["shift"] / shifts["tokens"]), list(shifts["task"]), f"gap {name}")
    return Outcome(name, len(shifts), wilson(agreeing, len(shifts)), gap)


def cluster_mean(values: Sequence[float], clusters: Sequence[str], key: str) -> Estimate:
    """Mean of values with a bootstrap interval that draws whole clusters (tasks): their episodes are no strangers.

    The interval is unknown (NaN) for a single cluster and for values that are all alike. ``key`` fixes the draws.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    names, which = np.unique(list(clusters), return_inverse=True)
    total, count = np.bincount(which, np.array(values, dtype=float)), np.bincount(which).astype(float)
    value = float(np.mean(values))
    if len(names) == 1 or min(values) == max(values):
        return Estimate(value, math.nan, math.nan)
    draws = seed_draws(len(names), key)
    return interval(value, ratio(draws @ total, draws @ count))
