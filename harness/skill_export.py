"""Building a skill library from the skills that finished cells wrote about their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from harness import __version__
from harness.config import CellConfig
from harness.contracts import HarnessError, plain
from harness.library import Entry, Library, Origin, Place, Provenance, Source, normalised
from harness.records import finished_cell, read_episodes
from harness.skill_measures import instances
from harness.store import CellDir, Record
from harness.validation import validate

STAGE1 = -1
"""The update under which skills of stage 1 are on record."""


@dataclass(frozen=True)
class Choice:
    """What an export takes.

    Attributes:
        per_env, per_kind, per_task: Most entries for an environment, each kind of task, each task; 0: none.
        outcome: Skills about successes alone, or about all episodes.
        updates: First and last update looked at; None looks at all, stage 1 included.
    """

    per_env: int = 0
    per_kind: int = 3
    per_task: int = 0
    outcome: Literal["successes", "all"] = "successes"
    updates: tuple[int, int] | None = None

    def most(self, place: Place) -> int:
        """How many entries a place gets."""
        _, kind, task = place
        return self.per_task if task else self.per_kind if kind else self.per_env

    @property
    def command(self) -> str:
        """The choice in words of the command line."""
        words = f"--per-env {self.per_env} --per-kind {self.per_kind} --per-task {self.per_task} --from {self.outcome}"
        return words if self.updates is None else f"{words} --updates {spell(self.updates)}"


class Written(NamedTuple):
    """A usable skill on record."""

    env: str
    kind: str
    cell: str
    record: Record


class Taken(NamedTuple):
    """What a library holds about one environment, kind or task, and out of how much."""

    place: Place
    usable: int
    distinct: int
    entries: tuple[Entry, ...]


def export(cells: Sequence[Path], name: str, choice: Choice) -> tuple[Library, list[Taken]]:
    """The library of the best supported skills of some cells, and what was taken from how many.

    Texts that differ in white space and case alone are one. First come those written about successes at the most
    different tasks, then about the most tasks, then the most episodes, then by the alphabet: the same cells give the
    same library, in whatever order they are named.

    Cells whose method writes no skills are passed over. Raises HarnessError for a cell that is not finished, where no
    cell has skills, and where nothing fits the choice.
    """
    if not choice.per_env + choice.per_kind + choice.per_task:
        raise HarnessError("nothing to export: --per-env, --per-kind and --per-task are all 0")
    found: list[Written] = []
    origins: list[Origin] = []
    for cell_name, path in sorted({path.resolve().name: path for path in cells}.items()):
        cell, config = finished_cell(path)
        if (path / "skills.jsonl").is_file():
            skills, origin = _read(cell, config, cell_name, choice)
            found += skills
            origins.append(origin)
    if not origins:
        raise HarnessError(f"{', '.join(map(str, cells))}: no skills there, the method writes none")
    if not found:
        spelled = f" of updates {spell(choice.updates)}" if choice.updates else ""
        raise HarnessError(f"no usable skill from {choice.outcome}{spelled} in {len(origins)} cells")
    taken = _take(found, choice)
    entries = tuple(entry for group in taken for entry in group.entries)
    provenance = Provenance(
        author=", ".join(sorted({skill.record["author"] for skill in found})),
        harness=__version__,
        command=choice.command,
        instances=sum(bool(instances(entry.text)) for entry in entries),
        cells=tuple(origins),
    )
    summary = f"exported from {len(origins)} cells: {len(entries)} of {len(found)} usable skills"
    data = {"name": name, "summary": summary, "provenance": provenance, "skills": entries}
    return validate(Library, data, f"export {name}"), taken


def _read(cell: CellDir, config: CellConfig, name: str, choice: Choice) -> tuple[list[Written], Origin]:
    """The skills of a cell that fit the choice, and where they come from."""
    records = [record for record in cell.records("skills.jsonl") if _within(record["update"], choice.updates)]
    method = config.method.name if config.method else "evaluation"
    kinds = _kinds(cell)
    usable = [record for record in records if record["usable"] and (choice.outcome == "all" or record["success"])]
    for record in usable:
        if record["task"] not in kinds:
            raise HarnessError(f"{cell.path}: skills.jsonl names task {record['task']!r}, episodes.parquet does not")
    updates = [record["update"] for record in records] or [0]
    origin = Origin(
        cell=name,
        env=config.env.id,
        method=method,
        policy=config.policy,
        seed=config.seed,
        updates=(min(updates), max(updates)),
        skills=len(records),
        usable=len(usable),
    )
    return [Written(config.env.id, kinds[record["task"]], name, record) for record in usable], origin


def _kinds(cell: CellDir) -> dict[str, str]:
    """Task id -> kind, from the cell's episodes."""
    episodes = read_episodes(cell)
    return dict(zip(episodes["task"], episodes["kind"], strict=True))


def _take(found: Iterable[Written], choice: Choice) -> list[Taken]:
    """The entries of every environment, then of its kinds, then of its tasks, in alphabetical order."""
    groups: defaultdict[Place, list[Written]] = defaultdict(list)
    for skill in found:
        for place in ((skill.env, None, None), (skill.env, skill.kind, None), (skill.env, None, skill.record["task"])):
            groups[place].append(skill)
    order = sorted(groups, key=lambda place: (place[0], place[2] is not None, place[1] or place[2] or ""))
    return [_best(place, groups[place], choice.most(place)) for place in order if choice.most(place)]


def _best(place: Place, skills: Sequence[Written], most: int) -> Taken:
    """The best supported texts of a group, at most ``most``."""
    same: defaultdict[str, list[Written]] = defaultdict(list)
    for skill in skills:
        same[normalised(skill.record["text"])].append(skill)

    def rank(key: str) -> tuple[int, int, int, str]:
        solved = {skill.record["task"] for skill in same[key] if skill.record["success"]}
        return -len(solved), -len({skill.record["task"] for skill in same[key]}), -len(same[key]), key

    entries = tuple(_entry(place, same[key]) for key in sorted(same, key=rank)[:most])
    return Taken(place, len(skills), len(same), entries)


def _entry(place: Place, skills: Sequence[Written]) -> Entry:
    """One skill in its most frequent wording, with the first episode that was told so."""
    wordings = Counter(skill.record["text"].strip() for skill in skills)
    text = min(wordings, key=lambda wording: (-wordings[wording], wording))
    first = next(skill for skill in skills if skill.record["text"].strip() == text)
    source = Source(
        cell=first.cell,
        **{name: first.record[name] for name in ("author", "update", "task", "attempt", "success")},
        tasks=len({skill.record["task"] for skill in skills}),
        episodes=len(skills),
        successes=sum(skill.record["success"] for skill in skills),
    )
    env, kind, task = place
    return Entry(env=env, kind=kind, task=task, text=plain(text), source=source)


# ------------------------------------------------------------------------------------------------- updates


def read_updates(text: str) -> tuple[int, int]:
    """``"stage1"``, ``"12"``, ``"1..40"`` or ``"stage1..40"`` as first and last update. Raises HarnessError."""
    first, _, last = text.partition("..")
    span = _update(first, text), _update(last or first, text)
    if span[0] > span[1]:
        raise HarnessError(f"--updates {text!r} ends before it begins")
    return span


def _update(word: str, text: str) -> int:
    if word == "stage1":
        return STAGE1
    if not word.isdecimal():
        raise HarnessError(f"--updates {text!r} is not an update or a span of them, e.g. stage1, 12 or 1..40")
    return int(word)


def spell(updates: tuple[int, int]) -> str:
    """The words that ``read_updates`` reads as these updates."""
    first, last = ("stage1" if update == STAGE1 else str(update) for update in updates)
    return first if first == last else f"{first}..{last}"


def _within(update: int, updates: tuple[int, int] | None) -> bool:
    return updates is None or updates[0] <= update <= updates[1]
