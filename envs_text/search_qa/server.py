"""``harness serve-retriever CORPUS``: a retrieval server in the protocol of the field (see ``client``).

Answers ``POST /retrieve`` and, so that clients can pin what they search, ``GET /version``: ``{"version", "passages"}``.
"""

from __future__ import annotations

import argparse
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from envs_text.search_qa.corpus import Passage
from envs_text.search_qa.retrieval import BM25, open_corpus
from harness.contracts import HarnessError

MAX_BODY = 4 << 20
"""Bytes of a request."""
MAX_QUERIES = 1024
MAX_TOP = 100


class Server(ThreadingHTTPServer):
    """Serves an index. Binding to a port that is taken raises HarnessError."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, retriever: BM25, host: str, port: int, top: int) -> None:
        self.retriever, self.top = retriever, top
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise HarnessError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may hang up
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/retrieve"


class Handler(BaseHTTPRequestHandler):
    """One connection, which may carry many requests."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 300
    """Seconds after which an idle connection is closed."""
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/version":
            return self._answer(HTTPStatus.NOT_FOUND, {"error": "only POST /retrieve and GET /version are answered"})
        retriever = self.server.retriever
        return self._answer(HTTPStatus.OK, {"version": retriever.version, "passages": len(retriever.passages)})

    def do_POST(self) -> None:
        if self.path != "/retrieve":
            self.close_connection = True  # the body is left unread
            return self._answer(HTTPStatus.NOT_FOUND, {"error": "only POST /retrieve and GET /version are answered"})
        try:
            queries, top, scores = self._question()
        except ValueError as error:
            return self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        rankings = self.server.retriever.ranked(queries, top)
        return self._answer(HTTPStatus.OK, {"result": [_show(ranking, scores) for ranking in rankings]})

    def _question(self) -> tuple[list[str], int, bool]:
        """Queries, passages per query, and whether scores are wanted. Raises ValueError for a malformed request."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            raise ValueError(f"Content-Length must be a number up to {MAX_BODY}, not {length!r}")
        body = self.rfile.read(int(length))
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from error
        if not isinstance(asked, dict):
            raise ValueError("the body is not an object")
        queries, top = asked.get("queries"), asked.get("topk")
        top = self.server.top if top is None else top
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise ValueError("'queries' must be a list of strings")
        if len(queries) > MAX_QUERIES:
            raise ValueError(f"{len(queries)} queries, at most {MAX_QUERIES} are answered at once")
        if not isinstance(top, int) or not 1 <= top <= MAX_TOP:
            raise ValueError(f"'topk' must be a whole number from 1 to {MAX_TOP}, not {top!r}")
        return queries, top, bool(asked.get("return_scores", False))

    def _answer(self, status: HTTPStatus, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _show(ranking: list[tuple[Passage, float]], scores: bool) -> list[dict[str, Any]]:
    documents = [{"id": found.id, "contents": found.contents} for found, _ in ranking]
    if not scores:
        return documents
    return [{"document": document, "score": score} for document, (_, score) in zip(documents, ranking, strict=True)]


# -------------------------------------------------------------------------------------------------- command


EPILOG = """\
examples:
  harness serve-retriever wiki.jsonl --port 8000
  harness eval --policy oracle --env SearchQA-v1 --env-option retriever=http://127.0.0.1:8000

The first start indexes the corpus and keeps the index in the user's cache directory; later starts take a moment.
"""


def command(parser: argparse.ArgumentParser) -> None:
    """Serve BM25 search over a corpus to environments and any other client of the /retrieve protocol."""
    parser.epilog = EPILOG
    parser.add_argument("corpus", type=Path, help='JSON lines {"id", "contents"}')
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument(
        "--top", type=_top, default=3, metavar="N", help="passages if a request has no topk (default 3)"
    )
    parser.set_defaults(run=_run)


def _top(text: str) -> int:
    if not 1 <= int(text) <= MAX_TOP:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_TOP}")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    retriever = open_corpus(options.corpus)
    with Server(retriever, options.host, options.port, options.top) as server:
        print(f"{len(retriever.passages):,} passages, {retriever.version}: {server.url}  (Ctrl-C stops)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", flush=True)
    return 0
