"""``harness compare``: pairs by task, tells what it saw, refuses what was not measured alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_run import card, write_cell

from baselines import grpo, skill_grpo
from harness.cards import ProtocolCard
from harness.cli import main
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.contracts import HarnessError
from harness.methods import SEED, Method
from harness.reporting.compare import compare_results
from harness.reporting.differences import sign_flip_p
from harness.reporting.frames import evaluations

ENV = "ALFWorld-v1"


def add(run: Path, method: Method | None, rate: float, seed: int = 0, protocol: ProtocolCard | None = None) -> Path:
    policy, train = ("tiny", TrainConfig(updates=5)) if method else ("random", None)
    config = CellConfig(env=EnvConfig(id=ENV), policy=policy, method=method, seed=seed, train=train)
    return write_cell(run, config, {0: 0.1, 5: rate} if method else {0: rate}, protocol=protocol)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    for seed in (0, 1, 2):
        add(directory, grpo.METHOD, 0.4, seed)
        add(directory, SEED, 0.8, seed)
    add(directory, skill_grpo.METHOD, 0.5)
    return directory


def test_two_methods_of_a_run(run: Path) -> None:
    result = compare_results(f"{run}:seed", f"{run}:grpo")
    frame = evaluations(run)
    last = frame[frame["update"] == 5].groupby(["method", "task"])["success"].mean().unstack("method")
    assert result.total.difference.value == pytest.approx((last["seed"] - last["grpo"]).mean())
    assert result.total.p_policies == pytest.approx(sign_flip_p((last["seed"] - last["grpo"]).to_numpy()))
    assert result.total.p < 0.05
    assert sum(result.counts) == pytest.approx(48)
    assert {kind: n for kind, (n, *_) in result.kinds.items()} == dict.fromkeys(("pick", "look", "clean", "heat"), 12)
    task, _, ours, theirs = result.tasks[0]
    assert ours - theirs == pytest.approx(max(last["seed"] - last["grpo"]))
    assert (ours, theirs) == pytest.approx(tuple(last.loc[task, ["seed", "grpo"]]))


def test_the_other_way_round_is_the_same_with_the_other_sign(run: Path) -> None:
    one, other = compare_results(f"{run}:seed", f"{run}:grpo"), compare_results(f"{run}:grpo", f"{run}:seed")
    assert other.total.difference.value == -one.total.difference.value
    assert other.total.p == pytest.approx(one.total.p)


def test_two_cells_and_two_contexts_of_one_training(run: Path) -> None:
    frame = evaluations(run)
    paths = [run / "cells" / frame.loc[frame["method"] == name, "cell"].iloc[0] for name in ("grpo", "skill-grpo")]
    single = compare_results(str(paths[0]), f"{paths[1]}:skill-grpo*")
    assert single.b.arm.method == "skill-grpo*"
    assert not single.total.seeds
    assert all(count.is_integer() for count in single.counts)
    with pytest.raises(HarnessError, match=r"several rows: name one as .*:ROW \(skill-grpo, skill-grpo\*\)"):
        compare_results(str(paths[0]), str(paths[1]))


def test_text_and_json_say_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{run}:seed", f"{run}:grpo"]) == 0
    text = capsys.readouterr().out
    assert main(["compare", f"{run}:seed", f"{run}:grpo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert f"A − B: +{100 * data['difference']['value']:.1f} [" in text
    assert f"3 seeds × 48 tasks resolve {100 * data['detectable']:.1f} points" in text
    assert data["protocol"]["temperature"] == 0.4
    assert main(["compare", f"{run}:seed", f"{run}:grpo", "--metric", "score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mcnemar"] is None


def test_different_protocols_are_refused_with_the_fields(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(card(ENV), temperature=1.0, panel_hash="feedfeedfeedfeed")
    hot = add(tmp_path, grpo.METHOD, 0.9, protocol=other)
    assert main(["compare", f"{run}:grpo", str(hot)]) == 2
    error = capsys.readouterr().err
    assert error.strip() == (
        "harness: not comparable: panel_hash 0123456789abcdef / feedfeedfeedfeed, temperature 0.4 / 1.0"
    )


def test_scripted_policies_have_no_prompt_that_could_differ(run: Path, tmp_path: Path) -> None:
    add(tmp_path, None, 0.05)
    result = compare_results(f"{run}:grpo", f"{tmp_path}:random")
    assert result.total.difference.low > 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{run}:sed", ": unknown row 'sed'; did you mean 'seed'"),
        ("{run}", "several rows: name one"),
        ("{run}/nowhere", "no results at .*nowhere"),
        ("{run}:grpo:x", "no results at"),
        ("{run}:seed", "are the same result"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(run: Path, given: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as error:
        compare_results(given.format(run=run), f"{run}:seed")
    assert "\n" not in str(error.value)


def test_an_unfinished_cell_is_refused(run: Path, tmp_path: Path) -> None:
    path = add(tmp_path, grpo.METHOD, 0.5)
    (path / "manifest.json").unlink()
    with pytest.raises(HarnessError, match="unfinished"):
        compare_results(f"{run}:grpo", str(path))


def test_several_environments_need_a_choice(tmp_path: Path) -> None:
    for env in (ENV, "Sokoban-v1"):
        config = CellConfig(env=EnvConfig(id=env), method=grpo.METHOD, train=TrainConfig(updates=5))
        write_cell(tmp_path, config, {0: 0.1, 5: 0.5})
        write_cell(tmp_path, config.model_copy(update={"method": SEED}), {0: 0.1, 5: 0.5})
    with pytest.raises(HarnessError, match=r"several environments: name one with --env \(ALFWorld-v1, Sokoban-v1\)"):
        compare_results(f"{tmp_path}:grpo", f"{tmp_path}:seed")
    result = compare_results(f"{tmp_path}:grpo", f"{tmp_path}:seed", "Sokoban-v1")
    assert result.a.arm.setting.env == "Sokoban-v1"
