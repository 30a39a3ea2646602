"""``harness skills``: skill libraries, and the audit of a cell's skills."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from harness.contracts import HarnessError
from harness.terminal import Terminal

EPILOG = """\
examples:
  harness skills list
  harness skills show general --env ALFWorld-v1
  harness skills export results/quick/cells/HASH --out mine.json
  harness skills audit results/quick/cells/HASH

A run reads the library that its recipe names; library=mine.json gives it another.
"""

EXPORT_EPILOG = """\
examples:
  harness skills export results/quick/cells/HASH --out mine.json
  harness skills export results/quick/cells/HASH --updates stage1 --per-kind 1 --per-task 1
  harness skills export results/five/cells/* --per-env 2 --per-kind 0 --from all

Skills of a level are ranked by the number of different tasks that they were solved on. A library is read whole: what
a task gets is every entry about its environment, its kind and itself, so keep the numbers small. Cells without skills
are passed over.
"""


def command(parser: argparse.ArgumentParser) -> None:
    """Skill libraries: list, show, build one from cells; and audit the skills of a cell."""
    from harness.audit import add_audit

    parser.epilog = EPILOG
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    text = "The libraries that come with the harness."
    listing = commands.add_parser("list", help=text, description=text)
    listing.set_defaults(run=_list)

    text = "The skills of a library."
    show = commands.add_parser("show", help=text, description=text)
    show.add_argument("library", metavar="LIBRARY", help="packaged name or JSON file")
    show.add_argument("--env", metavar="ID", help="only those of this environment")
    show.set_defaults(run=_show)

    text = "Build a library from the skills of finished cells."
    export = commands.add_parser(
        "export",
        help=text,
        description=text,
        epilog=EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("cells", nargs="+", type=Path, metavar="CELL", help="directory of a finished cell")
    export.add_argument("--out", type=Path, default=Path("library.json"), metavar="FILE", help="default library.json")
    export.add_argument("--name", metavar="NAME", help="name of the library (default: the file's)")
    export.add_argument("--per-env", type=int, default=0, metavar="N", help="entries per environment (default 0)")
    export.add_argument("--per-kind", type=int, default=3, metavar="N", help="entries per kind of task (default 3)")
    export.add_argument("--per-task", type=int, default=0, metavar="N", help="entries per task (default 0)")
    export.add_argument(
        "--from",
        dest="outcome",
        choices=["successes", "all"],
        default="successes",
        help="skills about which episodes (default successes)",
    )
    export.add_argument(
        "--updates", metavar="A..B", help="written at these updates, e.g. stage1 or 1..40 (default all)"
    )
    export.set_defaults(run=_export)

    add_audit(commands)


def _list(options: argparse.Namespace) -> int:
    from harness.library import load_library, packaged

    table = Table("library", "environments", "skills", "author", "summary", box=None)
    for name in packaged():
        library = load_library(name)
        envs = "\n".join(sorted({entry.env for entry in library.skills}))
        table.add_row(name, envs, str(len(library.skills)), library.provenance.author, library.summary)
    Terminal().print(table)
    return 0


def _show(options: argparse.Namespace) -> int:
    from harness.library import load_library
    from harness.skill_export import spell

    library = load_library(options.library)
    envs = {entry.env for entry in library.skills}
    if options.env is not None and options.env not in envs:
        known = ", ".join(sorted(envs))
        raise HarnessError(f"skill library {library.name!r} has no skill about {options.env!r}, only about {known}")
    console = Terminal(highlight=False)
    wrote = library.provenance
    command = f", exported with {wrote.command}" if wrote.command else ""
    console.print(f"{library.name}: {library.summary}", soft_wrap=True)
    console.print(f"written by {wrote.author}{command}; fingerprint {library.fingerprint[:16]}", soft_wrap=True)
    for origin in wrote.cells:
        console.print(
            f"cell {origin.cell}: {origin.env} {origin.method} {origin.policy} seed {origin.seed}, updates "
            f"{spell(origin.updates)}, {origin.usable} usable of {origin.skills} skills",
            soft_wrap=True,
        )
    table = Table("environment", "about", "skill", "support", box=None)
    for entry in library.skills:
        if options.env in (None, entry.env):
            support = entry.source.support if entry.source else "-"
            table.add_row(entry.env, about(entry.place), entry.text, support)
    console.print(table)
    return 0


def _export(options: argparse.Namespace) -> int:
    from harness.skill_export import Choice, export, read_updates
    from harness.store import write_json

    for name in ("per_env", "per_kind", "per_task"):
        if getattr(options, name) < 0:
            raise HarnessError(f"--{name.replace('_', '-')} must not be negative, got {getattr(options, name)}")
    choice = Choice(
        options.per_env,
        options.per_kind,
        options.per_task,
        options.outcome,
        None if options.updates is None else read_updates(options.updates),
    )
    library, taken = export(options.cells, options.name or options.out.stem, choice)
    write_json(options.out, library.model_dump(mode="json", exclude_none=True))
    table = Table("environment", "about", "usable skills", "different", "taken", box=None)
    for group in taken:
        if group.place[2] is None:
            numbers = (group.usable, group.distinct, len(group.entries))
            table.add_row(group.place[0], about(group.place), *map(str, numbers))
    for env in sorted({group.place[0] for group in taken if group.place[2]}):
        tasks = [group for group in taken if group.place[0] == env and group.place[2]]
        numbers = (
            sum(group.usable for group in tasks),
            sum(group.distinct for group in tasks),
            sum(len(group.entries) for group in tasks),
        )
        table.add_row(env, f"{len(tasks)} tasks", *map(str, numbers))
    Terminal().print(table)
    instances = library.provenance.instances
    print(f"{len(library.skills)} skills, {instances} of them name a numbered instance: {options.out}")
    return 0


def about(place: tuple[str, str | None, str | None]) -> str:
    """What an entry is about, in a word."""
    _, kind, task = place
    return f"task {task}" if task else kind or "all tasks"
