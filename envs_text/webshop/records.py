"""Reads the records of JSON files that may be larger than memory, and knows where in the file each one stands."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any, BinaryIO

from harness.contracts import HarnessError

CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = JSONDecoder()


@dataclass(frozen=True)
class Position:
    """A place between two records: bytes and lines before it, and how many records."""

    offset: int = 0
    line: int = 1
    number: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One element of an array, or one entry of an object.

    Attributes:
        key: The entry's key; empty in an array.
        line: 1-based line on which it starts.
        after: The position behind it, from which reading can go on.
    """

    path: Path
    key: str
    value: Any
    line: int
    after: Position

    def error(self, message: str) -> HarnessError:
        return HarnessError(f"{self.path}, line {self.line} (record {self.after.number}): {message}")

    def strings(self, value: Any, name: str) -> tuple[str, ...]:
        """``value`` as texts; raises HarnessError, with ``name``, if it is not a list of texts."""
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{name} must be a list of texts, not {_brief(value)}")
        return tuple(value)

    def string(self, fields: Any, name: str) -> str:
        """The text in a field of an object; raises HarnessError where it is missing or no text."""
        value = self.field(fields, name)
        if not isinstance(value, str):
            raise self.error(f"field {name!r} must be a text, not {_brief(value)}")
        return value

    def field(self, fields: Any, name: str) -> Any:
        """A field of an object; raises HarnessError where it is missing."""
        if not isinstance(fields, dict):
            raise self.error(f"an object with a field {name!r} is needed, not {_brief(fields)}")
        if name not in fields:
            raise self.error(f"field {name!r} is missing")
        return fields[name]


def stream(path: Path, start: Position | None = None) -> Iterator[Record]:
    """The records of a file that holds one JSON array or one JSON object, in order.

    Args:
        start: Where to go on in an array; the beginning if not given.

    Raises:
        HarnessError: The file cannot be read, is cut short or is not JSON; names the line.
    """
    try:
        with path.open("rb") as file:
            yield from _records(_Window(file, path, start or Position()), resumed=start is not None)
    except OSError as error:
        raise HarnessError(f"cannot read {path}: {error.strerror}") from error


def _records(window: _Window, resumed: bool) -> Iterator[Record]:
    opening = "[" if resumed else window.take("[{")
    closing = "]" if opening == "[" else "}"
    empty_so_far = not resumed
    while True:
        if window.peek() == closing:
            window.take(closing)
            break
        if not empty_so_far:
            window.take(",")
        empty_so_far = False
        window.peek()
        line, key = window.line, ""
        window.number += 1
        if opening == "{":
            key = window.value()
            if not isinstance(key, str):
                raise window.error(f"a key must be a text, not {_brief(key)}")
            window.take(":")
        value = window.value()
        yield Record(window.path, key, value, line, Position(window.offset, window.line, window.number))
    if window.peek():
        raise window.error(f"unexpected text after the closing {closing!r}")


class _Window:
    """The part of a file that is in memory."""

    def __init__(self, file: BinaryIO, path: Path, start: Position) -> None:
        self.path, self._file = path, file
        self.offset, self.line, self.number = start.offset, start.line, start.number
        self._text, self._at, self._ended = "", 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        file.seek(start.offset)

    def error(self, message: str, lines_ahead: int = 0) -> HarnessError:
        return HarnessError(f"{self.path}, line {self.line + lines_ahead} (record {max(self.number, 1)}): {message}")

    def peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            if space and space.end() < len(self._text):
                self._advance(space.end())
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def take(self, wanted: str) -> str:
        """Consume one of the wanted characters."""
        found = self.peek()
        if not found:
            raise self.error("the file ends too early; it seems to be cut short")
        if found not in wanted:
            raise self.error(f"{' or '.join(map(repr, wanted))} expected, not {found!r}")
        self._advance(self._at + 1)
        return found

    def value(self) -> Any:
        """Consume one JSON value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - len("-Infinity")
                if self._ended or not cut:
                    what = "the file ends within a record; it seems to be cut short" if cut else f"{error.msg}"
                    raise self.error(what, self._text.count("\n", self._at, error.pos)) from None
            else:
                if end < len(self._text) or self._ended:  # a number at the window's edge may go on behind it
                    self._advance(end)
                    return value
            self._fill()

    def _fill(self) -> None:
        raw = self._file.read(CHUNK)
        self._ended = not raw
        try:
            more = self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.error(f"the text is not UTF-8 ({error.reason})") from None
        self._text = self._text[self._at :] + more
        self._at = 0

    def _advance(self, to: int) -> None:
        taken = self._text[self._at : to]
        self.line += taken.count("\n")
        self.offset += len(taken) if taken.isascii() else len(taken.encode())
        self._at = to


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
