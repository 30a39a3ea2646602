"""No first observation holds a secret, and hindsight that reads nothing but the episode tells none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from harness.audit_journal import leaks
from harness.contracts import AgentEnv, Task, mentions
from harness.registry import make_env
from harness.traces import Trace, episode, play, random_chooser

SECRETIVE = ("ALFWorld-v1", "WebShop-v1", "SearchQA-v1")


@pytest.fixture(params=SECRETIVE)
def env(request: pytest.FixtureRequest) -> Iterator[AgentEnv]:
    with closing(make_env(request.param)) as made:
        yield made


def known(env: AgentEnv, task: Task, trace: Trace) -> str:
    """What an agent saw and did."""
    return "\n".join(f"{moment.observation['text']}\n{moment.action}" for moment in trace)


def test_the_way_to_success_shows_a_secret_that_the_start_did_not(env: AgentEnv) -> None:
    for task in env.panel("train", 12):
        trace = play(env, task, lambda env, trace: env.oracle())
        secrets = env.secrets()
        assert secrets
        assert not any(mentions(trace[0].observation["text"], secret) for secret in secrets)
        assert any(mentions(known(env, task, trace), secret) for secret in secrets)


def test_the_scripted_analyst_leaks_nothing_and_the_oracle_does(env: AgentEnv) -> None:
    told = 0
    for number, task in enumerate(env.panel("train", 12)):
        trace = play(env, task, random_chooser(number))
        seen, secrets = known(env, task, trace), env.secrets()
        note = env.annotate(episode(env, task, trace))
        assert note is None or not leaks(note[1], seen, secrets)
        env.reset(options={"task": task})
        told += leaks(env.oracle_skill(), trace[0].observation["text"], secrets)
    assert told >= 6  # in a shop another product may do as well


@pytest.mark.parametrize("env_id", ["Sokoban-v1", "EZPoints-v1"])
def test_where_everything_is_seen_there_are_none(env_id: str) -> None:
    with closing(make_env(env_id)) as env:
        env.reset(seed=0)
        assert env.secrets() == ()


def test_an_answer_that_the_question_names_is_no_secret() -> None:
    with closing(make_env("SearchQA-v1")) as env:
        task = env.panel("train", 1).tasks[0]
        asked = Task(
            task.id,
            task.env,
            task.split,
            task.kind,
            {**task.spec, "question": "Which is older, Arta or Bel?", "answers": ["Arta", "the town"]},
            task.fingerprint,
        )
        env.reset(options={"task": asked})
        assert env.secrets() == ("the town",)


@pytest.mark.parametrize(
    ("text", "phrase", "found"),
    [
        ("Find mug 1 in drawer 2.", "mug 1", True),
        ("Find mug 12 in drawer 2.", "mug 1", False),
        ("open B03041, then buy", "b03041", True),
        ("answer (1945).", "1945", True),
        ("anything", "", False),
        ("a+b", "a+b", True),
    ],
)
def test_mentions_are_whole_words_in_any_case(text: str, phrase: str, found: bool) -> None:
    assert mentions(text, phrase) is found
