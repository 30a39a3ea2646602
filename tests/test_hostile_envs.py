"""Every registered environment reads any answer, takes any action and quotes any text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from nasty import few, texts

from harness.contracts import IMAGE_PLACEHOLDER, AgentEnv, HarnessError, Turn, View
from harness.registry import ENVS, make_env, registered

MEGABYTE = 10**6


@pytest.fixture(scope="module", params=sorted(registered(ENVS)))
def env(request: pytest.FixtureRequest) -> Iterator[AgentEnv]:
    try:
        made = make_env(request.param)
    except HarnessError as error:
        pytest.skip(str(error))
    with closing(made):
        made.reset(seed=0)
        yield made


@few
@given(texts)
def test_any_answer_is_read_and_any_action_taken(env: AgentEnv, answer: str) -> None:
    action, valid = env.parse(answer)
    assert isinstance(action, str)
    assert isinstance(valid, bool)
    for taken in (action, answer):
        env.foresee([taken])
        observation, _, terminated, truncated, info = env.step(taken)
        assert isinstance(observation["text"], str)
        assert 0 <= info["score"] <= 1
        if terminated or truncated:
            env.reset(seed=0)


@few
@given(texts, texts, texts)
@pytest.mark.parametrize("style", ["paper", "compact"])
def test_a_prompt_quotes_any_text_and_keeps_its_pictures(
    env: AgentEnv, style: str, task: str, seen: str, done: str
) -> None:
    images = env.reset(seed=0)[0]["images"]
    view = View(task, 3, (Turn(1, seen, done), Turn(2, done, task)), seen, images, (task, done))
    prompt = env.prompt(view, style)
    assert prompt.text.count(IMAGE_PLACEHOLDER) == len(prompt.images) == len(images)
    prompt.text.encode()
    env.brief(seen)
    env.choices(view)
    env.respond(done, seen)


@pytest.mark.parametrize("piece", ["a", "<", "<action>", '{"action": ', "(", "9", "9**", "[", "search[", "\x00", "漢"])
def test_a_megabyte_is_read_and_taken_in_seconds(env: AgentEnv, piece: str) -> None:
    env.reset(seed=0)
    text = piece * (MEGABYTE // len(piece))
    start = time.perf_counter()
    for answer in (text, f"<think></think><action>search[{text}]</action>", f'{{"action": "{text}"}}'):
        action, _ = env.parse(answer)
        if any(env.step(action)[2:4]):
            env.reset(seed=0)
    assert time.perf_counter() - start < 20
