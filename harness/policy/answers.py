"""Answers of endpoints, kept in files by what was asked: what has been paid for once is not asked again.

Kept are the answer and the endpoint's count of tokens; of the question its hash alone, and of the endpoint nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from harness.contracts import Response, digest
from harness.policy.base import Request, Sampling
from harness.store import writing

log = logging.getLogger(__name__)


def question(model: str, request: Request, sampling: Sampling) -> str:
    """SHA-256 (hex) over what an answer depends on: model, text and pictures, decoding, and the request's key."""
    pictures = [[list(image.shape), hashlib.sha256(image.tobytes()).hexdigest()] for image in request.prompt.images]
    asked = [model, request.prompt.text, pictures, sampling.temperature, sampling.max_tokens, list(request.key)]
    return digest(asked)


@dataclass(frozen=True)
class Answers:
    """A directory of answers; several processes may share it."""

    directory: Path

    def find(self, name: str) -> Response | None:
        """The answer kept under a question's hash; None, with a warning, where its file is damaged."""
        path = self._path(name)
        try:
            entry = json.loads(path.read_bytes())
            answer, intact = entry["answer"], entry["sha256"] == digest(entry["answer"])
            response = Response(answer["text"], finished=answer["finished"], usage=tuple(answer["usage"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            intact = False
        if not intact:
            log.warning("%s is damaged; its question is asked again", path)
            return None
        return response

    def keep(self, name: str, response: Response) -> None:
        """Keep an answer. Raises HarnessError where it cannot be written."""
        answer = {"text": response.text, "finished": response.finished, "usage": list(response.usage)}
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"answer": answer, "sha256": digest(answer)}), encoding="ascii")
            temporary.replace(path)

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / f"{name}.json"
