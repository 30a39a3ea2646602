"""The skills page of a cell: every skill with its provenance, counts per update, and the audit where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from harness.contracts import HarnessError
from harness.reporting.frames import Cell, skills_of
from harness.reporting.site import write_chunks, write_page
from harness.reporting.site_episodes import MOST_CHARACTERS, coded, number, skill_phase
from harness.store import Record, read_json

AUDIT = "audit.json"
"""Written into a cell by ``harness skills audit``."""
AUDIT_PARTS = frozenset({"updates", "drift", "outcomes", "shuffle", "usefulness", "missing"})
MOST_ANSWERS = 500
"""Raw answers in one chunk, at most."""


def write_skill_page(cell: Cell, run: Path) -> str | None:
    """Write a cell's skills page and its data; returns the page's path within the run, None without skills.

    ``#7`` behind its address opens the skill of that row of ``skills.jsonl``, ``#?update=20&usable=no`` lists the
    skills that are so. Raises HarnessError where a file is broken.
    """
    skills = skills_of([cell])
    if skills.empty:
        return None
    name, path = f"{cell.id}.skills", f"report/skills/{cell.id}.html"
    write_chunks(run, name, skill_index(skills), answer_chunks(skills))
    write_page(
        run,
        path,
        "skills.html.j2",
        f"{cell.title} · skills",
        [(cell.title, f"report/cells/{cell.id}.html")],
        name=name,
        total=len(skills),
        usable=int(skills["usable"].sum()),
        episodes=f"report/episodes/{cell.id}.html",
        updates=counts(skills),
        audit=_audit(cell.store.path / AUDIT),
        command=f"harness skills audit {cell.store.path}",
    )
    return path


def _audit(path: Path) -> Record | None:
    """What ``harness skills audit`` found; None where it was not asked. Raises HarnessError for another file."""
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not AUDIT_PARTS.issubset(found):
        raise HarnessError(f"{path} is not an audit; `harness skills audit {path.parent}` writes it again")
    return found


def skill_index(skills: pd.DataFrame) -> Record:
    """All skills in the order of the journal, one list per property; texts as in ``episode_index``.

    ``words`` counts a text's words; ``copies`` the usable skills with the very same text, ``first`` whether it is the
    first of them.
    """
    usable = skills["usable"].astype(bool)
    copies = skills[usable].groupby("text")["text"].transform("size").reindex(skills.index, fill_value=0)
    return {
        **{name: coded(skills[name]) for name in ("text", "summary", "author", "task")},
        **{name: [number(v) for v in skills[name]] for name in ("update", "attempt")},
        "phase": coded(skill_phase(skills)),
        **{name: skills[name].astype(int).tolist() for name in ("success", "usable")},
        "words": [len(text.split()) for text in skills["text"]],
        "copies": copies.tolist(),
        "first": (usable & ~skills["text"].where(usable).duplicated()).astype(int).tolist(),
    }


def answer_chunks(skills: pd.DataFrame) -> Iterator[tuple[int, list[str]]]:
    """The authors' raw answers in order: (row of the first, answers), each exactly once."""
    chunk: list[str] = []
    start = characters = 0
    for row, raw in enumerate(skills["raw"].astype(str)):
        chunk.append(raw)
        characters += len(raw)
        if len(chunk) == MOST_ANSWERS or characters > MOST_CHARACTERS:
            yield start, chunk
            chunk, start, characters = [], row + 1, 0
    if chunk:
        yield start, chunk


def counts(skills: pd.DataFrame) -> list[Record]:
    """Per update: how many skills, and the shares of usable, of distinct (among the usable) and after a success."""
    found = []
    for update, group in skills.groupby("update"):
        usable = group[group["usable"].astype(bool)]
        found.append(
            {
                "update": update,
                "skills": len(group),
                "usable": len(usable) / len(group),
                "distinct": usable["text"].nunique() / max(len(usable), 1),
                "words": sum(len(text.split()) for text in usable["text"]) / len(usable) if len(usable) else None,
                "success": float(group["success"].mean()),
            }
        )
    return found
