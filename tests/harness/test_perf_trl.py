"""``harness perf trl``: both sides do the same work."""

from __future__ import annotations

import io
import os

import pytest
import torch
from rich.console import Console

from harness.contracts import HarnessError, Prompt
from harness.perf import trl
from harness.perf.measure import Settings, main
from harness.policy.load import load_local
from harness.policy.local import LocalPolicy


@pytest.fixture(scope="module")
def tiny() -> LocalPolicy:
    return load_local("tiny")


def test_text_twin_computes_the_same(tiny: LocalPolicy) -> None:
    twin = trl.text_twin(tiny, fresh=False)
    rows = [(Prompt("You are in a room. go to desk 1"), tiny.answer_ids("<action>look</action>"))]
    torch.testing.assert_close(twin.score(rows).logprobs, tiny.score(rows).logprobs, atol=1e-5, rtol=0)


def test_settings_of_the_allocator_are_put_back() -> None:
    before = dict(os.environ)
    with trl.kept_memory():
        assert {name: os.environ[name] for name in trl.MALLOC} == trl.MALLOC
    assert dict(os.environ) == before


def test_missing_trl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"pip install 'seed-harness\[bench\]'"):
        main("trl", "tiny", 16, Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("turns", [1, 3])
def test_both_sides_train_on_as_many_rows(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(trl, "UPDATES", 2)
    ours, theirs = trl.compare(Settings("tiny", 16), turns)
    assert ours.rows == theirs.rows == 16 * turns
    assert ours.tokens == pytest.approx(theirs.tokens, rel=0.15)
    assert set(ours.seconds) == set(trl.PHASES)
    assert set(theirs.seconds) == {"rollout", "scoring", "optimisation"}
