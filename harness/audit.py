"""``harness skills audit CELL``: can the skills of a trained cell be trusted, and do they pull the right way?

What the journal answers is in ``harness.audit_journal``, what takes the cell's policy in ``harness.audit_policy``;
``docs/skill-audit.md`` says what each number means. The result is printed and kept as ``audit.json`` in the cell.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from harness.contracts import HarnessError
from harness.terminal import Terminal

if TYPE_CHECKING:
    from harness.progress import Progress

FORMAT = "skill-audit-1"
EPILOG = """\
examples:
  harness skills audit results/quick/cells/HASH
  harness skills audit results/quick/cells/HASH --episodes 200 --tasks 200

Reads the journal, then asks the policy as RL found it (where a start was prepared) and as RL left it: the shuffle test
scores kept training episodes again, the test of usefulness plays training tasks. Both are sized by the options; more of
them narrow the intervals.
"""
ROWS = 12
"""Updates shown on the terminal; the file has all."""


def add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to those of ``harness skills``."""
    text = "Audit the skills of a finished cell: form, leaks, sign agreement, shuffle test, usefulness."
    parser = commands.add_parser(
        "audit", help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cell", type=Path, metavar="CELL", help="directory of a finished training cell")
    parser.add_argument("--episodes", type=int, default=64, metavar="N", help="of the shuffle test (default 64)")
    parser.add_argument("--tasks", type=int, default=64, metavar="N", help="of the test of usefulness (default 64)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from harness.progress import Board
    from harness.records import finished_cell

    for name, value in (("--episodes", options.episodes), ("--tasks", options.tasks)):
        if value < 1:
            raise HarnessError(f"{name} must be at least 1, not {value}")
    cell, config = finished_cell(options.cell)
    with Board({config.hash: config.title}, 0, Terminal(stderr=True)) as board:
        found = audit(options.cell, options.episodes, options.tasks, lambda progress: board.show(config.hash, progress))
    show(found, Terminal())
    print(f"audit: {cell.path / 'audit.json'}")
    return 0


def audit(path: Path, episodes: int, tasks: int, report: Callable[[Progress], None]) -> dict[str, Any]:
    """Audit a finished cell and write ``audit.json`` into it; returns what was written.

    A part that the cell cannot answer is null, and ``missing`` says why.

    Args:
        episodes: Detailed training episodes of the shuffle test, the latest ones.
        tasks: Training tasks of the test of usefulness.

    Raises:
        HarnessError: No finished training cell there, or its journal is broken.
    """
    import torch

    from harness.audit_journal import Unmeasurable, audit_updates, drifts, episode_shifts, outcomes, written_skills
    from harness.audit_policy import shuffle_test, usefulness
    from harness.cell import Session
    from harness.policy.load import load_local
    from harness.preparation import local
    from harness.records import finished_cell
    from harness.store import START

    cell, config = finished_cell(path)
    if config.method is None or config.train is None or not config.method.trains:
        raise HarnessError(f"{path} is an evaluation: nothing was trained, so there are no skills to audit")
    torch.set_num_threads(1)  # as in training: faster for a small model, and reproducible
    train = config.train
    session = Session.open(config.model_copy(update={"policy": str(path)}), cell, report, workers=1)
    try:
        policies = {"start": load_local(str(path / START))} if (path / START).is_dir() else {}
        policies["final"] = local(session.policy)
        panel = session.env.panel("train", train.panel_size)
        skills, shifts = written_skills(cell), episode_shifts(cell)
        audited = cache(partial(audit_updates, skills, shifts, session.env, panel))
        progress = partial(session.tell, "audit: shuffle test")
        parts: dict[str, Callable[[], Any]] = {
            "updates": audited,
            "drift": lambda: drifts(audited()),
            "outcomes": lambda: outcomes(shifts),
            "shuffle": lambda: [
                shuffle_test(weights, policy, cell, skills, episodes, train.temperature, progress)
                for weights, policy in policies.items()
            ],
            "usefulness": lambda: [
                row
                for weights, policy in policies.items()
                for row in usefulness(weights, policy, session, panel, tasks)
            ],
        }
        found: dict[str, Any] = {"format": FORMAT, **dict.fromkeys(parts), "missing": {}}
        for part, measure in parts.items():
            try:
                found[part] = _plain(measure())
            except Unmeasurable as reason:
                found["missing"][part] = str(reason)
    finally:
        session.pool.close()
        session.env.close()
    cell.write_json("audit.json", found)
    return found


def _plain(value: Any) -> Any:
    """Dataclasses and lists of them as JSON values, with None in place of NaN."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# ------------------------------------------------------------------------------------------------ the terminal


def show(found: dict[str, Any], console: Console) -> None:
    """Print an audit as tables."""
    for table in tables(found):
        console.print(table)
        console.print()
    for part, reason in found["missing"].items():
        console.print(f"not measured: {part}: {reason}", highlight=False, markup=False)


def tables(found: dict[str, Any]) -> list[Table]:
    """The tables of an audit's parts, as far as they were measured."""
    made: dict[str, Callable[[Any], Table]] = {
        "updates": _updates,
        "drift": _drift,
        "outcomes": _outcomes,
        "shuffle": _shuffle,
        "usefulness": _usefulness,
    }
    return [table(found[part]) for part, table in made.items() if found[part] is not None]


def _updates(updates: list[dict[str, Any]]) -> Table:
    shares = ("parse_rate", "duplicates", "repeated", "instances", "leaks")
    columns = ("skills", "parsed", *shares[1:], "words", "shift")
    table = _table("skills by update (-1: stage 1; shares in %)", "update", *columns)
    step = max(1, math.ceil(len(updates) / ROWS))
    for row in updates[::-1][::step][::-1]:  # the last one always
        numbers = [percent(row[name]) for name in shares]
        table.add_row(str(row["update"]), str(row["skills"]), *numbers, plain(row["words"]), nats(row["shift"]))
    return table


def _drift(drift: list[dict[str, Any]]) -> Table:
    table = _table("drift during RL (shares in %)", "quantity", "first third", "last third")
    for row in drift:
        show = {"words": plain, "shift": nats}.get(row["quantity"], percent)
        table.add_row(row["quantity"].replace("parse_rate", "parsed"), show(row["first"]), show(row["last"]))
    return table


def _outcomes(outcomes: list[dict[str, Any]]) -> Table:
    columns = ("episodes", "sign agrees, %", "shift, nats per token")
    table = _table("the teacher's shift by outcome (training episodes)", "outcome", *columns)
    for row in outcomes:
        numbers = estimate(row["agreement"], percent), estimate(row["gap"], nats)
        table.add_row(row["outcome"], str(row["episodes"]), *numbers)
    return table


def _shuffle(rows: list[dict[str, Any]]) -> Table:
    columns = ("episodes", "own skill", "another's", "difference")
    table = _table("shuffle test: shift, nats per token", "weights", *columns)
    for row in rows:
        shifts = [estimate(row[name], nats) for name in ("own", "other", "difference")]
        table.add_row(row["weights"], str(row["episodes"]), *shifts)
    return table


def _usefulness(rows: list[dict[str, Any]]) -> Table:
    columns = ("after", "tasks", "parsed", "without", "with", "difference")
    table = _table("success without and with the own skill, %", "weights", *columns)
    for row in rows:
        rates = [estimate(row[name], percent) for name in ("without", "given", "difference")]
        table.add_row(row["weights"], row["after"], str(row["tasks"]), percent(row["parse_rate"]), *rates)
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def estimate(value: dict[str, float | None], write: Callable[[float | None], str]) -> str:
    """A value with its interval, where there is one."""
    interval = "" if value["low"] is None else f" [{write(value['low'])}, {write(value['high'])}]"
    return f"{write(value['value'])}{interval}"


def percent(value: float | None) -> str:
    """A share, or a difference of shares, times 100."""
    return "-" if value is None else f"{100 * value:.1f}"


def plain(value: float | None) -> str:
    """A number to one decimal."""
    return "-" if value is None else f"{value:.1f}"


def nats(value: float | None) -> str:
    """A shift in nats, with its sign."""
    return "-" if value is None else f"{value:+.3f}"
