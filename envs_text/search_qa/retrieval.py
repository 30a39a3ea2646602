"""Retrievers: an embedded BM25 index over passages, and what an environment needs to know about any other kind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import tempfile
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from envs_text.search_qa.client import HTTPRetriever
from envs_text.search_qa.corpus import Corpus, Passage, Ticker, read, sha256
from harness.contracts import HarnessError, digest

__all__ = ["BM25", "HTTPRetriever", "Passage", "Retriever", "open_retriever"]


class Retriever(Protocol):
    """Finds passages. ``version`` names corpus and ranking: it enters the fingerprints of tasks."""

    @property
    def version(self) -> str: ...

    def search(self, queries: Sequence[str], top: int) -> list[list[Passage]]:
        """The best passages of each query, best first: at most ``top``, fewer (or none) where fewer match."""
        ...


RANKING = "bm25-1"
"""Names how passages are cut into words and weighed; part of a retriever's version."""
STAMP, OFFSETS = "stamp.json", "offsets.npy"

STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be but by did do does for from had has have he her his how i if in into is it its no not
        of on or s she such t that the their then there these they this to was we were what when where which who whom
        whose why will with you""",
    )
)
"""Words that searches and passages do without."""


def words(text: str) -> list[str]:
    """Index terms of a text: lower-case words without accents and without stop words."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


class BM25:
    """An embedded index: the sum over the query's words of their BM25 weights in title and text (k1 0.9, b 0.4).

    Equal scores are ranked by position in the corpus; passages that share no word with the query are never returned.

    Args:
        passages: The corpus, in a fixed order.
        version: Names the corpus.
        index: Its ``bm25s`` index; built here unless given.
    """

    def __init__(self, passages: Sequence[Passage], version: str, index: Any = None) -> None:
        self.passages, self.version = passages, version
        self._index = index if index is not None else Terms(passages).index()

    def search(self, queries: Sequence[str], top: int) -> list[list[Passage]]:
        """The best passages of each query; an empty query, or one of stop words only, finds none."""
        return [[found for found, _ in ranking] for ranking in self.ranked(queries, top)]

    def ranked(self, queries: Sequence[str], top: int) -> list[list[tuple[Passage, float]]]:
        """As ``search``, each passage with its score."""
        return [self._ranked(query, top) for query in queries]

    def _ranked(self, query: str, top: int) -> list[tuple[Passage, float]]:
        terms = self._index.get_tokens_ids(words(query))
        if not terms:
            return []
        scores = self._index.get_scores_from_ids(terms)
        found = np.flatnonzero(scores > 0)
        if len(found) > top:
            bound = np.partition(scores[found], len(found) - top)[len(found) - top]
            found = found[scores[found] >= bound]
        best = found[np.argsort(-scores[found], kind="stable")][:top]
        return [(self.passages[int(i)], float(scores[i])) for i in best]


class Terms:
    """Gathers the index terms of passages, as numbers: what an index is made of."""

    def __init__(self, passages: Iterable[Passage] = ()) -> None:
        self.numbers: dict[str, int] = {}
        self.documents: list[array[int]] = []
        for found in passages:
            self.add(found)

    def add(self, found: Passage) -> None:
        terms = (self.numbers.setdefault(word, len(self.numbers)) for word in words(found.contents))
        self.documents.append(array("i", terms))

    def index(self, show_progress: bool = False) -> Any:
        """The ``bm25s`` index. Its backends are fixed, so that scores do not depend on what else is installed."""
        import bm25s

        if not self.numbers:
            raise HarnessError("no passage of the corpus holds a word to search for")
        index = bm25s.BM25(k1=0.9, b=0.4, method="lucene", backend="numpy", csc_backend="numpy")
        index.index((self.documents, self.numbers), show_progress=show_progress)
        return index


# --------------------------------------------------------------------------------------------- saved indexes


@dataclass(frozen=True)
class Stamp:
    """Says which file an index was made of, and by what."""

    size: int
    modified: int
    """Time of the last change, nanoseconds."""
    sha256: str
    ranking: str


def open_retriever(spec: str, cache: Path | None = None, say: Callable[[str], None] | None = None) -> Retriever:
    """The retriever that ``spec`` names: the address of a server (``http://...``) or the path of a corpus file.

    See ``HTTPRetriever`` and ``open_corpus`` for the other arguments and the errors.
    """
    if spec.startswith(("http://", "https://")):
        return HTTPRetriever(spec)
    return open_corpus(Path(spec).expanduser(), cache, say)


def open_corpus(path: Path, cache: Path | None = None, say: Callable[[str], None] | None = None) -> BM25:
    """The index of a corpus file, built on the first use and mapped into memory ever after.

    The index is kept in ``cache`` (default: ``seed-harness`` in the user's cache directory) and made anew when the
    file has changed. It appears there complete or not at all; processes that open one corpus at once build it once.

    Args:
        path: JSON lines ``{"id", "contents"}``.
        cache: Directory for indexes.
        say: Gets progress lines when the work takes more than a few seconds; default: standard error.

    Raises:
        HarnessError: The corpus cannot be read or is malformed (file and line), or the index cannot be written.
    """
    if not path.is_file():
        raise HarnessError(f"no corpus file {path}")
    path, say = path.resolve(), say or _to_stderr
    place = (cache or _user_cache()) / f"{path.stem}-{digest(str(path))[:12]}"
    with _alone(place):
        stamp = _stamp(place, path, say) or _make(place, path, say)
        return _load(place, path, stamp)


def _stamp(place: Path, path: Path, say: Callable[[str], None]) -> Stamp | None:
    """The stamp of the index at ``place`` if that index is of this very file, else None."""
    file = place / STAMP
    if not file.is_file():
        return None
    stamp = Stamp(**json.loads(file.read_text()))
    now = path.stat()
    if (stamp.size, stamp.ranking) != (now.st_size, _ranking()):
        return None
    if stamp.modified != now.st_mtime_ns:
        if stamp.sha256 != sha256(path, Ticker(f"comparing {path.name} with its index", say)):
            return None
        stamp = replace(stamp, modified=now.st_mtime_ns)
        _write_stamp(place, stamp)
    return stamp


def _make(place: Path, path: Path, say: Callable[[str], None]) -> Stamp:
    """Index a corpus file and put the index at ``place``, in the stead of what is there."""
    before, terms = path.stat(), Terms()
    scan = read(path, terms.add, Ticker(f"reading {path.name}", say))
    index = terms.index(show_progress=len(scan.offsets) > 200_000)
    stamp = Stamp(before.st_size, before.st_mtime_ns, scan.sha256, _ranking())
    with _writing(place), tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        fresh = Path(scratch) / "index"
        index.save(fresh, show_progress=False)
        np.save(fresh / OFFSETS, scan.offsets)
        _write_stamp(fresh, stamp)
        if place.exists():  # whoever has it mapped keeps it until they let go
            place.rename(Path(scratch) / "old")
        fresh.rename(place)
    return stamp


def _load(place: Path, path: Path, stamp: Stamp) -> BM25:
    import bm25s

    index = bm25s.BM25.load(place, mmap=True, show_progress=False)
    passages = Corpus(path, np.load(place / OFFSETS, mmap_mode="r"))
    return BM25(passages, f"{RANKING} {stamp.sha256[:16]}", index)


def _ranking() -> str:
    return f"{RANKING}, bm25s {version('bm25s')}"


def _write_stamp(place: Path, stamp: Stamp) -> None:
    with _writing(place):
        fresh = place / f"{STAMP}.new"
        fresh.write_text(json.dumps(asdict(stamp)))
        fresh.replace(place / STAMP)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Keep other processes from the index at ``place``; the lock dies with its process."""
    with _writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.with_name(f"{place.name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HarnessError(f"cannot write the index {place}: {error.strerror or error}") from error


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seed-harness"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
