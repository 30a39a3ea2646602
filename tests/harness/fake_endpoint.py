"""A local OpenAI-compatible endpoint that answers, or misbehaves, as a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SOON = {"retry-after-ms": "1"}
"""Asks the client not to wait before it tries again."""


@dataclass(frozen=True)
class Reply:
    """What the endpoint sends: after ``wait`` seconds, and only the first half of it if it is ``cut``."""

    body: str = "{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: SOON)
    wait: float = 0.0
    cut: bool = False


Brain = Callable[[dict[str, Any]], Reply]


def says(text: str | None, finish: str = "stop", usage: tuple[int, int] = (10, 3)) -> Reply:
    """A proper chat completion."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": counts}
    return Reply(json.dumps(body))


def rejects(message: str, status: int = 400) -> Reply:
    """An error in the usual form."""
    return Reply(json.dumps({"error": {"message": message}}), status)


def text_of(request: dict[str, Any]) -> str:
    """The words of a request."""
    return "".join(part.get("text", "") for part in request["messages"][0]["content"])


def pictures_of(request: dict[str, Any]) -> list[str]:
    """The data URLs of a request."""
    return [part["image_url"]["url"] for part in request["messages"][0]["content"] if part["type"] == "image_url"]


def planned(plan: dict[str, list[Reply]]) -> Brain:
    """The replies of the first word of the plan that a request holds: one after the other, the last for ever."""

    def think(request: dict[str, Any]) -> Reply:
        replies = next(plan[word] for word in plan if word in text_of(request))
        return replies.pop(0) if len(replies) > 1 else replies[0]

    return think


class Endpoint:
    """Keeps what it was asked, and how many requests it held at a time."""

    def __init__(self, brain: Brain) -> None:
        self.brain = brain
        self.requests: list[dict[str, Any]] = []
        self.held = self.most_held = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.name = f"some/model@http://127.0.0.1:{self.server.server_port}/v1"
        self.spec = f"api:{self.name}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            self.requests.append(request)
            self.held += 1
            self.most_held = max(self.held, self.most_held)
            reply = self.brain(request)
        time.sleep(reply.wait)
        with self._lock:
            self.held -= 1
        body = reply.body.encode()
        try:
            handler.send_response(reply.status)
            for header, value in {
                "content-type": "application/json",
                "content-length": str(len(body)),
                **reply.headers,
            }.items():
                handler.send_header(header, value)
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2] if reply.cut else body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has lost patience
        handler.close_connection = reply.cut

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serving(brain: Brain) -> Iterator[Endpoint]:
    """An endpoint, for as long as the context lasts."""
    endpoint = Endpoint(brain)
    try:
        yield endpoint
    finally:
        endpoint.close()
