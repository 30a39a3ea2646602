"""Endpoints as policies: what is asked, what is made of bad answers, what is kept, and that the key leaks nowhere."""

from __future__ import annotations

import base64
import io
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from fake_endpoint import Brain, Endpoint, Reply, pictures_of, planned, rejects, says, serving, text_of
from rich.console import Console
from toy_envs import Doors

from harness import cli
from harness.config import EnvConfig, EnvPlan, Recipe
from harness.contracts import HarnessError, Prompt, Response, StopReason
from harness.policy.api import GONE, ApiPolicy, Calls, check_endpoint, data_url
from harness.policy.base import Request, Sampling
from harness.policy.load import check_policy_spec, trainable
from harness.recipes import expand
from harness.reporting.report import comparison_text
from harness.store import CellDir

pytest.importorskip("openai")

SECRET = "sk-do-not-tell-anybody"
SAMPLING = Sampling(temperature=0.7, max_tokens=9)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


def requests(*words: str) -> list[Request]:
    return [Request(Prompt(word), (5, number)) for number, word in enumerate(words)]


def ask(brain: Brain, *words: str, **calls: Any) -> tuple[list[Response], Endpoint]:
    with serving(brain) as endpoint:
        return ApiPolicy(endpoint.spec, Calls(**calls)).generate(requests(*words), SAMPLING), endpoint


# --------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("api:", "not of the form api:MODEL@BASE_URL, e.g. api:my-model@http://localhost:8000/v1"),
        ("api:model", "not of the form"),
        ("api:model@localhost:8000", "not of the form"),
        ("api:model@ftp://host", "not of the form"),
        (f"api:model@https://host/v1?key={SECRET}", "not of the form"),
        (f"api:model@https://me:{SECRET}@host/v1", "must hold no password; the key belongs in OPENAI_API_KEY"),
    ],
)
def test_a_bad_name_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as caught:
        check_policy_spec(spec)
    assert SECRET not in str(caught.value)


def test_an_endpoint_is_known_by_model_and_url(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = check_policy_spec("api:org/model@v2@http://host:1/v1")
    assert fingerprint == check_policy_spec("api:org/model@v2@http://host:1/v1/")
    assert fingerprint != check_policy_spec("api:org/model@v3@http://host:1/v1")
    assert not trainable("api:org/model@v2@http://host:1/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    assert fingerprint == check_policy_spec("api:org/model@v2@http://host:1/v1")


def test_a_missing_client_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"pip install 'openai>=2'"):
        check_endpoint("api:m@http://host/v1")


def test_a_key_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-…")
    with pytest.raises(HarnessError, match="OPENAI_API_KEY holds characters that no key has"):
        ApiPolicy("api:m@http://host/v1")


# ------------------------------------------------------------------------------------------------- what is asked


def test_answers_keep_the_order_of_their_requests_and_come_concurrently() -> None:
    words = [f"word{number:02}" for number in range(12)]
    gate = threading.Barrier(4, timeout=5)

    def think(request: dict[str, Any]) -> Reply:
        return says(f"echo {text_of(request)}", usage=(7, 2))

    with serving(think) as endpoint:
        # Nobody is answered before four have asked, and a fifth is not there.
        endpoint.answer, plain = lambda handler: (gate.wait(), plain(handler))[1], endpoint.answer  # type: ignore
        policy = ApiPolicy(endpoint.spec, Calls(concurrency=4))
        responses = policy.generate(requests(*words), SAMPLING)
        assert policy.generate([], SAMPLING) == []
    assert [response.text for response in responses] == [f"echo {word}" for word in words]
    assert {(response.usage, response.tokens, response.finished) for response in responses} == {((7, 2), 2, True)}
    assert endpoint.most_held <= 4


def test_what_a_request_holds() -> None:
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    asked = Request(Prompt("before <image> after", (picture,)), (1, 2, 3))
    with serving(lambda request: says("yes")) as endpoint:
        policy = ApiPolicy(endpoint.spec)
        for request in (asked, asked, Request(asked.prompt, (1, 2, 4))):
            policy.generate([request], SAMPLING)
    first, again, other = endpoint.requests
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("some/model", 0.7, 9)
    assert [part["type"] for part in first["messages"][0]["content"]] == ["text", "image_url", "text"]
    png = base64.b64decode(pictures_of(first)[0].removeprefix("data:image/png;base64,"))
    assert np.array_equal(np.asarray(PIL.Image.open(io.BytesIO(png))), picture)
    assert first["seed"] == again["seed"] != other["seed"]
    assert 0 <= first["seed"] < 2**31


def test_an_endpoint_without_seeds_is_asked_without(caplog: pytest.LogCaptureFixture) -> None:
    def think(request: dict[str, Any]) -> Reply:
        return rejects("extra fields not permitted: seed", 422) if "seed" in request else says("yes")

    responses, endpoint = ask(think, "a", "b", concurrency=1)
    assert [response.text for response in responses] == ["yes", "yes"]
    assert ["seed" in request for request in endpoint.requests] == [True, False, False]
    assert "takes no seeds" in caplog.text


# ------------------------------------------------------------------------------------------------- bad answers


def test_an_endpoint_that_misbehaves_costs_only_what_it_leaves_unanswered() -> None:
    policy_error, overflow = StopReason.POLICY_ERROR, StopReason.CONTEXT_OVERFLOW
    plan: dict[str, tuple[list[Reply], str, StopReason | None, str]] = {
        "good": ([says("fine")], "fine", None, ""),
        "busy": ([Reply(status=429), Reply("oops", 500), says("late")], "late", None, ""),
        "hiccup": ([Reply("{broken"), Reply('{"choices": []}'), says("at last")], "at last", None, ""),
        "null": ([says(None)], "", None, ""),
        "down": ([Reply(status=503)], "", policy_error, "status 503"),
        "slow": ([Reply(wait=6.0)], "", policy_error, "nothing within 2 s"),
        "cut": ([Reply("x" * 1000, cut=True)], "", policy_error, "connection failed (RemoteProtocolError)"),
        "nojson": ([Reply("{broken")], "", policy_error, "no chat completion"),
        "nochoice": ([Reply('{"id": "1", "choices": []}')], "", policy_error, "no chat completion"),
        "list": ([Reply("[]")], "", policy_error, "no chat completion"),
        "odd": ([rejects(f"{SECRET} is odd")], "", policy_error, "[key] is odd"),
        "long": ([rejects("maximum context length is 8192 tokens")], "", overflow, "context length"),
    }
    brain = planned({word: replies for word, (replies, *_) in plan.items()})
    responses, endpoint = ask(brain, *plan, retries=2, timeout=2.0)
    asked = Counter(text_of(request) for request in endpoint.requests)
    assert asked == dict.fromkeys(plan, 3) | dict.fromkeys(("good", "null", "odd", "long"), 1)
    assert endpoint.most_held > 1
    for word, (_, text, failure, error), response in zip(
        plan, [(*row,) for row in plan.values()], responses, strict=True
    ):
        assert (response.text, response.failure) == (text, failure), word
        assert error in response.error, word
        assert "\n" not in response.error
        assert SECRET not in response.error


def test_an_answer_that_was_cut_is_not_finished() -> None:
    responses, _ = ask(lambda request: says("and then", finish="length"), "word")
    assert (responses[0].text, responses[0].finished) == ("and then", False)


def test_a_server_is_given_the_time_it_asks_for() -> None:
    replies = [Reply(status=429, headers={"retry-after": "0.4"}), says("yes")]
    started = time.monotonic()
    responses, endpoint = ask(planned({"word": replies}), "word")
    assert responses[0].text == "yes"
    assert len(endpoint.requests) == 2
    assert time.monotonic() - started >= 0.4


# ------------------------------------------------------------------------------------------------- giving up


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_ends_the_run(status: int) -> None:
    with pytest.raises(HarnessError, match=rf"refuses 'some/model' with status {status}") as caught:
        ask(lambda request: rejects(f"bad key {SECRET}", status), "a", "b")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        policy = ApiPolicy(f"api:m@http://127.0.0.1:{unused.getsockname()[1]}/v1", Calls(retries=0))
        with pytest.raises(HarnessError, match=r"nobody answers at http://127.0.0.1:\d+/v1"):
            policy.generate(requests("a"), SAMPLING)


def test_an_endpoint_that_stops_answering_is_gone() -> None:
    good = Reply(says("yes").body)
    replies = [good] + [Reply(status=503)] * 1000
    words = ["word"] * (GONE + 1)
    with pytest.raises(HarnessError, match=f"left {GONE} requests in a row unanswered: status 503"):
        ask(planned({"word": replies}), *words, concurrency=1, retries=0)
    replies = [good] + [Reply(status=503)] * (GONE - 1) + [good]
    responses, _ = ask(planned({"word": replies}), *words, concurrency=1, retries=0)
    assert [response.failure is None for response in responses] == [True] + [False] * (GONE - 1) + [True]


def test_an_endpoint_that_takes_no_prompt_is_an_error_with_its_reason() -> None:
    with pytest.raises(HarnessError, match=r"not one of 2 requests .* temperature must be 1"):
        ask(lambda request: rejects("temperature must be 1"), "a", "b")


def test_an_interrupt_does_not_wait_for_answers() -> None:
    def think(request: dict[str, Any]) -> Reply:
        if text_of(request) == "refused":
            return rejects("no", 401)
        return Reply(wait=20.0)

    started = time.monotonic()
    with pytest.raises(HarnessError, match="status 401"):
        ask(think, "refused", "slow")
    assert time.monotonic() - started < 10.0


# ------------------------------------------------------------------------------------------------ whole cells


ENV = Doors()
TASKS = ENV.panel("eval", 12).tasks


def shown(number: int) -> str:
    """The first picture of a task, as an endpoint gets it."""
    observation, _ = Doors().reset(options={"task": TASKS[number]})
    return data_url(observation["images"][0])


def evaluate(endpoint: Endpoint, out: Path, *options: str) -> int:
    arguments = ["eval", "--policy", endpoint.spec, "--env", "toy_envs:Doors", "--panel-size", "12", "--out", str(out)]
    return cli.main([*arguments, *options])


def one_cell(out: Path) -> CellDir:
    (path,) = (out / "cells").iterdir()
    return CellDir(path)


@pytest.fixture
def printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """All output so far. In the end the key must be neither there nor in any file that was written."""
    parts: list[str] = []

    def collect() -> str:
        parts.extend(capfd.readouterr())
        return "".join(parts)

    yield collect
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in collect()


def test_an_evaluation_is_a_cell_like_any_other(tmp_path: Path, printed: Callable[[], str]) -> None:
    poison, talkative = shown(3), shown(7)

    def think(request: dict[str, Any]) -> Reply:
        if poison in pictures_of(request):
            return rejects(f"oops {SECRET}", 500)
        if talkative in pictures_of(request):
            return rejects(f"context length, {SECRET}")
        return says("left", usage=(100, 4))

    with serving(think) as endpoint:
        assert evaluate(endpoint, tmp_path, "--price-in", "1", "--price-out", "10", "--concurrency", "3") == 0
    cell = one_cell(tmp_path)
    results = cell.records("evals.jsonl")[0]["results"]
    assert [result["task"] for result in results] == [task.id for task in TASKS]
    assert results[3]["stop_reason"] == "policy_error"
    assert results[7]["stop_reason"] == "context_overflow"
    others = [result for number, result in enumerate(results) if number not in (3, 7)]
    for result in others:
        won = result["kind"] == "left"
        assert (result["success"], result["steps"]) == (won, 1 if won else 2)
    steps = sum(result["steps"] for result in others)
    played = cell.read_json("manifest.json")["played"]
    assert played == {"episodes": 12, "env_steps": steps, "prompt_tokens": 100 * steps, "sampled_tokens": 4 * steps}
    assert "1 episodes ended in an error and are not counted" in printed()
    assert f"{100 * steps:,} of prompts, {4 * steps:,} of answers  cost: {140 * steps / 1e6:.4f}" in printed()
    assert endpoint.most_held <= 3
    Console().print(comparison_text(tmp_path))  # what `harness report` prints
    assert re.search(r"\n +some/model +\d", printed())


def test_what_was_finished_before_the_endpoint_failed_is_not_asked_again(
    tmp_path: Path, printed: Callable[[], str]
) -> None:
    broken, asked = True, []

    def think(request: dict[str, Any]) -> Reply:
        asked.append(pictures_of(request)[0])
        if broken and asked[-1] == shown(0):
            return rejects(SECRET, 500)
        if broken and asked[-1] == shown(9):
            return rejects(f"bad key {SECRET}", 401)
        return says("left")

    with serving(think) as endpoint:
        assert evaluate(endpoint, tmp_path, "--batch", "4") == 2
        assert "refuses 'some/model' with status 401" in printed()
        cell = one_cell(tmp_path)
        kept = [record["task"] for record in cell.records("episodes.jsonl") if record["stop_reason"] != "policy_error"]
        assert 4 <= len(kept) < 9
        broken = False
        asked.clear()
        assert evaluate(endpoint, tmp_path, "--batch", "4") == 0
    missing = [number for number, task in enumerate(TASKS) if task.id not in kept]
    assert {0, 9} <= set(missing)  # what the endpoint broke off is played again
    assert {picture for picture in asked if picture in map(shown, range(12))} == set(map(shown, missing))
    results = cell.records("evals.jsonl")[0]["results"]
    assert [result["task"] for result in results] == [task.id for task in TASKS]
    assert all(result["stop_reason"] in ("success", "failure") for result in results)


def test_an_endpoint_is_a_baseline_but_cannot_be_trained() -> None:
    spec = "api:m@http://host/v1"
    envs = [EnvPlan(env=EnvConfig(id="Sokoban-v1"))]
    recipe = Recipe(name="r", policy=spec, baselines=["random", spec], methods=[], envs=envs)
    assert [(cell.policy, cell.method) for cell in expand(recipe)] == [("random", None), (spec, None)]
    with pytest.raises(HarnessError, match=r"policy 'api:m@http://host/v1' cannot be trained"):
        expand(recipe.model_copy(update={"methods": ["grpo"]}))


def test_prices_belong_to_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--policy", "random", "--env", "Sokoban-v1", "--price-in", "1"]
    assert cli.main(arguments) == 2
    assert cli.main([*arguments, "--price-out", "1"]) == 2
    assert "belong together" in (errors := capsys.readouterr().err)
    assert "'random' is none" in errors
    assert os.environ["OPENAI_API_KEY"] == SECRET
