"""Policies behind an OpenAI-compatible endpoint, named ``api:MODEL@BASE_URL``.

The key is read from ``OPENAI_API_KEY`` by the client. It is in no file, log or message of ours: of a server's own
words only those about a rejected prompt are passed on, with the key cut out.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import PIL.Image

from harness.contracts import IMAGE_PLACEHOLDER, HarnessError, Image, Prompt, Response, StopReason, digest
from harness.inert import readable
from harness.policy.base import Policy, Request, Sampling

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

PREFIX = "api:"
KEY = "OPENAI_API_KEY"
GONE = 8
"""An endpoint that leaves so many requests in a row unanswered is taken to be gone."""
UNREADABLE = 2
"""How often a request is repeated because its answer was no chat completion."""
TOO_LONG = re.compile(r"context[ _](length|size|window)|(prompt|input) is too long|token count exceeds", re.IGNORECASE)
"""How servers say that a prompt is too long."""


@dataclass(frozen=True)
class Calls:
    """How an endpoint is called: speed and patience, which change no score.

    Attributes:
        concurrency: Requests at a time.
        timeout: Seconds that one try may take.
        retries: Further tries after a time-out, a lost connection or status 408, 409, 429 or 5xx, each after the wait
            that the server asks for (up to two minutes), else after half a second, doubled every time, up to eight.
    """

    concurrency: int = 16
    timeout: float = 300.0
    retries: int = 6


USUAL = Calls()

OnAnswer = Callable[[Request, Response], None]


def parse_endpoint(text: str, what: str = "policy") -> tuple[str, str]:
    """(model, base URL) of ``MODEL@BASE_URL``, with or without ``api:``. Raises HarnessError for anything else."""
    prefix = PREFIX if text.startswith(PREFIX) else ""
    match = re.fullmatch(r"(\S+?)@(https?://[^\s?#]+)", text.removeprefix(PREFIX))
    if not match:
        example = f"{prefix}my-model@http://localhost:8000/v1"
        raise HarnessError(f"{what} {text.split('?')[0]!r} is not of the form {prefix}MODEL@BASE_URL, e.g. {example}")
    model, url = match[1], match[2].rstrip("/")
    if "@" in urlsplit(url).netloc:
        raise HarnessError(f"{what}: the URL of {model!r} must hold no password; the key belongs in {KEY}")
    return model, url


def check_endpoint(spec: str) -> str:
    """Check a spec without calling anybody; returns the policy's fingerprint. Raises HarnessError."""
    model, url = parse_endpoint(spec)
    if importlib.util.find_spec("openai") is None:
        raise HarnessError(f"{spec!r} needs the openai client: pip install 'openai>=2'")
    return digest(["api", model, url])


class ApiPolicy(Policy):
    """Asks an endpoint, many requests at a time.

    A request that finds no answer fails alone. HarnessError is raised where no further request would fare better: key
    or model refused, nobody listening, ``GONE`` requests in a row without an answer, or none ever answered.
    """

    def __init__(self, spec: str, calls: Calls = USUAL) -> None:
        self.spec, self.fingerprint, self.calls = spec, check_endpoint(spec), calls
        self.model, self.url = parse_endpoint(spec)
        import openai

        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise HarnessError(f"{KEY} holds characters that no key has")
        self._client = openai.OpenAI(
            base_url=self.url, api_key=self._key or "none", max_retries=calls.retries, timeout=calls.timeout
        )
        # OpenAI has renamed this field, and its newer models refuse the name that every other server knows.
        self._limit = "max_completion_tokens" if urlsplit(self.url).hostname == "api.openai.com" else "max_tokens"
        self._lock = threading.Lock()
        self._seeded = True
        self._answered = False
        self._silent = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Response]:
        """Answer every request, in order; ``on_answer`` hears of an answer as soon as it is there, from some thread."""

        def respond(request: Request) -> Response:
            response = self._respond(request, sampling)
            if on_answer and response.failure is None:
                on_answer(request, response)
            return response

        try:
            responses = concurrently(respond, requests, self.calls.concurrency)
        except BaseException:
            self._client.close()  # whatever is still under way finds no further try
            raise
        if responses and not self._answered:
            raise HarnessError(
                f"not one of {len(responses)} requests to {self.url} was answered: {responses[-1].error}"
            )
        return responses

    def _respond(self, request: Request, sampling: Sampling) -> Response:
        """One answer, or the reason why there is none; keeps count of those that stay away."""
        import openai

        try:
            response = self._ask(request, sampling)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            # The server's own text may quote a part of the key, so only the status is passed on.
            status = f"status {error.status_code}"
            raise HarnessError(f"{self.url} refuses {self.model!r} with {status}: check URL, model and {KEY}") from None
        except openai.APIStatusError as error:
            if error.status_code < 500 and error.status_code not in (408, 409, 429):  # this prompt is not to its liking
                return self._rejected(error)
            problem = f"status {error.status_code}"
        except openai.APITimeoutError:
            problem = f"nothing within {self.calls.timeout:g} s"
        except openai.APIConnectionError as error:
            problem = f"connection failed ({type(error.__cause__).__name__})"
            if nobody_listens(error):
                raise HarnessError(f"nobody answers at {self.url}: {problem}") from None
        else:
            if response is not None:
                with self._lock:
                    self._answered, self._silent = True, 0
                return response
            problem = "what came was no chat completion"
        with self._lock:
            self._silent += 1
            if self._silent >= GONE:
                raise HarnessError(f"{self.url} left {GONE} requests in a row unanswered: {problem}")
        return Response("", failure=StopReason.POLICY_ERROR, error=problem)

    def _ask(self, request: Request, sampling: Sampling) -> Response | None:
        """One answer; None where what came, even when asked again, was no chat completion."""
        import openai

        seed = {"seed": int(digest(list(request.key))[:8], 16) >> 1} if self._seeded else {}
        parts = content(request.prompt)
        for _ in range(1 + UNREADABLE):
            try:
                completion = self._client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": parts}],
                    temperature=sampling.temperature,
                    extra_body={self._limit: sampling.max_tokens, **seed},
                )
            except openai.APIStatusError as error:
                if not (seed and error.status_code in (400, 422) and "seed" in error.message):
                    raise
                self._forgo_seeds()
                return self._ask(request, sampling)
            except openai.APIConnectionError:
                raise
            except (openai.APIError, ValueError):  # ValueError: the body was no JSON
                continue
            response = read_completion(completion)
            if response is not None:
                return response
        return None

    def _forgo_seeds(self) -> None:
        with self._lock:
            if self._seeded:
                log.warning("%s takes no seeds: sampled answers of %s cannot be repeated", self.url, self.model)
            self._seeded = False

    def _rejected(self, error: openai.APIStatusError) -> Response:
        said = " ".join(error.message.split())
        said = said.replace(self._key, "[key]")[:300] if self._key else said[:300]
        too_long = TOO_LONG.search(said) is not None
        return Response("", failure=StopReason.CONTEXT_OVERFLOW if too_long else StopReason.POLICY_ERROR, error=said)


def concurrently(function: Callable[[Request], Response], items: Sequence[Request], workers: int) -> list[Response]:
    """``function`` of every item, in order, ``workers`` at a time.

    The first exception is raised at once. The threads are daemons, so that neither that nor Ctrl-C, nor the end of the
    process, waits for calls that are under way, as those of an executor would.
    """
    waiting: Iterator[tuple[int, Request]] = iter(enumerate(items))
    lock = threading.Lock()
    over: SimpleQueue[tuple[int, Response | BaseException]] = SimpleQueue()

    def work() -> None:
        while True:
            with lock:
                index, item = next(waiting, (-1, None))
            if item is None:
                return
            try:
                over.put((index, function(item)))
            except BaseException as error:  # raised by the caller below
                over.put((index, error))
                return

    for _ in range(min(workers, len(items))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Response] = {}
    try:
        while len(results) < len(items):
            index, result = over.get()
            if isinstance(result, BaseException):
                raise result
            results[index] = result
    finally:
        with lock:
            waiting = iter(())
    return [results[index] for index in range(len(items))]


def nobody_listens(error: BaseException) -> bool:
    """Whether a connection was refused or the host has no address, as the chain of causes tells."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError | socket.gaierror):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def read_completion(completion: Any) -> Response | None:
    """The first choice of a chat completion; None where it is none. The client does not validate what came."""
    from openai.types.chat import ChatCompletion

    if not (isinstance(completion, ChatCompletion) and completion.choices and completion.choices[0].message):
        return None
    choice, usage = completion.choices[0], completion.usage
    counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    text = choice.message.content
    return Response(
        # null where all was spent on hidden reasoning, or by a filter
        readable(text) if isinstance(text, str) else "",
        finished=choice.finish_reason != "length",
        usage=counts if all(isinstance(count, int) for count in counts) else (0, 0),
    )


def content(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as message parts: text and PNG data URLs, in the order of the placeholders."""
    texts = prompt.text.split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        if text:
            parts.append({"type": "text", "text": text})
        if index < len(prompt.images):
            parts.append({"type": "image_url", "image_url": {"url": data_url(prompt.images[index])}})
    return parts


def data_url(image: Image) -> str:
    """A picture as a PNG data URL."""
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
