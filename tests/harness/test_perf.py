"""``harness perf``: the references are fair, what is counted is right, and the command runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from harness.contracts import AgentEnv, HarnessError, Prompt, Speed
from harness.naive import NaivePolicy, full_logits_scores
from harness.perf import rollout, update
from harness.perf.measure import Measurement, Result, Settings, main, peak_megabytes
from harness.perf.memory import BUDGET, UPDATE_ROWS, update_peak
from harness.perf.phases import Phases
from harness.policy.base import Request, Sampling
from harness.policy.local import LocalPolicy
from harness.policy.tiny import build_tokenizer, new_tiny
from harness.registry import env_class
from harness.rollout import Rules

PICTURE = np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8)
PROMPTS = [Prompt("guess a number"), Prompt("before <image> between <image> after", (PICTURE, PICTURE[:42, ::-1]))]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LocalPolicy:
    """A random policy, saved; ``spec`` is its directory."""
    directory = tmp_path_factory.mktemp("policy") / "random"
    made = new_tiny(build_tokenizer(["guess a number between 1 and 9"] * 9, [], vocab_size=300), seed=0)
    made.save(directory)
    made.spec = str(directory)
    return made


@pytest.fixture
def naive(policy: LocalPolicy) -> NaivePolicy:
    return NaivePolicy(Path(policy.spec), sorted(policy.banned_ids))


@pytest.fixture
def only_ezpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = rollout.quick_cells
    for part in (rollout, update):
        monkeypatch.setattr(part, "quick_cells", lambda *a: [c for c in cells(*a) if c.env.id == "EZPoints-v1"])
    monkeypatch.setattr(rollout, "REPEATS", 1)
    monkeypatch.setattr(update, "UPDATES", 1)


@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "pictures"])
def test_both_read_the_same_prompt_and_answer_alike(policy: LocalPolicy, naive: NaivePolicy, prompt: Prompt) -> None:
    inputs = naive.inputs(prompt)
    assert inputs["input_ids"][0].tolist() == policy.encode(prompt).ids.tolist()
    with torch.no_grad():
        theirs = naive.model(**inputs).logits[0, -1].log_softmax(0)
        theirs = theirs.index_fill(0, torch.tensor(naive.suppressed), -torch.inf).log_softmax(0)
    [response] = policy.generate([Request(prompt, (0,))], Sampling(temperature=0, max_tokens=1))
    assert response.token_ids[0] == int(theirs.argmax())
    assert response.logprobs[0] == pytest.approx(float(theirs.max()), abs=1e-4)


def test_naive_answers_never_hold_banned_tokens(policy: LocalPolicy, naive: NaivePolicy) -> None:
    torch.manual_seed(0)
    rules = Rules(history=0, max_steps=1, max_prompt_tokens=99, sampling=Sampling(1.0, 40))
    text, tokens = naive.answer(PROMPTS[0], rules)
    assert 1 <= tokens <= 40
    assert "<|" not in text


def test_full_logits_give_the_same_scores(policy: LocalPolicy) -> None:
    rows = [(Prompt("guess a number"), policy.answer_ids("1 and 9")), (Prompt("a"), policy.answer_ids("between"))]
    ids = [(policy.encode(prompt).ids.tolist(), answer) for prompt, answer in rows]
    mass = torch.log1p(-sum_of_banned(policy, ids))  # ours excludes banned tokens
    torch.testing.assert_close(
        policy.score(rows).logprobs, full_logits_scores(policy.model, ids) - mass, atol=1e-4, rtol=0
    )


def sum_of_banned(policy: LocalPolicy, rows: list[tuple[list[int], tuple[int, ...]]]) -> torch.Tensor:
    """Probability of banned tokens at every answer token."""
    masses = []
    for prompt, answer in rows:
        ids = torch.tensor([[*prompt, *answer]])
        logits = policy.model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids)).logits[0, len(prompt) - 1 : -1]
        masses.append(logits.softmax(-1)[:, sorted(policy.banned_ids)].sum(-1))
    return torch.cat(masses)


def test_peak_memory_is_seen() -> None:
    def work() -> None:
        torch.ones(2**25).sum()  # 128 MiB, gone when the function ends

    assert 100 < peak_megabytes(work) < 200


def test_goals() -> None:
    fast = Measurement("rollout", "", 9.0, 2.0, "tokens/s", 4.0, "at least")
    heavy = Measurement("memory", "", 9.0, 2.0, "MB", 0.5, "at most")
    assert fast.ratio == heavy.ratio == 4.5
    assert fast.met
    assert not heavy.met
    assert Measurement("rollout", "", 1.0, 2.0, "tokens/s", None, "at least").met


def test_phases_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def outer(self) -> None:
            spend(2)
            self.inner()

        def inner(self) -> None:
            spend(5)

    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("harness.perf.phases.cpu_seconds", lambda: now)
    work, phases = Work(), Phases()
    phases.watch(work, "outer", "a")
    phases.watch(work, "inner", "b")
    for extra in (100, 1, 3):  # the first update warms up
        with phases.update("rest"):
            spend(extra)
            work.outer()
    work.outer()  # outside of an update nothing is charged
    assert phases.medians() == {"rest": 2, "a": 2, "b": 5}
    assert phases.total() == 9


def test_memory_of_an_update_follows_its_token_budget_and_nothing_else(policy: LocalPolicy) -> None:
    usual, many = update_peak(policy), update_peak(policy, rows=4 * UPDATE_ROWS)
    assert many < 1.1 * usual
    assert update_peak(policy, numbers=48) < 1.1 * usual
    assert 1.7 < update_peak(policy, rows=4 * UPDATE_ROWS, budget=2 * BUDGET) / many < 2.3


@pytest.mark.usefixtures("only_ezpoints")
@pytest.mark.parametrize("part", ["rollout", "update"])
def test_command_measures(part: str, policy: LocalPolicy) -> None:
    text = io.StringIO()
    code = main(part, policy.spec, 8, Console(file=text, width=120))
    assert f"{part}  EZPoints-v1" in text.getvalue()
    assert code in (0, 1)  # whether goals are met is not this test's business


def test_policy_without_weights_is_refused() -> None:
    with pytest.raises(HarnessError, match="cannot be trained"):
        main("rollout", "random", 8, Console(file=io.StringIO()))


def test_engine_that_is_missing_is_named_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def benchmark(self: AgentEnv) -> Iterator[object]:
        raise HarnessError("not installed")

    monkeypatch.setattr(env_class("ALFWorld-v1"), "benchmark", benchmark)
    text = io.StringIO()
    assert main("engine", "tiny", 8, Console(file=text, width=120)) == 0
    assert "engine ALFWorld-v1 not measured: not installed" in text.getvalue()


def measured(part: Iterator[Result]) -> Measurement:
    (found,) = [result for result in part if isinstance(result, Measurement)]
    return found


@pytest.mark.usefixtures("only_ezpoints")
def test_ours_is_ours_in_rollout(policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "cpu_seconds", iter([0.0, 1.0, 1.0, 1001.0]).__next__)
    found = measured(rollout.rollout_speed(Settings(policy.spec, 8), lambda text: None))
    assert found.ours > found.reference
    assert (found.goal, found.direction) == (rollout.ROLLOUT_GOAL, "at least")


@pytest.mark.usefixtures("only_ezpoints")
def test_ours_is_ours_in_update(policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter([5.0, 4.0])  # SEED's, then GRPO's
    monkeypatch.setattr(Phases, "total", lambda self: next(totals))
    found = measured(update.update_cost(Settings(policy.spec, 8), lambda text: None))
    assert (found.ours, found.reference) == (5.0, 4.0)
    assert (found.goal, found.direction) == (update.UPDATE_GOAL, "at most")


@pytest.mark.parametrize(("ours", "code"), [(9.0, 0), (1.0, 1)])
def test_a_missed_goal_is_an_exit_code(ours: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.perf.engine.registered", lambda group: ["ALFWorld-v1"])
    monkeypatch.setattr(env_class("ALFWorld-v1"), "benchmark", lambda self: [Speed("steps", ours, 2.0, 4.0)])
    text = io.StringIO()
    assert main("engine", "tiny", 8, Console(file=text, width=120)) == code
    assert "≥ 4" in text.getvalue()
