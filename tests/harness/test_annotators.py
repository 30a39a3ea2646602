"""Skills from an endpoint: what is asked, asked again, kept, charged, and that a key is in none of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_endpoint import Endpoint, Reply, rejects, says, serving, text_of
from toy_cells import run_toy, toy_config, toy_episodes, toy_policy
from toy_envs import Doors

from harness.annotators import TEMPERATURES, Annotations, annotate, answers_directory
from harness.cards import Ledger
from harness.config import CellConfig
from harness.contracts import Episode, HarnessError, Prompt, Response, StopReason
from harness.methods import get_method
from harness.policy.answers import Answers, question
from harness.policy.base import Request, Sampling
from harness.reporting.report import read, tables, write_report
from harness.skills import skill_answer
from harness.store import CellDir

pytest.importorskip("openai")

SECRET = "sk-do-not-tell-anybody"
READABLE = skill_answer("Opened a door.", "Open the right door.")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("annotators") / "policy"
    toy_policy().save(place)
    return place


def episodes_named(*words: str) -> list[Episode]:
    """An episode for each word, which its task names; but for that they are equal."""
    found = [toy_episodes(1)[0] for _ in words]
    for episode, word in zip(found, words, strict=True):
        episode.task_text = word
    return found


def written(endpoint: Endpoint, words: tuple[str, ...], answers: Answers | None = None) -> Annotations:
    return annotate(episodes_named(*words), endpoint.name, Doors(), answers=answers)


# ---------------------------------------------------------------------------------------------- unreadable answers


def test_an_unreadable_answer_is_asked_for_again_with_another_seed() -> None:
    seen: dict[str, list[tuple[float, int]]] = {"good": [], "late": [], "never": []}

    def think(request: dict[str, Any]) -> Reply:
        word = next(word for word in seen if word in text_of(request))
        seen[word].append((request["temperature"], request["seed"]))
        readable = word == "good" or (word == "late" and len(seen[word]) == 2)
        return says(READABLE if readable else "no", usage=(100, 7))

    with serving(think) as endpoint:
        found = written(endpoint, tuple(seen))
    assert [skill.usable for skill in found.skills] == [True, True, False]
    assert [len(asked) for asked in seen.values()] == [1, 2, 3]
    assert [heat for heat, _ in seen["never"]] == list(TEMPERATURES)
    assert len({seed for _, seed in seen["never"]}) == 3
    assert found.repeated == 3
    assert (found.prompt_tokens, found.answer_tokens) == (600, 42)
    assert found.skills[2].raw == "no"
    assert found.summary == (
        "1 of 3 episodes have no readable skill; 3 answers could not be read and were asked for again"
    )


def test_a_request_that_fails_is_not_repeated_for_its_words() -> None:
    def think(request: dict[str, Any]) -> Reply:
        return rejects("no") if "odd" in text_of(request) else says(READABLE)

    with serving(think) as endpoint:
        found = written(endpoint, ("odd", "good"))
    assert [skill.usable for skill in found.skills] == [False, True]
    assert found.repeated == 0
    assert len(endpoint.requests) == 2


def test_nobody_is_asked_about_episodes_that_do_not_count() -> None:
    broken, stepless, fine = episodes_named("broken", "stepless", "fine")
    broken.stop_reason, stepless.steps = StopReason.ENV_ERROR, []
    with serving(lambda request: says(READABLE)) as endpoint:
        found = annotate([broken, stepless, fine], endpoint.name, Doors())
    assert [skill.usable for skill in found.skills] == [False, False, True]
    assert len(endpoint.requests) == 1


# ------------------------------------------------------------------------------------------------- what is kept


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path / "annotations")


def test_what_was_answered_is_not_asked_again_and_charged_alike(answers: Answers) -> None:
    def think(request: dict[str, Any]) -> Reply:
        return says("no" if "never" in text_of(request) else READABLE, usage=(50, 5))

    with serving(think) as endpoint:
        first = written(endpoint, ("a", "never"), answers)
        count = len(endpoint.requests)
        again = written(endpoint, ("never", "a"), answers)
        assert len(endpoint.requests) == count == 4
        written(endpoint, ("b",), answers)
        assert len(endpoint.requests) == 5
    with serving(think) as other:  # another address of the same model, and a server that is gone
        assert written(other, ("a",), answers).skills == first.skills[:1]
        assert other.requests == []
    assert again.skills == first.skills[::-1]
    assert (again.prompt_tokens, again.answer_tokens, again.repeated) == (200, 20, 2)
    ledger = Ledger()
    again.charge(ledger)
    assert (ledger.external_prompt_tokens, ledger.external_answer_tokens) == (200, 20)


def test_equal_episodes_are_one_question(answers: Answers) -> None:
    (episode,) = episodes_named("a")
    with serving(lambda request: says(READABLE, usage=(50, 5))) as endpoint:
        found = annotate([episode] * 3, endpoint.name, Doors())
        assert len(endpoint.requests) == 1
    assert [skill.usable for skill in found.skills] == [True] * 3
    assert found.prompt_tokens == 150


def test_answers_are_kept_as_they_come(answers: Answers) -> None:
    """A request that ends the command leaves the answers before it."""
    broken = True

    def think(request: dict[str, Any]) -> Reply:
        last = broken and "last" in text_of(request)
        return Reply(status=401, wait=0.3) if last else says(READABLE)

    with serving(think) as endpoint:
        with pytest.raises(HarnessError, match="status 401"):
            written(endpoint, ("a", "b", "last"), answers)
        broken = False
        asked = len(endpoint.requests)
        assert all(skill.usable for skill in written(endpoint, ("a", "b", "last"), answers).skills)
        assert len(endpoint.requests) == asked + 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"answer": 1, "sha256": 2}', b"\xff", None])
def test_a_damaged_answer_is_asked_for_again(
    damage: bytes | None, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(lambda request: says(READABLE)) as endpoint:
        written(endpoint, ("a",), answers)
        (path,) = answers.directory.rglob("*.json")
        path.write_bytes(path.read_bytes().replace(b"right", b"wrong") if damage is None else damage)
        assert written(endpoint, ("a",), answers).skills[0].text == "Open the right door."
        assert len(endpoint.requests) == 2
        assert f"{path} is damaged; its question is asked again" in caplog.text
        caplog.clear()
        written(endpoint, ("a",), answers)
    assert len(endpoint.requests) == 2
    assert not caplog.text


def test_any_text_is_kept(answers: Answers) -> None:
    response = Response("half a pair \ud800, NUL \0, \x1b[31m", finished=False, usage=(3, 4))
    answers.keep("ab" * 32, response)
    assert answers.find("ab" * 32) == response
    assert answers.find("cd" * 32) is None


# ------------------------------------------------------------------------------------------------------- cells


def with_endpoint(config: CellConfig, endpoint: Endpoint) -> CellConfig:
    assert config.analysis is not None
    assert config.stage1 is not None
    return config.model_copy(
        update={
            "stage1": config.stage1.model_copy(update={"annotator": endpoint.name}),
            "analysis": config.analysis.model_copy(update={"annotator": endpoint.name, "max_tokens": 99}),
        }
    )


def external_seed(directory: Path, **train: Any) -> CellConfig:
    method = get_method("seed")
    assert method.teacher is not None
    teacher = method.teacher.model_copy(update={"analyzer": "external"})
    return toy_config(directory, method.model_copy(update={"teacher": teacher}), **train)


@pytest.fixture
def analyst() -> Iterator[Endpoint]:
    with serving(analyses) as endpoint:
        yield endpoint


def analyses(request: dict[str, Any]) -> Reply:
    """Some answers are readable at once, some when asked again."""
    text = text_of(request)
    readable = len(text) % 3 > 0 or request["temperature"] > 0
    return says(READABLE if readable else "hm", usage=(len(text), 9))


def test_a_whole_cell_with_an_external_analyst(
    directory: Path, tmp_path: Path, analyst: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_endpoint(external_seed(directory, updates=1), analyst)
    cell = CellDir(tmp_path / "cells" / config.hash)
    run_toy(config, cell.path)
    asked = len(analyst.requests)
    kept = list((tmp_path / "annotations").rglob("*.json"))
    assert len(kept) == asked
    metrics = cell.records("metrics.jsonl")
    assert [record["skill/parse_rate"] for record in metrics] == [1.0]
    assert all(0 <= record["skill/asked_again"] < 1 for record in metrics)
    ledger = cell.read_json("manifest.json")["ledger"]
    assert ledger["external_answer_tokens"] >= 9 * asked
    assert ledger["external_prompt_tokens"] > ledger["external_answer_tokens"]
    assert ledger["analyzer_tokens"] == 0  # the policy itself wrote nothing
    assert {skill["author"] for skill in cell.records("skills.jsonl")} == {"some/model"}

    # Another run with these answers that breaks off at the end of its update: nothing is paid twice, nothing changes.
    again = CellDir(tmp_path / "again" / "cells" / config.hash)
    again.path.parent.mkdir(parents=True)
    (tmp_path / "annotations").rename(tmp_path / "again" / "annotations")
    checkpoint = CellDir.checkpoint

    def broken_off(cell: CellDir, update: int) -> Any:
        if update:
            raise RuntimeError("the end of the first update")
        return checkpoint(cell, update)

    monkeypatch.setattr(CellDir, "checkpoint", broken_off)
    with pytest.raises(RuntimeError, match="the end of the first update"):
        run_toy(config, again.path)
    monkeypatch.setattr(CellDir, "checkpoint", checkpoint)
    run_toy(config, again.path)
    assert len(analyst.requests) == asked
    assert [timeless(r) for r in again.records("metrics.jsonl")] == [timeless(r) for r in metrics]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    ledger = {name: value for name, value in record["ledger"].items() if not name.endswith("_seconds")}
    return {**record, "ledger": ledger}


def test_the_report_tells_what_the_analyst_took_and_nothing_tells_the_key(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def think(request: dict[str, Any]) -> Reply:
        """Some requests are rejected, and one fails, with words that quote the key."""
        nonlocal asked
        asked += 1
        return rejects(f"bad key {SECRET}", 400 if asked % 4 else 503) if asked % 4 in (0, 1) else analyses(request)

    with serving(think) as endpoint:
        config = with_endpoint(external_seed(directory, updates=1), endpoint)
        cell = run_toy(config, tmp_path / "cells" / config.hash)
    ledger = cell.read_json("manifest.json")["ledger"]
    write_report(tmp_path, prices=(1e6, 2e6))
    table = (tmp_path / "tables" / "ledger.csv").read_text()
    cost = ledger["external_prompt_tokens"] + 2 * ledger["external_answer_tokens"]
    assert "external cost" in table.splitlines()[0]
    assert str(cost) in table.replace(",", "")
    assert "episodes have no readable skill" in caplog.text
    everything = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(everything) > 10
    assert not [path for path in everything if SECRET.encode() in path.read_bytes()]
    assert SECRET not in caplog.text


def test_without_an_analyst_there_is_nothing_to_price(directory: Path, tmp_path: Path) -> None:
    config = toy_config(directory, updates=1)
    run_toy(config, tmp_path / "cells" / config.hash)
    results = read(tmp_path)
    assert not [column.name for column in tables(results)["ledger"].columns if "external" in column.name]
    with pytest.raises(HarnessError, match="none was asked here"):
        tables(results, prices=(1.0, 1.0))


def test_a_cell_on_its_own_keeps_its_answers_itself(tmp_path: Path) -> None:
    assert answers_directory(tmp_path / "cells" / "abc") == tmp_path / "annotations"
    assert answers_directory(tmp_path / "abc") == tmp_path / "abc" / "annotations"


def test_the_prefix_of_endpoints_is_no_part_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Seen(Exception):
        pass

    def endpoint(spec: str, calls: Any) -> None:
        made.append(spec)
        raise Seen

    monkeypatch.setattr("harness.annotators.ApiPolicy", endpoint)
    for annotator in ("m@http://localhost:1/v1", "api:m@http://localhost:1/v1"):
        with pytest.raises(Seen):
            annotate(toy_episodes(1), annotator, Doors())
    assert made == ["api:m@http://localhost:1/v1"] * 2


def test_whatever_an_answer_depends_on_makes_another_question() -> None:
    def asked(
        text: str = "a", images: Any = (), key: int = 0, heat: float = 0.0, most: int = 9, model: str = "m"
    ) -> str:
        return question(model, Request(Prompt(text, images), (key,)), Sampling(heat, most))

    black, white = (np.full((28, 28, 3), shade, np.uint8) for shade in (0, 255))
    pictured = [asked("<image>", (black,)), asked("<image>", (white,))]
    found = [asked(), asked("b"), asked(key=1), asked(heat=0.7), asked(most=8), asked(model="n"), *pictured]
    assert len(set(found)) == len(found)
    assert asked() == found[0]
