"""Passages and corpora: JSON lines ``{"id": ..., "contents": "\\"Title\\"\\ntext"}``, the record format of wiki-18."""

from __future__ import annotations

import hashlib
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from harness.contracts import HarnessError

Progress = Callable[[int, int], None]
"""Told how many units are done, and of how many."""


@dataclass(frozen=True)
class Passage:
    """A piece of text that a search may show."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one string, as corpora and retrieval servers write them."""
        return f'"{self.title}"\n{self.text}'


def passage(record: object) -> Passage:
    """Read ``{"id", "contents"}``; text without a line break has no title. Raises ValueError saying what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {type(record).__name__}")
    for field in ("id", "contents"):
        if field not in record:
            raise ValueError(f"no field {field!r}")
    name, contents = record["id"], record["contents"]
    if not isinstance(name, str | int) or not isinstance(contents, str):
        raise ValueError("'id' and 'contents' must be strings")
    title, line_break, text = contents.partition("\n")
    if not line_break:
        return Passage(str(name), "", contents)
    quoted = len(title) > 1 and title[0] == title[-1] == '"'
    return Passage(str(name), title[1:-1] if quoted else title, text)


@dataclass(frozen=True)
class Scan:
    """What one pass over a corpus file finds out.

    Attributes:
        sha256: Hash of the whole file (hex).
        offsets: Byte at which each passage's line begins, then the file's size; shape (passages + 1,), int64.
    """

    sha256: str
    offsets: NDArray[np.int64]


class Corpus(Sequence[Passage]):
    """The passages of a file, mapped into memory and parsed when asked for: their text takes no room in the process."""

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        position = range(len(self))[index]
        return passage(json.loads(self._bytes[self._offsets[position] : self._offsets[position + 1]]))


def read(path: Path, take: Callable[[Passage], None], progress: Progress) -> Scan:
    """Hand every passage of a file to ``take``, in order; blank lines are skipped.

    Raises HarnessError naming file and line for a line that is no passage or repeats an id, and for an empty file.
    """
    seen: set[str] = set()
    starts: list[int] = []
    whole, position = hashlib.sha256(), 0
    for number, line in enumerate(lines(path, progress), start=1):
        whole.update(line)
        if line.strip():
            try:
                found = passage(json.loads(line.decode()))
            except UnicodeDecodeError as error:
                raise HarnessError(f"{path}, line {number}: not UTF-8 ({error.reason})") from error
            except ValueError as error:
                raise HarnessError(f"{path}, line {number}: {_wrong(error)}") from error
            if found.id in seen:
                raise HarnessError(f"{path}, line {number}: id {found.id!r} occurs twice")
            seen.add(found.id)
            starts.append(position)
            take(found)
        position += len(line)
    if not starts:
        raise HarnessError(f"{path}: holds no passage")
    return Scan(whole.hexdigest(), np.array([*starts, position], dtype=np.int64))


def _wrong(error: ValueError) -> str:
    return f"not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


def sha256(path: Path, progress: Progress) -> str:
    """Hash of a file (hex)."""
    whole = hashlib.sha256()
    for line in lines(path, progress):
        whole.update(line)
    return whole.hexdigest()


def lines(path: Path, progress: Progress) -> Iterator[bytes]:
    """Lines of a file with their line breaks; progress counts bytes. Raises HarnessError if it cannot be read."""
    done = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            for number, line in enumerate(file):
                yield line
                done += len(line)
                if number % 1000 == 0:
                    progress(done, total)
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}") from error


class Ticker:
    """Says how far a long piece of work is, at most every ``interval`` seconds: ``what: 34 %, about 12 s left``."""

    def __init__(self, what: str, say: Callable[[str], None], interval: float = 5.0) -> None:
        self.what, self.say, self.interval = what, say, interval
        self.began = self.said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done and now - self.said >= self.interval:
            self.said = now
            left = (now - self.began) * (total - done) / done
            self.say(f"{self.what}: {done / total:.0%}, about {left:.0f} s left")
