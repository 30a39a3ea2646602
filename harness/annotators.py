"""Who writes the skills of stage 1: the environment's scripted analyst or an OpenAI-compatible endpoint.

The endpoint's key is read from ``OPENAI_API_KEY`` by the client and never stored; endpoints without keys need none.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import PIL.Image

from harness.contracts import IMAGE_PLACEHOLDER, AgentEnv, Episode, HarnessError, Image, Prompt, Skill
from harness.skills import read_skill, render_analysis, skill_answer

SCRIPTED = "scripted"
_RETRIES = 5
_TIMEOUT_SECONDS = 300.0


def annotate(
    episodes: Sequence[Episode],
    annotator: str,
    env: AgentEnv,
    style: str = "paper",
    max_tokens: int = 4096,
    update: int = -1,
    workers: int = 16,
) -> list[Skill]:
    """One skill per episode, in order; unusable where the annotator had no readable answer.

    Args:
        episodes: Finished episodes.
        annotator: ``scripted`` or ``MODEL@BASE_URL``.
        env: The environment, for its scripted analyst.
        style: Style of the analysis prompt an endpoint is sent.
        max_tokens: Longest answer of an endpoint.
        update: Recorded in the skills; -1 is stage 1.
        workers: Requests to an endpoint at a time.

    Raises:
        HarnessError: Bad ``annotator``, client not installed, key or model refused, or not one answer received.
    """
    if annotator == SCRIPTED:
        return [_scripted(env, episode, update) for episode in episodes]
    model, url = parse_annotator(annotator)
    prompts = [render_analysis(episode, style, latest=len(episode.steps)) for episode in episodes]
    return [read_skill(answer, model, update) for answer in _ask(prompts, model, url, max_tokens, workers)]


def parse_annotator(annotator: str) -> tuple[str, str]:
    """(model, base URL) of an endpoint annotator. Raises HarnessError where the text is not MODEL@BASE_URL."""
    match = re.fullmatch(r"(\S+?)@(https?://\S+)", annotator)
    if not match:
        raise HarnessError(
            f"annotator {annotator!r} is neither {SCRIPTED!r} nor MODEL@BASE_URL, e.g. my-model@http://localhost:8000/v1"
        )
    return match[1], match[2]


def _scripted(env: AgentEnv, episode: Episode, update: int) -> Skill:
    written = env.annotate(episode)
    return read_skill(skill_answer(*written) if written else "", SCRIPTED, update)


def _ask(prompts: Sequence[Prompt], model: str, url: str, max_tokens: int, workers: int) -> list[str]:
    """One greedy answer per prompt, in order; empty where none came after all retries.

    Time-outs, 408, 409, 429 and 5xx are tried again by the client, waiting ever longer or as the server asks.
    """
    try:
        import openai
    except ImportError as error:
        raise HarnessError("an endpoint annotator needs the openai client: pip install 'openai>=2'") from error

    client = openai.OpenAI(
        base_url=url,
        api_key=os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=_RETRIES,
        timeout=_TIMEOUT_SECONDS,
    )

    def ask(prompt: Prompt) -> tuple[str, str]:
        """(answer, problem); one of the two is empty."""
        try:
            completion = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": _content(prompt)}],
                temperature=0.0,
                max_tokens=max_tokens,
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            # The server's own text may quote the key, so only the status is passed on.
            raise HarnessError(
                f"{url} refuses {model!r} with status {error.status_code}: check URL, model name and OPENAI_API_KEY"
            ) from None
        except openai.APIStatusError as error:
            return "", f"status {error.status_code}"
        except (openai.APIError, ValueError) as error:  # ValueError: the body was no JSON
            return "", type(error).__name__
        proper = isinstance(completion, openai.types.chat.ChatCompletion)
        if not (proper and completion.choices and completion.choices[0].message):
            return "", "an answer without choices"
        return completion.choices[0].message.content or "", ""

    executor = ThreadPoolExecutor(workers)
    try:
        results = list(executor.map(ask, prompts))
    finally:
        executor.shutdown(cancel_futures=True)
        client.close()
    if results and all(problem for _, problem in results):
        raise HarnessError(f"not one of {len(results)} requests to {url} was answered; the last gave {results[-1][1]}")
    return [answer for answer, _ in results]


def _content(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as message parts: text and PNG data URLs, in the order of the placeholders."""
    texts = prompt.text.split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        if text:
            parts.append({"type": "text", "text": text})
        if index < len(prompt.images):
            parts.append({"type": "image_url", "image_url": {"url": _data_url(prompt.images[index])}})
    return parts


def _data_url(image: Image) -> str:
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
