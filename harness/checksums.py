"""What files hold, told by SHA-256, so that damage is found before anything is built on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CHECKSUMS = "checksums.json"
"""The file that states the checksums of a directory; it is not one of its own."""

Beginning = tuple[int, str]
"""How long a file that only grows was, in bytes, and the SHA-256 of that much of it."""

BLOCK = 1 << 20


class Stated(BaseModel):
    """What a checkpoint states about its own files, about what it builds on, and about the journals."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, str]
    base: dict[str, str]
    journals: dict[str, Beginning]


def files(directory: Path) -> list[str]:
    """Paths of all files below a directory, relative to it, sorted."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory except the list of checksums itself."""
    return {name: checksum(directory / name) for name in files(directory) if name != CHECKSUMS}


def checksum(path: Path, length: int | None = None) -> str:
    """SHA-256 of a file, or of its first ``length`` bytes; large files that did not change are read once."""
    state = path.stat()
    return _checksum(path, state.st_size if length is None else length, state.st_ino, state.st_mtime_ns)


@lru_cache(maxsize=256)
def _checksum(path: Path, length: int, *_: int) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while length > 0 and (block := file.read(min(length, BLOCK))):
            total.update(block)
            length -= len(block)
    return total.hexdigest()


def beginning(path: Path, length: int | None = None) -> Beginning | None:
    """A file as it is, or its first ``length`` bytes as far as they are there; None without the file."""
    if not path.is_file():
        return None
    there = path.stat().st_size
    length = there if length is None else min(length, there)
    return length, checksum(path, length)


def difference(place: Path, wanted: Mapping[str, object], found: Mapping[str, object]) -> str:
    """The first file in ``place`` that is not as it was written, and how; empty where all are."""
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            return f"{place / name} is {'missing' if found.get(name) is None else 'not as it was written'}"
    return ""
