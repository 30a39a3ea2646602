"""The retrieval server of Search-QA and its client, against each other and against servers that misbehave."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_search_retrieval import RIVERS, write

from envs_text.search_qa.client import Ahead, HTTPRetriever
from envs_text.search_qa.corpus import Passage
from envs_text.search_qa.retrieval import BM25, open_corpus, open_retriever
from envs_text.search_qa.server import MAX_BODY, MAX_QUERIES, Server
from harness.contracts import HarnessError
from harness.pool import EnvPool
from harness.registry import make_env

# ---------------------------------------------------------------------------------------------------- client

Reply = tuple[int, bytes]


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Reply], cut: int = 0, hangs_up: bool = False) -> Iterator[str]:
    """A server that answers POSTs with what ``reply`` makes of them, the last ``cut`` bytes missing."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, body = reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) - cut])
            self.close_connection = hangs_up or cut > 0

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def echo(asked: dict[str, Any]) -> Reply:
    """One passage per query, whose text is the query."""
    found = [[{"document": {"id": q, "contents": f'"T"\n{q}'}, "score": 1.0}] for q in asked["queries"]]
    return 200, json.dumps({"result": found}).encode()


def client(url: str, **options: Any) -> HTTPRetriever:
    return HTTPRetriever(url, **{"pause": 0.01, "attempts": 3, **options})


def test_searches_of_many_episodes_travel_in_one_request_and_fail_as_one() -> None:
    asked: list[list[str]] = []

    def reply(request: dict[str, Any]) -> Reply:
        asked.append(request["queries"])
        return echo(request) if len(asked) < 3 else (404, b"gone")

    with serving(reply) as url:
        retriever = Ahead(client(url))
        retriever.fetch(["a", "b", "a"], 1)
        assert [[p.id for p in retriever.search([query], 1)[0]] for query in ("a", "b", "a")] == [["a"], ["b"], ["a"]]
        assert asked == [["a", "b"]]
        assert retriever.search(["c"], 1)[0][0].id == "c"
        retriever.fetch(["d", "e"], 1)
        for query in ("d", "e"):
            with pytest.raises(HarnessError, match="HTTP 404"):
                retriever.search([query], 1)
        assert asked == [["a", "b"], ["c"], ["d", "e"]]


def test_the_environments_of_a_worker_search_together(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    record = {"data_source": "nq", "golden_answers": ["x"]}
    questions.write_text(
        "".join(json.dumps({"id": f"{n}", "question": f"what {n}?", **record}) + "\n" for n in range(5))
    )
    asked: list[list[str]] = []

    def reply(request: dict[str, Any]) -> Reply:
        asked.append(request["queries"])
        return echo(request)

    with serving(reply) as url:
        options = {"data": str(questions), "retriever": url}
        tasks = make_env("SearchQA-v1", options).panel("eval").tasks
        with EnvPool("SearchQA-v1", options) as pool:
            pool.reset(dict(enumerate(tasks)))
            states = pool.step({slot: f"search[q{slot}]" for slot in range(5)})
    assert asked == [[f"q{slot}" for slot in range(5)]]
    assert [state.observation["text"] for state in states.values()] == [f"Doc 1: (Title: T) q{n}" for n in range(5)]


@pytest.mark.parametrize("scores", [True, False])
def test_both_shapes_of_answers_are_read(scores: bool) -> None:
    def reply(asked: dict[str, Any]) -> Reply:
        assert asked == {"queries": ["a", "b"], "topk": 2, "return_scores": True}
        documents = [{"id": n, "contents": f'"Title {n}"\ntext'} for n in range(3)]
        ranking = [{"document": d, "score": 0.5} for d in documents] if scores else documents
        return 200, json.dumps({"result": [ranking, []]}).encode()

    with serving(reply) as url:
        assert client(url).search(["a", "b"], 2) == [
            [Passage("0", "Title 0", "text"), Passage("1", "Title 1", "text")],
            [],
        ]
        assert client(url).search([], 2) == []


def test_concurrent_searches_travel_together() -> None:
    """While the first request is under way 63 more searches come in; they need one more request."""
    sizes: list[int] = []

    def reply(asked: dict[str, Any]) -> Reply:
        while not sizes and len(retriever._waiting) < 63:
            time.sleep(0.001)
        sizes.append(len(asked["queries"]))
        return echo(asked)

    with serving(reply) as url, ThreadPoolExecutor(64) as pool:
        retriever = client(url)
        found = list(pool.map(lambda n: retriever.search([f"query {n}"], 3), range(64)))
    assert [ranking[0].text for [ranking] in found] == [f"query {n}" for n in range(64)]
    assert sizes == [1, 63]
    assert retriever.requests == 2


def test_trouble_that_may_pass_is_tried_again() -> None:
    tries: list[int] = []

    def reply(asked: dict[str, Any]) -> Reply:
        tries.append(1)
        return echo(asked) if len(tries) == 3 else (503, b"warming up")

    with serving(reply) as url:
        assert client(url).search(["x"], 1)[0][0].text == "x"
        assert len(tries) == 3
        with pytest.raises(HarnessError, match=r"/retrieve: HTTP 503, warming up \(2 attempts\)"):
            tries.clear() or client(url, attempts=2).search(["x"], 1)


def test_a_connection_that_the_server_closed_meanwhile_costs_no_attempt() -> None:
    with serving(echo, hangs_up=True) as url:
        retriever = client(url, attempts=1)
        assert [retriever.search([text], 1)[0][0].text for text in ("a", "b", "c")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("status", "body", "cut", "problem"),
    [
        (400, b'{"error": "too many"}', 0, 'HTTP 400, {"error": "too many"}'),
        (200, b"<html>\n login </html>", 0, "the answer is not JSON: <html> login </html>"),
        (200, b'{"result": [[], []]}', 0, "1 queries but 2 rankings"),
        (200, b'{"results": []}', 0, "no list of rankings under 'result'"),
        (200, b'{"result": [[{"id": "1"}]]}', 0, "a passage of the answer is malformed: no field 'contents'"),
        (200, b'{"result": [[]]}', 5, "broke off before the answer was complete (2 attempts)"),
    ],
)
def test_answers_outside_the_protocol_say_what_is_wrong(status: int, body: bytes, cut: int, problem: str) -> None:
    with serving(lambda _: (status, body), cut) as url, pytest.raises(HarnessError, match=re.escape(problem)) as caught:
        client(url, attempts=2).search(["x"], 1)
    assert f"retriever {url}/retrieve: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone_or_silent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(HarnessError, match=r"no answer in time \(1 attempts\)"):
            client(url, attempts=1, timeout=0.1).search(["x"], 1)
    with pytest.raises(HarnessError, match=r"connection refused, no server is listening \(3 attempts\)"):
        client(url).version  # noqa: B018
    for address in ("http://", "http://host:port", "http://h/retrieve?x=1"):
        with pytest.raises(HarnessError, match="retriever http"):
            open_retriever(address)


# ---------------------------------------------------------------------------------------------------- server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(BM25(RIVERS, "rivers"), "127.0.0.1", 0, top=2) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def ask(server: Server, body: bytes, path: str = "/retrieve", length: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
    connection.request("POST", path, body, {"Content-Length": length or str(len(body))})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_the_server_speaks_the_protocol(server: Server) -> None:
    assert ask(server, b'{"queries": ["Ister", ""], "topk": 1}') == (
        200,
        {"result": [[{"id": "0", "contents": '"Ister"\nThe Ister flows through Morhaven.'}], []]},
    )
    status, answer = ask(server, b'{"queries": ["Morhaven"], "return_scores": true}')
    assert (status, len(answer["result"][0])) == (200, 2)  # topk missing: the server's own
    assert answer["result"][0][0].keys() == {"document", "score"}
    retriever = HTTPRetriever(server.url)
    assert retriever.version == "rivers"
    assert retriever.search(["mayor", "born"], 4) == server.retriever.search(["mayor", "born"], 4)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\xfd", "the body is not JSON"),
        (b"[]", "the body is not an object"),
        (b'{"queries": "x"}', "'queries' must be a list of strings"),
        (b'{"queries": [1]}', "'queries' must be a list of strings"),
        (b'{"queries": [], "topk": 0}', "'topk' must be a whole number from 1 to 100, not 0"),
        (b'{"queries": [], "topk": "3"}', "'topk' must be a whole number from 1 to 100, not '3'"),
        (b'{"queries": [' + b'"",' * MAX_QUERIES + b'""]}', "1025 queries, at most 1024"),
    ],
)
def test_bad_requests_are_refused_in_one_line(server: Server, body: bytes, problem: str) -> None:
    status, answer = ask(server, body)
    assert (status, answer.keys()) == (400, {"error"})
    assert problem in answer["error"]
    assert ask(server, b'{"queries": []}') == (200, {"result": []})


def test_the_server_limits_bodies_and_knows_its_paths(server: Server) -> None:
    assert ask(server, b"", length=str(MAX_BODY + 1))[0] == 400
    assert ask(server, b"", length="-1")[0] == 400
    assert ask(server, b"{}", path="/search")[0] == 404
    with pytest.raises(HarnessError, match=r"cannot listen on 127\.0\.0\.1"):
        Server(BM25(RIVERS, ""), "127.0.0.1", server.server_address[1], 3)


def test_serve_retriever_from_start_to_interrupt(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", RIVERS)
    command = [sys.executable, "-m", "harness.cli", "serve-retriever", str(corpus), "--port"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*command, "0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit that it is ignored
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/retrieve", line)
        assert url, line
        retriever = open_retriever(url[0])
        assert retriever.version == open_corpus(corpus, tmp_path / "mine").version
        assert retriever.search(["Who is the mayor of Morhaven?"], 1) == [[RIVERS[1]]]
        port = url[0].rpartition(":")[2].split("/")[0]
        second = subprocess.run([*command, port], env=environment, capture_output=True, text=True, timeout=30)
        assert (second.returncode, second.stderr.count("\n")) == (2, 1)
        assert "Address already in use" in second.stderr
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=10)
        assert (process.returncode, rest, errors) == (0, "stopped\n", "")
    finally:
        process.kill()
        process.communicate()
