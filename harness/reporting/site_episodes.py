"""The episode pages of a report: every recorded episode of a cell, step by step, and the credit of its tokens.

One page per cell. It opens with a light index of its episodes (:func:`episode_index`); what an episode said comes in
chunks (:func:`episode_chunks`), which the page loads when an episode is opened. The pages of a run hold at most
``MOST_SHOWN`` episodes: all of a usual run's, of a larger one's those that :func:`shown` chooses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.contracts import UNCOUNTED
from harness.records import PICTURES, read_credit, read_outcomes, read_trace, read_traces
from harness.reporting.frames import Cell, skills_of
from harness.reporting.site import write_chunks, write_page
from harness.store import Record

MOST_SHOWN = 50_000
"""Episodes on the pages of all cells of a run; every recorded one is in its cell's ``episodes.parquet``."""
MOST_EPISODES = 50
"""Episodes in one chunk, at most."""
MOST_CHARACTERS = 300_000
"""A chunk with more characters of text is closed."""
TOKEN_CHARACTERS = 40
"""What the numbers of one token take, about."""

Key = tuple[str, int, str, int]
"""An episode of a cell: phase, update, task, attempt."""


@dataclass(frozen=True)
class Told:
    """What a page shows: ``episodes`` and ``skills`` one row each, ``credit`` one row per step of an episode.

    ``recorded`` counts the episodes of the cell, whether or not they are among ``episodes``.
    """

    episodes: pd.DataFrame
    credit: pd.DataFrame
    skills: pd.DataFrame
    recorded: int


def read_told(cell: Cell, most: int = MOST_SHOWN) -> Told:
    """What a cell recorded about at most so many episodes. Raises HarnessError where a file is broken.

    Evaluations with skills in the prompt get the phase ``eval*``: they play the tasks of the others again.
    """
    outcomes = read_outcomes(cell.store)
    rows = shown(outcomes["detail"].to_numpy(bool), most)
    episodes = outcomes.iloc[rows].reset_index(drop=True)
    again = (episodes["phase"] == "eval") & (episodes["skills"] == "library")
    traces = read_traces(cell.store, rows) if len(rows) else []
    episodes = episodes.assign(phase=episodes["phase"].mask(again, "eval*"), trace=traces)
    credit = read_credit(cell.store)
    if len(rows) < len(outcomes) and not credit.empty:
        known = set(episode_keys(episodes))
        credit = credit[[key in known for key in _credit_keys(credit)]]
    return Told(episodes, credit, skills_of([cell]), len(outcomes))


def shown(detailed: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """Places of the episodes that a page shows: all, or ``most`` of them in ascending order.

    Detailed ones, which alone have prompts, pictures and credit, take up to two thirds of the room and more where the
    others leave some. Where not all of a kind fit, they are drawn evenly from the whole of the training.
    """
    places = np.arange(len(detailed))
    if len(places) <= most:
        return places
    first, others = places[detailed], places[~detailed]
    room = min(len(first), max(2 * most // 3, most - len(others)))
    return np.sort(np.concatenate([_evenly(first, room), _evenly(others, most - room)]))


def _evenly(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    return places[np.arange(count) * len(places) // max(count, 1)]


def most_per_cell(recorded: Sequence[int], most: int = MOST_SHOWN) -> int:
    """The largest number of episodes that every cell may show so that all together are at most ``most``."""
    left = len(recorded)
    for count in sorted(recorded):
        if count * left > most:
            return most // left
        most, left = most - count, left - 1
    return max(recorded, default=0)


def write_episode_pages(cell: Cell, run: Path, most: int = MOST_SHOWN) -> str | None:
    """Write a cell's episode page and its data, on at most so many of its episodes.

    Returns the page's path within the run, None without episodes.

    ``#train/12/TASK/0`` behind its address opens the first attempt at a task of update 12;
    ``#?phase=eval&update=20&outcome=failure`` lists the episodes that are so.
    """
    told = read_told(cell, most)
    if told.episodes.empty:
        return None
    name, path = f"{cell.id}.episodes", f"report/episodes/{cell.id}.html"
    write_chunks(run, name, episode_index(told), episode_chunks(told))
    write_page(
        run,
        path,
        "episodes.html.j2",
        f"{cell.title} · episodes",
        [(cell.title, f"report/cells/{cell.id}.html")],
        name=name,
        total=len(told.episodes),
        recorded=told.recorded,
        pictures=f"cells/{cell.id}/{PICTURES}/",
        skills=None if told.skills.empty else f"report/skills/{cell.id}.html",
    )
    return path


# --------------------------------------------------------------------------------------------------- index


def episode_index(told: Told) -> Record:
    """The episodes in the order of the journal, one list per property.

    Texts, which repeat, are ``{"values": distinct ones, "codes": one number per episode}``. ``shift`` sums D = l_s - l
    over the episode's tokens (None without a teacher); ``credit`` says whether the tokens' credit was recorded;
    ``skill`` is the row of the skill written about the episode.
    """
    frame = told.episodes
    keys = episode_keys(frame)
    shifts, detailed, written = _shifts(told.credit), set(_credit_keys(told.credit)), skill_rows(told.skills)
    crashed = frame["stop_reason"].isin(UNCOUNTED)
    outcome = pd.Series(np.where(frame["success"], "success", np.where(crashed, "crash", "failure")))
    return {
        **{name: coded(frame[name]) for name in ("phase", "task", "kind", "stop_reason")},
        "outcome": coded(outcome),
        **{name: [number(v) for v in frame[name]] for name in ("update", "attempt", "steps", "reward", "score")},
        "shift": [shifts.get(key) for key in keys],
        "credit": [int(key in detailed) for key in keys],
        "skill": [written.get(key) for key in keys],
        "scale": scales(told.credit),
    }


def skill_rows(skills: pd.DataFrame) -> dict[Key, int]:
    """Row of the skill that was written about an episode."""
    if skills.empty:
        return {}
    return {key: row for row, key in enumerate(episode_keys(skills.assign(phase=skill_phase(skills))))}


def skill_phase(skills: pd.DataFrame) -> pd.Series[str]:
    """The phase of the episode that each skill is about."""
    return pd.Series(["stage1" if update < 0 else "train" for update in skills["update"]], index=skills.index)


def episode_keys(frame: pd.DataFrame) -> list[Key]:
    """The episode that each row is about."""
    return list(zip(*(frame[name].tolist() for name in ("phase", "update", "task", "attempt")), strict=True))


def coded(texts: pd.Series[Any]) -> Record:
    """Texts of which many are equal."""
    codes, values = pd.factorize(texts.astype(str))
    return {"values": list(values), "codes": codes.tolist()}


def number(value: Any) -> float | int | None:
    """A number for a page: five digits, None for what is none."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")


# -------------------------------------------------------------------------------------------------- chunks


def episode_chunks(told: Told) -> Iterator[tuple[int, Record]]:
    """What the episodes said, in the order of the index: (row of the first, chunk), each episode exactly once.

    A chunk has ``texts``, each once, and ``episodes``, in which a text is its number there. An episode holds one list
    per property of its steps; a detailed one also ``prompt`` and ``pictures``, where known ``credit`` (per step) and
    ``read``, the skills that the teacher read, to which a step's ``skill`` points.
    """
    credit = _credit_of(told.credit)
    numbers = ("dropped_turns", "prompt_tokens", "sampled_tokens")
    names = ("task_text", "error", "traceback", "fingerprint", *numbers, "trace")
    said = told.episodes[[name for name in names if name in told.episodes]].to_dict("records")
    texts: dict[str, int] = {}
    chunk: list[Record] = []
    start = tokens = 0
    for row, (key, record) in enumerate(zip(episode_keys(told.episodes), said, strict=True)):
        chunk.append(_episode(record, credit.get(key, []), texts))
        tokens += sum(len(step["tokens"]) for step in credit.get(key, []))
        if len(chunk) == MOST_EPISODES or sum(map(len, texts)) + TOKEN_CHARACTERS * tokens > MOST_CHARACTERS:
            yield start, {"texts": list(texts), "episodes": chunk}
            texts, chunk, start, tokens = {}, [], row + 1, 0
    if chunk:
        yield start, {"texts": list(texts), "episodes": chunk}


def _episode(record: Mapping[Hashable, Any], credit: list[Record], texts: dict[str, int]) -> Record:
    """An episode whose texts are numbers in ``texts``, which grows."""

    def coded(text: str) -> int:
        return texts.setdefault(text, len(texts))

    steps = read_trace(record["trace"])
    made: Record = {str(n): coded(v) if isinstance(v, str) else number(v) for n, v in record.items() if n != "trace"}
    made |= {name: [coded(step[name]) for step in steps] for name in ("observation", "response", "action")}
    made |= {"valid": [int(step["valid"]) for step in steps], "reward": [number(step["reward"]) for step in steps]}
    if any("prompt" in step for step in steps):
        made |= {"prompt": [coded(step["prompt"]) for step in steps], "pictures": [step["pictures"] for step in steps]}
    if credit:
        read = list(dict.fromkeys(step["skill"] for step in credit if step["skill"]))
        made["read"] = [coded(text) for text in read]
        made["credit"] = [
            {
                **step,
                "tokens": [coded(text) for text in step["tokens"]],
                "skill": read.index(step["skill"]) if step["skill"] else None,
            }
            for step in credit
        ]
    return made


# -------------------------------------------------------------------------------------------------- credit


def scales(credit: pd.DataFrame) -> Record:
    """Where each quantity's colours start, turn and end, for the whole cell, so that its episodes compare.

    Shift and advantage: a round number that at least 95 % of the tokens stay below. Before and after share one scale.
    The gate turns at 1/2. None where nothing is known.
    """
    advantages = np.concatenate([credit["advantage"].dropna().to_numpy(float), _flat(credit["pull"])])
    return {
        "shift": _around(_flat(_shift_of(credit))),
        "gate": [0.0, 0.5, 1.0] if credit["gate"].notna().any() else None,
        "advantage": _around(advantages),
        "pull": _around(advantages),
    }


def _around(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float] | None:
    if not values.size:
        return None
    reach = float(np.quantile(np.abs(values), 0.95)) or float(np.abs(values).max()) or 1.0
    power = 10.0 ** math.floor(math.log10(reach))
    end = float(f"{next(step * power for step in (1, 2, 5, 10) if step * power >= reach * (1 - 1e-9)):.1g}")
    return [-end, 0.0, end]


def _flat(lists: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All numbers of a column of lists; rows without a list are left out."""
    known = [np.asarray(values, float) for values in lists if values is not None]
    return np.concatenate(known) if known else np.zeros(0)


def _shift_of(credit: pd.DataFrame) -> list[np.ndarray[Any, np.dtype[np.float64]] | None]:
    """D = l_s - l of each row's tokens; None where no teacher scored them."""
    pairs = zip(credit["teacher"], credit["logp"], strict=True)
    return [None if teacher is None else np.asarray(teacher) - np.asarray(logp) for teacher, logp in pairs]


def _credit_keys(credit: pd.DataFrame) -> list[Key]:
    return episode_keys(credit.assign(phase="train"))


def _shifts(credit: pd.DataFrame) -> dict[Key, float | int | None]:
    """The sum of D over the tokens of each episode that a teacher scored."""
    sums: dict[Key, float] = defaultdict(float)
    for key, shift in zip(_credit_keys(credit), _shift_of(credit), strict=True):
        if shift is not None:
            sums[key] += float(shift.sum())
    return {key: number(value) for key, value in sums.items()}


def _credit_of(credit: pd.DataFrame) -> dict[Key, list[Record]]:
    """The credit of every episode that has any, one record per step."""
    found: dict[Key, list[Record]] = defaultdict(list)
    for key, row in zip(_credit_keys(credit), credit.to_dict("records"), strict=True):
        per_token = {name: row[name] for name in ("logp", "teacher", "gate", "pull")}
        found[key].append(
            {
                "step": int(row["step"]),
                "ids": [int(i) for i in row["ids"]],
                "tokens": list(row["tokens"]),
                **{n: None if values is None else [number(v) for v in values] for n, values in per_token.items()},
                "advantage": number(row["advantage"]),
                "skill": row["skill"],
                **{name: bool(row[name]) for name in ("in_policy", "in_distill", "chosen")},
            }
        )
    return found
