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
                     checkpoints/<update>/   while running; whatever the trainer put there, with checksums.json
                     policy/        final weights

Every file is replaced atomically; JSONL files only grow. What was appended after the last checkpoint is dropped on
resume with ``truncate``. A cell without training has no checkpoints: it keeps every episode that was journaled.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import CellConfig
from harness.contracts import HarnessError

Record = dict[str, Any]

CHECKSUMS = "checksums.json"
POLICY = "policy"
KEPT_CHECKPOINTS = 2
PARQUET = ("episodes", "credit")
"""Journals that become parquet files."""
FULL = 1 << 20
"""A disk with fewer free bytes than this counts as full."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the update after which it was written, and where it lies."""

    update: int
    path: Path


class CellDir:
    """The directory of one cell. Creating the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

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
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / "lock").open("a+")
        with handle:
            try:
                # A POSIX lock: unlike flock(2), forked environment workers do not inherit it.
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                handle.seek(0)
                holder = handle.read().strip() or "unknown"
                raise HarnessError(f"{self.path} is in use by another process (pid {holder})") from error
            with writing(self.path):
                handle.truncate(0)
                handle.write(str(os.getpid()))
                handle.flush()
            yield

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically."""
        write_json(self.path / name, value)

    def read_json(self, name: str) -> Any:
        """Parse a JSON file. Raises HarnessError where it is missing or broken."""
        return read_json(self.path / name)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append records to a JSONL file, one line each, and hand them to the operating system."""
        if not records:
            return
        path = self.path / name
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(_lines(records))

    def records(self, name: str) -> list[Record]:
        """The records of a JSONL file; none where there is no file. A torn last line is left out.

        Raises HarnessError naming file and line for any other broken line.
        """
        path = self.path / name
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")
        found = []
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or torn
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise HarnessError(f"{path}, line {number}: not JSON ({error})") from error
        return found

    def truncate(self, name: str, keep: Callable[[Record], bool]) -> None:
        """Rewrite a JSONL file atomically with only the records that ``keep`` accepts."""
        if (self.path / name).is_file():
            self.rewrite(name, [record for record in self.records(name) if keep(record)])

    def rewrite(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace a JSONL file atomically."""
        write_bytes(self.path / name, _lines(records).encode())

    # ------------------------------------------------------------------------------------------ checkpoints

    @contextmanager
    def checkpoint(self, update: int) -> Iterator[Path]:
        """A fresh directory to fill; on leaving it becomes checkpoint ``update`` in one step, older ones go.

        What was appended before is made durable first, so that no record is older than the checkpoint and missing.
        An exception leaves the earlier checkpoints as they were. Raises HarnessError where the disk is full.
        """
        target, temporary = self._checkpoints / str(update), self._checkpoints / f"{update}.tmp"
        with writing(target):
            for journal in self.path.glob("*.jsonl"):
                sync(journal)
            for leftover in self._checkpoints.glob("*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
            yield temporary
            write_json(temporary / CHECKSUMS, checksums(temporary))
            for file in files(temporary):
                sync(temporary / file)
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
            sync(self._checkpoints)
            for old in self._updates()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(self._checkpoints / str(old))

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None where there is none. Raises HarnessError where it is damaged."""
        updates = self._updates()
        if not updates:
            return None
        path = self._checkpoints / str(updates[-1])
        before = f"resume from update {updates[-2]}" if len(updates) > 1 else "start the cell anew"
        stored = read_json(path / CHECKSUMS) if (path / CHECKSUMS).is_file() else {CHECKSUMS: "missing"}
        found = checksums(path)
        for file in sorted(stored.keys() | found.keys()):
            if stored.get(file) != found.get(file):
                state = "missing" if file not in found else "damaged"
                raise HarnessError(f"checkpoint file {path / file} is {state}; delete {path} to {before}")
        return Checkpoint(updates[-1], path)

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _updates(self) -> list[int]:
        return sorted(int(entry.name) for entry in self._checkpoints.glob("*") if entry.name.isdigit())

    # ------------------------------------------------------------------------------------------------- end

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Close the cell: long journals become parquet, the last checkpoint's ``policy/`` stays, its other state goes.

        The manifest is written last; a kill before it leaves a cell that resumes, a kill after it a finished one.
        """
        with writing(self.path):
            for name in PARQUET:
                self._to_parquet(name)
            last = self.latest_checkpoint()
            if last and (last.path / POLICY).is_dir():
                replace_tree(last.path / POLICY, self.path / POLICY)
            self.write_json("manifest.json", manifest)
            for name in PARQUET:
                (self.path / f"{name}.jsonl").unlink(missing_ok=True)
            if self._checkpoints.is_dir():
                shutil.rmtree(self._checkpoints)

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
    return "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)


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
    except OSError as error:
        raise HarnessError(f"cannot write {error.filename or path}: {error.strerror or error}") from error
    except HarnessError:
        raise
    except Exception as error:
        # Serialisers report a full disk with exceptions of their own; anything else passes unchanged.
        if _disk_is_full(path):
            raise HarnessError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}") from error
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
    write_bytes(path, (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())


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


def files(directory: Path) -> list[str]:
    """Paths of all files below a directory, relative to it, sorted."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory except the list of checksums itself."""
    found = {}
    for name in files(directory):
        if name != CHECKSUMS:
            with (directory / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
