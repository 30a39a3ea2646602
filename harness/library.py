"""Skill libraries: static texts that methods put into prompts, about an environment, a kind of task or a single task.

A library is a JSON file; ``docs/skill-libraries.md`` shows one. Nothing is cut or ranked when it is read: what a task
gets is every entry that is about it. How many there are per environment, kind and task is decided when the library is
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from harness.contracts import IMAGE_PLACEHOLDER, HarnessError, Task, digest
from harness.methods import Frozen
from harness.registry import find_file, packaged_files
from harness.validation import validate

Place = tuple[str, str | None, str | None]
"""What a skill is about: an environment, and a kind of its tasks or one task."""


class Source(Frozen):
    """The episode that an entry was first written about, and how much support the text had."""

    cell: str = Field("", description="hash of the cell")
    author: str = Field("", description="policy, scripted, or an endpoint's model name")
    update: int | None = Field(None, description="update after which it was written; -1 in stage 1")
    task: str = Field("", description="id of the task")
    attempt: int | None = None
    success: bool | None = None
    tasks: int | None = Field(None, ge=1, description="how many different tasks brought this text forth")
    episodes: int | None = Field(None, ge=1, description="how many episodes")
    successes: int | None = Field(None, ge=0, description="how many of these succeeded")

    @property
    def support(self) -> str:
        """How much support the text had, in words; "-" where nobody counted."""
        return f"{self.successes} of {self.episodes} episodes, {self.tasks} tasks" if self.episodes else "-"


class Entry(Frozen):
    """One skill. Without kind and task it is about the whole environment."""

    env: str = Field(min_length=1, description="id of the environment, e.g. ALFWorld-v1")
    kind: str | None = Field(None, min_length=1, description="kind of task it is about, as in Task.kind")
    task: str | None = Field(None, min_length=1, description="id or fingerprint of the one task it is about")
    text: str
    source: Source | None = None

    @field_validator("text")
    @classmethod
    def _readable(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("a skill needs a text")
        if IMAGE_PLACEHOLDER in text:
            raise ValueError(f"a skill carries no image: spell {IMAGE_PLACEHOLDER} out")
        return text

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        if self.kind is not None and self.task is not None:
            raise ValueError("a skill is about a kind or about a task: leave one of the two out")
        return self

    @property
    def place(self) -> Place:
        return self.env, self.kind, self.task


class Origin(Frozen):
    """A cell that skills were taken from."""

    cell: str
    env: str
    method: str
    policy: str
    seed: int
    updates: tuple[int, int] = Field(description="first and last update looked at; -1 is stage 1")
    skills: int = Field(ge=0, description="skills on record in these updates")
    usable: int = Field(ge=0, description="those that could be read and came from the chosen episodes")


class Provenance(Frozen):
    """Where a library comes from."""

    author: str = Field(min_length=1, description="hand-written, policy, scripted, a model's name, ...")
    harness: str = Field("", description="version of the harness that exported it")
    command: str = Field("", description="the settings of the export")
    instances: int = Field(0, ge=0, description="entries that name a numbered instance, e.g. drawer 3")
    cells: tuple[Origin, ...] = ()


class Library(Frozen):
    """A skill library."""

    format: Literal["skill-library-1"] = "skill-library-1"
    name: str = Field(min_length=1)
    summary: str = ""
    provenance: Provenance
    skills: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        first: dict[tuple[object, ...], int] = {}
        for number, entry in enumerate(self.skills):
            key = (entry.place, normalised(entry.text))
            if first.setdefault(key, number) != number:
                raise ValueError(f"skills.{number} repeats skills.{first[key]} ({entry.text[:60]!r})")
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that a prompt can hold of the library; its name and provenance change no number."""
        return digest([[*entry.place, entry.text] for entry in self.skills])

    @cached_property
    def _texts(self) -> dict[Place, list[str]]:
        texts: dict[Place, list[str]] = {}
        for entry in self.skills:
            texts.setdefault(entry.place, []).append(entry.text.strip())
        return texts

    def skill_for(self, task: Task) -> str:
        """What a prompt for a task holds: the skills of its environment, of its kind, then its own, one a line.

        Within a level the order is the file's, and no text stands twice; "" where there is none.
        """
        places: list[Place] = [
            (task.env, None, None),
            (task.env, task.kind, None),
            (task.env, None, task.id),
            (task.env, None, task.fingerprint),
        ]
        return "\n".join(dict.fromkeys(text for place in places for text in self._texts.get(place, ())))

    def require(self, env_id: str, tasks: Iterable[Task]) -> None:
        """Raise HarnessError unless every task has a skill, and one beyond the environment's where kinds have some.

        A library with skills for kinds of an environment is meant to be read by kind: a kind without one is an
        oversight that general skills would hide.
        """
        known = {entry.env for entry in self.skills}
        if env_id not in known:
            raise HarnessError(
                f"skill library {self.name!r} has no skill for {env_id}, only for {', '.join(sorted(known))}"
            )
        kinds = sorted({kind for env, kind, _ in self._texts if env == env_id and kind})
        general = bool(self._texts.get((env_id, None, None))) and not kinds
        bare = [
            task
            for task in tasks
            if not general
            and task.kind not in kinds
            and (env_id, None, task.id) not in self._texts
            and (env_id, None, task.fingerprint) not in self._texts
        ]
        if bare:
            missing = ", ".join(sorted({repr(task.kind) for task in bare}))
            has = f"kinds {', '.join(map(repr, kinds))}" if kinds else "other tasks"
            raise HarnessError(
                f"skill library {self.name!r} has no skill for {len(bare)} tasks of {env_id}, kinds {missing}; "
                f"it has some for {has}"
            )


def normalised(text: str) -> str:
    """A text without differences of white space and case."""
    return " ".join(text.split()).casefold()


def packaged() -> dict[str, Path]:
    """The libraries that come with the harness, by name."""
    return packaged_files("libraries", ".json")


def load_library(spec: str) -> Library:
    """Read a library, packaged or from a ``.json`` file.

    Raises HarnessError, one line with file and entry, for anything that does not fit.
    """
    path = find_file("skill library", spec, packaged())
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(data, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair, a prompt cannot hold it
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path} is not a JSON file: {error}") from error
    return validate(Library, data, str(path))


def fingerprint_of(spec: str) -> str:
    """The fingerprint of the library that a recipe names."""
    return load_library(spec).fingerprint
