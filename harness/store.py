"""The store: one directory per cell, written so that a kill at any moment leaves something a later run can continue.

::

    DIR/recipe.yaml                 the resolved recipe
    DIR/cells/<hash>/config.json    CellConfig
                     manifest.json  provenance, protocol card, ledger; written last: without it the cell is unfinished
                     metrics.jsonl  one record per training update
                     evals.jsonl    one record per evaluation
                     skills.jsonl   one record per skill
                     episodes.jsonl one record per episode while running; episodes.parquet once finished
                     credit.jsonl   one record per step of detailed training episodes; credit.parquet once finished
                     pictures/      what the prompts of detailed episodes showed, by content
                     start/         weights of the method's start, where that is not the base
                     samples.pt     pairs of stage 1, where the method rehearses them
                     checkpoints/<update>/   while running; whatever the trainer put there, with checksums.json
                     policy/        final weights
                     adapter/       final adapters alone, where adapters were trained
                     error.txt      traceback of what ended the last run of an unfinished cell

Every file is replaced atomically; JSONL files only grow. A checkpoint states the checksums of its own files, of what
it builds on (``start/``, ``samples.pt``) and of every journal up to its length at that time. To resume is to take the
newest checkpoint of which all this holds and to cut the journals back to these lengths. A cell without training has no
checkpoints: it keeps every episode that was journaled.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.checksums import CHECKSUMS, Stated, beginning, checksum, checksums, difference, files
from harness.claim import Claim, claim
from harness.config import CellConfig
from harness.contracts import HarnessError
from harness.inert import readable

Record = dict[str, Any]

POLICY = "policy"
ADAPTER = "adapter"
"""Directory of a checkpoint or cell with the adapters alone, where those were trained."""
START = "start"
"""Directory of a cell with the weights of the method's start, where it is not the base."""
SAMPLES = "samples.pt"
"""File of a cell with the pairs of stage 1, where the method rehearses them."""
JOURNALS = ("metrics.jsonl", "evals.jsonl", "skills.jsonl", "episodes.jsonl", "credit.jsonl")
KEPT_CHECKPOINTS = 2
PARQUET = ("episodes", "credit")
"""Journals that become parquet files."""
FULL = 1 << 20
"""A disk with fewer free bytes than this counts as full."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the update after which it was written, where it lies, and how long each journal was."""

    update: int
    path: Path
    lengths: Mapping[str, int]


class CellDir:
    """The directory of one cell. Creating the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._claim = Claim(self.path)

    @property
    def finished(self) -> bool:
        """Whether the cell's manifest, the last file to be written, is there."""
        return (self.path / "manifest.json").is_file()

    # ------------------------------------------------------------------------------------------------ files

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cell for writing. Raises HarnessError if another process holds it.

        The lock dies with its process, so a killed run never blocks the next one.
        """
        with ExitStack() as stack:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._claim = stack.enter_context(claim(self.path))
            try:
                yield
            finally:
                self._claim = Claim(self.path)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically."""
        self._claim.check()
        write_json(self.path / name, value)

    def read_json(self, name: str) -> Any:
        """Parse a JSON file. Raises HarnessError where it is missing or broken."""
        return read_json(self.path / name)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append records to a JSONL file, one line each, and hand them to the operating system."""
        if not records:
            return
        self._claim.check()
        path = self.path / name
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_lines(records))

    def records(self, name: str, broken: Callable[[str], None] | None = None) -> list[Record]:
        """The records of a JSONL file; none where there is no file. A torn last line is left out.

        Any other broken line is told to ``broken`` and left out; without ``broken``, HarnessError names file and line.
        """
        path = self.path / name
        if not path.is_file():
            return []
        found = []
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):  # the rest is empty or torn
            try:
                found.append(json.loads(line))
            except ValueError as error:
                if broken is None:
                    raise HarnessError(f"{path}, line {number}: not JSON ({error})") from error
                broken(f"{path}, line {number}: not JSON")
        return found

    def rewrite(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace a JSONL file atomically."""
        self._claim.check()
        write_bytes(self.path / name, _lines(records).encode())

    # ------------------------------------------------------------------------------------------ checkpoints

    @contextmanager
    def checkpoint(self, update: int) -> Iterator[Path]:
        """A fresh directory to fill; on leaving it becomes checkpoint ``update`` in one step, older ones go.

        What was appended before is made durable first, so that no record is older than the checkpoint and missing.
        An exception leaves the earlier checkpoints as they were. Raises HarnessError where the disk is full.
        """
        target, temporary = self._checkpoints / str(update), self._checkpoints / f"{update}.{self._claim.name}.tmp"
        self._claim.check()
        with writing(target):
            journals = [name for name in JOURNALS if (self.path / name).is_file()]
            for name in journals:
                sync(self.path / name)
            for leftover in self._checkpoints.glob("*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
            yield temporary
            stated = {
                "files": checksums(temporary),
                "base": self._base(),
                "journals": {name: beginning(self.path / name) for name in journals},
            }
            write_json(temporary / CHECKSUMS, stated)
            for file in files(temporary):
                sync(temporary / file)
            self._claim.check()
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
            sync(self._checkpoints)
            # One that is newer than where the cell stands was found damaged when the cell was resumed.
            kept = [number for number in self._updates() if number <= update][-KEPT_CHECKPOINTS:]
            for old in set(self._updates()) - set(kept):
                shutil.rmtree(self._checkpoints / str(old))

    def latest_checkpoint(self, damaged: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint of which everything is as it was written; None where there is none.

        What is wrong with each newer one is told to ``damaged``, one line each.
        """
        for update in reversed(self._updates()):
            if not (problem := self._problem(update)):
                path = self._checkpoints / str(update)
                stated = Stated.model_validate(read_json(path / CHECKSUMS))
                return Checkpoint(update, path, {name: length for name, (length, _) in stated.journals.items()})
            damaged(problem)
        return None

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut the journals back to where they were at a checkpoint; None: to nothing."""
        self._claim.check()
        for name in JOURNALS:
            path, length = self.path / name, checkpoint.lengths.get(name, 0) if checkpoint else 0
            with writing(path):
                if not length:
                    path.unlink(missing_ok=True)
                elif path.stat().st_size > length:
                    os.truncate(path, length)

    def _problem(self, update: int) -> str:
        """What is wrong with a checkpoint, one line; empty where nothing is."""
        path = self._checkpoints / str(update)
        try:
            stated = Stated.model_validate(read_json(path / CHECKSUMS))
        except (HarnessError, ValidationError):
            return f"checkpoint {update} is damaged: {path / CHECKSUMS} cannot be read"
        journals = {name: beginning(self.path / name, length) for name, (length, _) in stated.journals.items()}
        found = (
            difference(path, stated.files, checksums(path))
            or difference(self.path, stated.base, self._base())
            or difference(self.path, stated.journals, journals)
        )
        return f"checkpoint {update} is damaged: {found}" if found else ""

    def _base(self) -> dict[str, str]:
        """SHA-256 of the files that were made before the first update and that every checkpoint builds on."""
        start = {f"{START}/{name}": value for name, value in checksums(self.path / START).items()}
        samples = self.path / SAMPLES
        return start | ({SAMPLES: checksum(samples)} if samples.is_file() else {})

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _updates(self) -> list[int]:
        return sorted(int(entry.name) for entry in self._checkpoints.glob("*") if entry.name.isdigit())

    # ------------------------------------------------------------------------------------------------- end

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Close the cell: long journals become parquet, the last checkpoint's ``policy/`` stays, its other state goes.

        The manifest is written last; a kill before it leaves a cell that resumes, a kill after it a finished one. It
        gets an entry ``files``, the SHA-256 of everything that readers rely on. Raises HarnessError where the last
        checkpoint is not as it was written.
        """
        self._claim.check()
        with writing(self.path):
            for name in PARQUET:
                self._to_parquet(name)
            if updates := self._updates():
                if problem := self._problem(updates[-1]):
                    raise HarnessError(f"{problem}; run the same command again to repeat what it held")
                for name in (POLICY, ADAPTER):
                    if (last := self._checkpoints / str(updates[-1]) / name).is_dir():
                        replace_tree(last, self.path / name)
            self.write_json("manifest.json", {**manifest, "files": self._results()})
        self.tidy()

    def tidy(self) -> None:
        """Delete what a finished cell has no use for; a kill may have come before that was done."""
        if not self.finished:
            return
        for name in PARQUET:
            (self.path / f"{name}.jsonl").unlink(missing_ok=True)
        shutil.rmtree(self._checkpoints, ignore_errors=True)

    def _results(self) -> dict[str, str]:
        """SHA-256 of the files that a report reads."""
        names = [*JOURNALS[:3], *(f"{name}.parquet" for name in PARQUET)]
        return {name: checksum(self.path / name) for name in names if (self.path / name).is_file()}

    def require_whole(self, manifest: Mapping[str, Any]) -> None:
        """Raise HarnessError where a finished cell's files are not those that its manifest states."""
        if "files" in manifest and (found := difference(self.path, manifest["files"], self._results())):
            raise HarnessError(f"{found}; restore it, or delete {self.path} and run again")

    def _to_parquet(self, name: str) -> None:
        records = self.records(f"{name}.jsonl")
        if not records:
            return
        import pyarrow
        import pyarrow.parquet

        number, numbers = pyarrow.float64(), pyarrow.list_(pyarrow.float64())
        typed = {  # where a method has no teacher, or no advantage, a column is all null
            "ids": pyarrow.list_(pyarrow.int64()),
            "tokens": pyarrow.list_(pyarrow.string()),
            "advantage": number,
            **dict.fromkeys(("logp", "teacher", "gate", "pull"), numbers),
        }
        columns = dict.fromkeys(column for record in records for column in record)
        table = pyarrow.table(
            {column: pyarrow.array([record.get(column) for record in records], typed.get(column)) for column in columns}
        )
        target = self.path / f"{name}.parquet"
        temporary = target.with_name(f"{target.name}.tmp")
        pyarrow.parquet.write_table(table, temporary, compression="zstd")
        sync(temporary)
        temporary.replace(target)


def _lines(records: Iterable[Mapping[str, Any]]) -> str:
    return readable("".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records))


# --------------------------------------------------------------------------------------------------- a run


def cell_dir(directory: Path, config: CellConfig) -> CellDir:
    """The directory of a cell within a run's directory."""
    return CellDir(directory / "cells" / config.hash)


def check_writable(directory: Path) -> None:
    """Raise HarnessError unless files can be created in ``directory`` (made if need be) and its disk has room."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    free = shutil.disk_usage(directory).free
    if free < 64 * FULL:
        raise HarnessError(f"cannot write to {directory}: only {free / FULL:.0f} MiB free, at least 64 needed")


# ------------------------------------------------------------------------------------------ atomic file work


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into one line for the user: full disk, no permission, read-only file system."""
    try:
        yield
    except shutil.Error as error:  # of a copied tree: (from, to, why) for each file that failed
        _, target, why = error.args[0][0]
        raise HarnessError(f"cannot write {target}: {why}") from error
    except OSError as error:
        raise HarnessError(f"cannot write {error.filename or path}: {error.strerror or error}") from error
    except HarnessError:
        raise
    except Exception as error:
        # Serialisers report a full disk with exceptions of their own; anything else passes unchanged.
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or _disk_is_full(path):
            raise HarnessError(f"cannot write {path}: {full}") from error
        raise


def _disk_is_full(path: Path) -> bool:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free < FULL


def sync(path: Path) -> None:
    """Force a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a kill it is the old one or the new one. Raises HarnessError."""
    if path.is_dir():
        raise HarnessError(f"cannot write {path}: it is a directory")
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically. Raises HarnessError."""
    write_bytes(path, readable(json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises HarnessError where it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {path}: {error}") from error


def replace_tree(source: Path, target: Path) -> None:
    """Copy a directory so that ``target`` is complete whenever it exists."""
    temporary = target.with_name(f"{target.name}.tmp")
    for leftover in (temporary, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    shutil.copytree(source, temporary)
    temporary.rename(target)
