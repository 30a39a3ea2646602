"""``harness verify CELL``: run a finished cell again and compare everything it left, bit for bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from harness.contracts import HarnessError
from harness.terminal import Terminal

if TYPE_CHECKING:
    from harness.config import CellConfig
    from harness.store import CellDir, Record

EPILOG = """\
examples:
  harness verify results/quick/cells/HASH
  harness verify results/quick/cells/* --jobs 2

Every part of a cell is compared: protocol, evaluations, updates, skills, episodes, credit, pictures, weights; clocks
are not. The re-run is deleted afterwards. Exit codes: 0 equal, 1 different, 2 a cell cannot be run again.
"""

CLOCKS = ("wall_seconds", "cpu_seconds")
"""Ledger entries that no two runs share."""
SHOWN = 60
"""Characters shown of a differing value."""


@dataclass(frozen=True)
class Part:
    """One part of a cell: how much there is of it, and the first difference to the re-run; empty where equal."""

    name: str
    size: str
    difference: str


def command(parser: argparse.ArgumentParser) -> None:
    """Run finished cells again and compare everything they left, bit for bit."""
    parser.epilog = EPILOG
    parser.add_argument("cells", nargs="+", type=Path, metavar="CELL", help="directory of a finished cell")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells run at once (default 1)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise HarnessError(f"--jobs must be at least 1, not {options.jobs}")
    return verify(options.cells, options.jobs, Terminal(highlight=False), Terminal(stderr=True))


def verify(paths: Iterable[Path], jobs: int, console: Console, progress: Console) -> int:
    """Verify cells, printing one line per part; returns the exit code.

    Raises HarnessError, before anything runs, where a cell cannot be run again.
    """
    from harness.records import finished_cell
    from harness.runner import here, load_play, run_cells
    from harness.store import cell_dir

    cells = [finished_cell(path) for path in paths]
    for cell, config in cells:
        cell.read_json("manifest.json")  # a broken cell is told before it is run again
        require_repeatable(cell, config)
    with tempfile.TemporaryDirectory(prefix="harness-verify-") as name:
        again = Path(name)
        unique = {config.hash: config for _, config in cells}
        failures = run_cells(list(unique.values()), here(again, jobs, load_play), 0, progress)
        different = False
        for cell, config in cells:
            console.print(Text.assemble((str(cell.path), "bold"), f"  {config.title}"), soft_wrap=True)
            repeated = cell_dir(again, config)
            if not repeated.finished:
                continue
            parts = compare(cell, repeated)
            different |= any(part.difference for part in parts)
            for part in parts:
                mark, text = (("✗", "red"), part.difference) if part.difference else (("✓", "green"), "equal")
                console.print(Text.assemble("  ", mark, f" {part.name:<12} {part.size:<14}  {text}"), soft_wrap=True)
            for note in changes(cell, repeated) if any(part.difference for part in parts) else ():
                console.print(f"  {note}", markup=False, soft_wrap=True)
    for failure in failures:
        console.print(f"cannot run again: {failure.title}: {failure.cause}", markup=False, soft_wrap=True)
    return 2 if failures else int(different)


def require_repeatable(cell: CellDir, config: CellConfig) -> None:
    """Raise HarnessError where a cell cannot be run again: an endpoint answered in it, or its inputs have changed."""
    from harness.annotators import SCRIPTED
    from harness.policy.api import PREFIX

    endpoints = [name for name in (config.policy, config.teacher) if name.startswith(PREFIX)]
    annotators = [section.annotator for section in (config.stage1, config.analysis) if section]
    endpoints += [name for name in annotators if name not in ("", SCRIPTED)]
    if endpoints:
        raise HarnessError(f"{cell.path} cannot be verified: {endpoints[0]} is an endpoint and need not repeat itself")
    if config.engine.kind != "local":
        raise HarnessError(f"{cell.path} cannot be verified: {config.engine.kind} need not repeat what it sampled")
    for what, name, recorded, fingerprint in _inputs(config):
        if recorded and (found := fingerprint(name)) != recorded:
            raise HarnessError(
                f"{cell.path} cannot be verified: {what} {name!r} has changed since"
                f" (fingerprint {recorded[:12]}, now {found[:12]})"
            )


def _inputs(config: CellConfig) -> list[tuple[str, str, str, Callable[[str], str]]]:
    """What a cell was made from: what it is, its name, the recorded fingerprint, and how to take it again."""
    from harness.library import fingerprint_of
    from harness.policy.load import check_policy_spec

    return [
        ("policy", config.policy, config.policy_fingerprint, check_policy_spec),
        ("teacher", config.teacher, config.teacher_fingerprint, check_policy_spec),
        ("library", config.library, config.library_fingerprint, fingerprint_of),
    ]


# -------------------------------------------------------------------------------------------------- comparison


def compare(ours: CellDir, theirs: CellDir) -> list[Part]:
    """Compare what two finished cells left, part by part; parts that neither has are left out."""
    parts = []
    for name, read in PARTS.items():
        first, second = read(ours), read(theirs)
        if first or second:
            parts.append(Part(name, f"{len(first)} {UNITS.get(name, 'records')}", difference(first, second)))
    return parts


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """The first difference between two JSON values: the place in the first, and both values; empty where equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            place = f"{where}.{key}" if where else str(key)
            if key in CLOCKS:
                continue
            if key not in ours or key not in theirs:
                return f"{place}: only {'the cell' if key in ours else 'the re-run'} has it"
            if found := difference(ours[key], theirs[key], place):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if found := difference(a, b, f"{where}[{number}]{_name(a) if not where else ''}"):
                return found
        return "" if len(ours) == len(theirs) else f"{where or 'records'}: {len(ours)} / {len(theirs)} entries"
    nan = ours != ours and theirs != theirs  # the gradient norm of a step that was skipped
    same = type(ours) is type(theirs) and (ours == theirs or nan)
    return "" if same else f"{where}: {_short(ours)} / {_short(theirs)}"


def _name(record: Any) -> str:
    """What a reader finds a record by."""
    if not isinstance(record, dict):
        return ""
    known = [f"{key} {record[key]}" for key in ("phase", "update", "task", "attempt", "step") if key in record]
    return f" ({', '.join(known)})" if known else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def changes(ours: CellDir, theirs: CellDir) -> list[str]:
    """What else is different about two runs and may be the reason: code revision, libraries, processor."""
    first, second = (cell.read_json("manifest.json") for cell in (ours, theirs))
    pairs = {
        "harness revision": (first.get("git"), second.get("git")),
        "processor": (first.get("machine", {}).get("cpu"), second.get("machine", {}).get("cpu")),
    }
    versions = first.get("versions", {}), second.get("versions", {})
    pairs |= {name: (versions[0].get(name), versions[1].get(name)) for name in sorted(versions[0] | versions[1])}
    return [f"{name}: {a} then, {b} now" for name, (a, b) in pairs.items() if a != b]


# ------------------------------------------------------------------------------------------------------- parts


def _protocol(cell: CellDir) -> Record:
    manifest = cell.read_json("manifest.json")
    return {name: manifest.get(name) for name in ("protocol", "panel", "train_panel")}


def _table(cell: CellDir, name: str) -> list[Record]:
    """The rows of a parquet file, traces taken apart; none where there is no file."""
    from harness.records import read_table, read_trace

    table = read_table(cell, name)
    rows: list[Record] = [] if table is None else table.to_pylist()
    return [{**row, "trace": read_trace(row["trace"])} if "trace" in row else row for row in rows]


def _checksums(directory: Path, suffix: str) -> Record:
    from harness.checksums import checksums

    return {name: digest for name, digest in checksums(directory).items() if name.endswith(suffix)}


PARTS: dict[str, Callable[[CellDir], Any]] = {
    "protocol": _protocol,
    "evaluations": lambda cell: cell.records("evals.jsonl"),
    "updates": lambda cell: cell.records("metrics.jsonl"),
    "skills": lambda cell: cell.records("skills.jsonl"),
    "episodes": lambda cell: _table(cell, "episodes"),
    "credit": lambda cell: _table(cell, "credit"),
    "pictures": lambda cell: _checksums(cell.path / "pictures", ".png"),
    "weights": lambda cell: _checksums(cell.path / "policy", ".safetensors"),
}
"""What a finished cell consists of, and how to read it as JSON values."""
UNITS = {"protocol": "fields", "pictures": "files", "weights": "files"}
