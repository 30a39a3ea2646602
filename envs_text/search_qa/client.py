"""Client of a retrieval server, in the protocol of the field: ``POST /retrieve {"queries", "topk", "return_scores"}``.

The answer is ``{"result": [[passage, ...] per query]}`` with a passage as ``{"document": {"id", "contents"}, "score"}``
or as ``{"id", "contents"}``. Callers of one process share a connection and, when several wait, a request.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from envs_text.search_qa.corpus import Passage, passage
from harness.contracts import HarnessError

PATH = "/retrieve"
BATCH = 256
"""Most queries in one request, unless a single caller asks for more."""


BUSY = (429, 500, 502, 503, 504)
"""Statuses after which a request is tried again; 501 says that the server never will."""


@dataclass
class _Call:
    queries: Sequence[str]
    top: int
    answer: Future[list[list[Passage]]] = field(default_factory=Future)


class HTTPRetriever:
    """Searches on a server. Safe to use from many threads.

    One request is under way at a time; whoever calls meanwhile waits, and all who wait travel in the next request.
    So a lone caller loses no time, and the slower the server, the more searches share a request.

    Args:
        url: Address of the server; ``/retrieve`` is understood where it has no path.
        timeout: Seconds without a byte from the server after which an attempt has failed.
        attempts: How often a request is tried when the server is unreachable, cuts the line or answers as in ``BUSY``.
        pause: Seconds before the second attempt; doubled before each further one.

    Raises:
        HarnessError: Address and reason, from the constructor for a malformed address, from ``search`` and ``version``
            when the attempts are used up or the server's answer is not of the protocol.
    """

    def __init__(self, url: str, timeout: float = 60.0, attempts: int = 5, pause: float = 0.5) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise HarnessError(f"retriever {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise HarnessError(f"retriever {url}: not an address like http://127.0.0.1:8000{PATH}")
        self.path = parts.path if parts.path.strip("/") else PATH
        self.url = urlunsplit((parts.scheme, parts.netloc, self.path, "", ""))
        self.attempts, self.pause = attempts, pause
        self.requests = 0
        """Requests sent so far, further attempts included."""
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = connect(parts.hostname, port, timeout=timeout)
        self._sending, self._queueing = threading.Lock(), threading.Lock()
        self._waiting: list[_Call] = []

    @cached_property
    def version(self) -> str:
        """What the server says of its corpus and ranking under ``/version``; the address where it says nothing."""
        with self._sending:
            status, body = self._request("GET", self.path.rsplit("/", 1)[0] + "/version")
        if status != 200:
            return f"server {self.url}"
        answer = self._json(body)
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else f"server {self.url}"

    def search(self, queries: Sequence[str], top: int) -> list[list[Passage]]:
        """The server's best passages of each query, at most ``top``."""
        if not queries:
            return []
        call = _Call(queries, top)
        with self._queueing:
            self._waiting.append(call)
        with self._sending:
            while not call.answer.done():  # it did not travel with somebody else's
                self._send(self._batch())
        return call.answer.result()

    def _batch(self) -> list[_Call]:
        """Take the calls of the next request from the queue, oldest first."""
        with self._queueing:
            taken = [self._waiting.pop(0)]
            size = len(taken[0].queries)
            while self._waiting and size + len(self._waiting[0].queries) <= BATCH:
                taken.append(self._waiting.pop(0))
                size += len(taken[-1].queries)
        return taken

    def _send(self, calls: Sequence[_Call]) -> None:
        try:
            found = self._retrieve([q for call in calls for q in call.queries], max(call.top for call in calls))
        except BaseException as error:  # whatever it was, nobody may wait for ever; each caller raises it
            for call in calls:
                call.answer.set_exception(error)
            return
        for call in calls:
            call.answer.set_result([ranking[: call.top] for ranking in found[: len(call.queries)]])
            found = found[len(call.queries) :]

    def _retrieve(self, queries: list[str], top: int) -> list[list[Passage]]:
        asked = json.dumps({"queries": queries, "topk": top, "return_scores": True})
        status, body = self._request("POST", self.path, asked.encode())
        if status != 200:
            raise HarnessError(f"retriever {self.url}: HTTP {status}, {_excerpt(body)}")
        answer = self._json(body)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list) or not all(isinstance(ranking, list) for ranking in result):
            raise HarnessError(
                f"retriever {self.url}: the answer has no list of rankings under 'result': {_excerpt(body)}"
            )
        if len(result) != len(queries):
            raise HarnessError(f"retriever {self.url}: {len(queries)} queries but {len(result)} rankings")
        try:
            return [[passage(_document(record)) for record in ranking] for ranking in result]
        except ValueError as error:
            raise HarnessError(f"retriever {self.url}: a passage of the answer is malformed: {error}") from error

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the server's answer. The caller holds ``_sending``."""
        headers = {"Content-Type": "application/json"} if body else {}
        pauses = [self.pause * 2**n for n in range(self.attempts - 1)]
        while True:
            idle = self._connection.sock is not None
            try:
                self.requests += 1
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                answer = response.read()
                if response.status not in BUSY:
                    return response.status, answer
                problem = f"HTTP {response.status}, {_excerpt(answer)}"
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if idle and not isinstance(error, TimeoutError):
                    continue  # servers close idle connections: a new one, opened now, tells whether anything is wrong
                problem = _reason(error)
            if not pauses:
                raise HarnessError(f"retriever {self.url}: {problem} ({self.attempts} attempts)")
            time.sleep(pauses.pop(0))

    def _json(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError as error:
            raise HarnessError(f"retriever {self.url}: the answer is not JSON: {_excerpt(body)}") from error


class Ahead:
    """A retriever that can be asked ahead for what several callers are about to search, one after the other."""

    def __init__(self, retriever: HTTPRetriever) -> None:
        self.retriever = retriever
        self._found: dict[tuple[str, int], list[Passage] | HarnessError] = {}

    @property
    def version(self) -> str:
        return self.retriever.version

    def fetch(self, queries: Sequence[str], top: int) -> None:
        """Search all queries in one request. A failure is kept for its searches; nobody waits twice."""
        asked = list(dict.fromkeys(queries))
        found: Sequence[list[Passage] | HarnessError]
        try:
            found = self.retriever.search(asked, top)
        except HarnessError as error:
            found = [error] * len(asked)
        self._found = {(query, top): answer for query, answer in zip(asked, found, strict=True)}

    def search(self, queries: Sequence[str], top: int) -> list[list[Passage]]:
        """As ``HTTPRetriever.search``, without a request where all is known."""
        known = [self._found.get((query, top)) for query in queries]
        for answer in known:
            if isinstance(answer, HarnessError):
                raise answer
        ready = [answer for answer in known if isinstance(answer, list)]
        return ready if len(ready) == len(queries) else self.retriever.search(queries, top)


def _document(record: object) -> object:
    return record["document"] if isinstance(record, dict) and "document" in record else record


def _excerpt(body: bytes) -> str:
    """The beginning of a body, in one line."""
    text = " ".join(body.decode(errors="replace").split())
    return (text[:120] + " ..." if len(text) > 120 else text) or "empty body"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, no server is listening"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead | ConnectionError):
        return "the connection broke off before the answer was complete"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"not an HTTP answer ({type(error).__name__})"
