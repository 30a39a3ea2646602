"""Engines that sample in a policy's place: what they are asked, the gap to the trainer, whole cells with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
import torch
from toy_cells import run_toy, toy_config, toy_policy
from toy_policies import GREEDY, SAMPLED, picture, requests_for, toy_text_policy, toy_tokenizer

from harness.cards import Ledger
from harness.config import CellConfig, EngineConfig, LoraConfig, Recipe, TrainConfig
from harness.contracts import HarnessError, Prompt
from harness.methods import get_method
from harness.policy.base import Request, Sampling
from harness.policy.encode import Role
from harness.policy.engines import VllmEngine, as_tokens_prompt, check_engine, longest_sequence
from harness.policy.load import load_local
from harness.policy.local import LocalPolicy
from harness.recipes import expand
from harness.rows import Row, rescored, score_rows
from harness.store import CellDir
from harness.trainer import Trainer

VLLM = EngineConfig(kind="vllm")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision model's directory."""
    place = tmp_path_factory.mktemp("engines") / "policy"
    toy_policy().save(place)
    return place


def engine_of(directory: Path, longest: int = 400) -> VllmEngine:
    return VllmEngine(load_local(str(directory)), directory, VLLM, "float32", longest)


def scores(policy: LocalPolicy, requests: list[Request], answers: list[tuple[int, ...]], temperature: float) -> list:
    rows = [(request.prompt, answer) for request, answer in zip(requests, answers, strict=True)]
    return [row.tolist() for row in score_rows(policy, rows, temperature)]


# ------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize("vision", [True, False])
def test_answers_are_the_policys_own_with_their_log_probs(
    vision: bool, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(monkeypatch)
    if not vision:
        directory = tmp_path / "text"
        toy_text_policy(toy_tokenizer()).save(directory)
    engine = engine_of(directory)
    policy = engine.policy
    requests = requests_for(policy, 8)
    for sampling in (SAMPLED, Sampling(0.5, 12), GREEDY):
        responses = engine.generate(requests, sampling)
        known = scores(policy, requests, [r.token_ids for r in responses], sampling.temperature or 1.0)
        for response, expected in zip(responses, known, strict=True):
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
            assert response.finished == (response.token_ids[-1] in policy.eos_ids)
            assert response.text == policy.tokenizer.decode(response.token_ids, skip_special_tokens=True)
    own = policy.generate(requests, GREEDY)
    assert [response.token_ids for response in responses] == [response.token_ids for response in own]
    assert any(request.prompt.images for request in requests) == vision


def test_an_answer_depends_on_its_key_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    engine = engine_of(directory)
    prompt = Prompt("left middle right door")
    asked = [Request(prompt, (1, key)) for key in (1, 2, 3, 1)]
    ids = [response.token_ids for response in engine.generate(asked, SAMPLED)]
    assert ids[0] == ids[3] == engine.generate(asked[3:], SAMPLED)[0].token_ids
    assert len(set(ids)) > 1
    assert engine.generate([], SAMPLED) == []


def test_each_picture_is_one_token_of_the_prompt(directory: Path) -> None:
    policy = load_local(str(directory))
    prompt = policy.encode(Prompt("a<image><image>b", (picture(1), picture(2, 56))))
    given = as_tokens_prompt(prompt)
    token = policy.model.config.image_token_id
    assert given["prompt_token_ids"].count(token) == 2
    assert len(given["prompt_token_ids"]) == len(prompt) - int((prompt.roles == Role.IMAGE).sum()) + 2
    assert [image.size for image in given["multi_modal_data"]["image"]] == [(84, 84), (56, 56)]
    assert "multi_modal_data" not in as_tokens_prompt(policy.encode(Prompt("a")))


def test_a_prompt_that_vllm_reads_otherwise_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_vllm.install(monkeypatch)
    engine = engine_of(directory)
    inputs = llm._inputs
    monkeypatch.setattr(llm, "_inputs", lambda self, prompt: (inputs(self, prompt)[0] + [0], inputs(self, prompt)[1]))
    with pytest.raises(HarnessError, match=r"it processes the pictures of .* otherwise; use engine\.kind local"):
        engine.generate([Request(Prompt("<image>left", (picture(1),)), (1,))], GREEDY)


def test_new_weights_are_what_answers_next(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_vllm.install(monkeypatch)
    engine = engine_of(directory)
    requests = requests_for(engine.policy, 6)
    before = [response.token_ids for response in engine.generate(requests, GREEDY)]
    with torch.no_grad():
        for parameter in engine.policy.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert [response.token_ids for response in engine.generate(requests, GREEDY)] == before
    engine.rest()
    with pytest.raises(ValueError, match="the engine rests"):
        engine.generate(requests, GREEDY)
    engine.load_weights(engine.policy)
    after = [response.token_ids for response in engine.generate(requests, GREEDY)]
    assert after == [response.token_ids for response in engine.policy.generate(requests, GREEDY)] != before
    assert llm.made[0].log == ["load", "sleep", "reload"]


# ------------------------------------------------------------------------------------------------------ the gap


def row(prompt: Prompt, ids: tuple[int, ...], logps: tuple[float, ...], **other: Any) -> Row:
    return Row(prompt, ids, logps, episode=0, group=0, advantage=1.0, **other)


def test_the_gap_and_its_correction_by_hand() -> None:
    rows = [row(Prompt("a"), (1, 2), (-1.0, -2.0)), row(Prompt("b"), (3,), (-3.0,)), row(Prompt("c"), (4,), (-4.0,))]
    scored = {0: torch.tensor([-1.5, -1.0]), 2: torch.tensor([-4.0])}
    new, statistics = rescored(rows, scored, EngineConfig(kind="vllm", cap=2.0))
    assert new[0].logp_old == (-1.5, -1.0)
    assert new[0].correction == pytest.approx((np.exp(-0.5), 2.0))  # e^1 is cut
    assert new[1] is rows[1]
    assert statistics == pytest.approx(
        {
            "sampler/gap": 0.5,
            "sampler/gap_max": 1.0,
            "sampler/kl": -0.5 / 3,
            "sampler/weight": (np.exp(-0.5) + 2 + 1) / 3,
        }
    )
    new, statistics = rescored(rows, scored, EngineConfig(kind="vllm", correction="none"))
    assert new[0].correction is None
    assert set(statistics) == {"sampler/gap", "sampler/gap_max", "sampler/kl"}
    assert rescored(rows, {}, VLLM) == (rows, {})
    _, below = rescored([row(Prompt("a"), (1, 2), (-1.0, -2.0))], {0: torch.tensor([-4.0, -1.5])}, VLLM)
    assert below["sampler/gap_max"] == 3.0


def test_scoring_again_is_charged() -> None:
    policy, ledger = toy_policy(), Ledger()
    trainer = Trainer(policy, get_method("grpo"), TrainConfig(updates=1, kl=0.0), seed=0)
    one = row(Prompt("a"), (30, 31), (-1.0, -1.0))
    trainer.rescore([one], VLLM, ledger)
    assert ledger.flops == 2.0 * policy.parameters * (policy.prompt_tokens(one.prompt) + 2)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_the_correction_scales_the_policy_gradient_of_its_tokens(factor: float) -> None:
    settings = toy_config("tiny", kl=0.0, grad_clip=1e9).train
    assert settings is not None
    prompt, ids = Prompt("left door"), (30, 31, 32)

    def gradients(correction: tuple[float, ...] | None, advantage: float) -> list[torch.Tensor]:
        policy = toy_policy()
        (old,) = score_rows(policy, [(prompt, ids)], 1.0)
        given = row(prompt, ids, tuple(old.tolist()), correction=correction)
        trainer = Trainer(policy, get_method("grpo"), settings, seed=0)
        trainer.update([Row(**{**vars(given), "advantage": advantage})], 1, Ledger())
        return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]

    for advantage in (1.0, -1.0):
        plain, weighted = gradients(None, advantage), gradients((factor,) * 3, advantage)
        scaled = gradients(None, factor * advantage)
        assert all(torch.equal(a, b) for a, b in zip(weighted, scaled, strict=True))
        largest = max(float(p.abs().max()) for p in plain)
        for a, b in zip(weighted, plain, strict=True):
            torch.testing.assert_close(a, factor * b, atol=1e-5 * largest, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(gradients((1.0,) * 3, advantage), plain, strict=True))


# ------------------------------------------------------------------------------------------------------- cells


def with_engine(config: CellConfig, **engine: Any) -> CellConfig:
    return config.model_copy(update={"engine": EngineConfig(kind="vllm", **engine)})


def test_a_cell_samples_with_the_engine_and_trains_with_the_policy(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake_vllm.install(monkeypatch)
    monkeypatch.setattr(LocalPolicy, "generate", lambda *_: pytest.fail("the policy samples itself"))
    config = with_engine(toy_config(directory, "seed", updates=2))
    cell = run_toy(config, tmp_path / "cell")
    assert cell.finished
    metrics = cell.records("metrics.jsonl")
    assert all(record["sampler/gap_max"] < 1e-4 for record in metrics)
    assert all(abs(record["sampler/weight"] - 1) < 1e-4 for record in metrics)
    assert any(record["skill/parse_rate"] > 0 for record in metrics)
    # after stage 1, at its end and after each of two updates
    assert llm.made[0].log == ["load", *["sleep", "reload"] * 3]
    assert llm.made[0].max_model_len == longest_sequence(config) == 272


def test_a_frozen_analyzer_writes_with_the_starts_weights(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake_vllm.install(monkeypatch)
    method = get_method("seed")
    assert method.teacher is not None
    frozen = method.model_copy(update={"teacher": method.teacher.model_copy(update={"analyzer": "start"})})
    run_toy(with_engine(toy_config(directory, frozen, updates=1)), tmp_path / "cell")
    assert llm.made[0].log == ["load", *["sleep", "reload"] * 3]  # the start, its analyses, the update


def test_a_sampler_that_differs_is_told_and_corrected(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(monkeypatch, blur=1.3)
    config = toy_config(directory, "grpo", updates=1, kl=0.0)
    corrected = run_toy(with_engine(config, cap=1.05), tmp_path / "a").records("metrics.jsonl")[0]
    left = run_toy(with_engine(config, correction="none"), tmp_path / "b").records("metrics.jsonl")[0]
    for record in (corrected, left):
        assert record["sampler/gap"] > 1e-3
        assert record["sampler/gap_max"] > record["sampler/gap"]
        assert record["approx_kl"] == pytest.approx(0, abs=1e-5)  # theta_old is the trainer's own
    assert corrected["sampler/weight"] < 1.05
    assert "sampler/weight" not in left
    assert corrected["loss/policy"] != left["loss/policy"]
    assert corrected["ledger"]["flops"] == left["ledger"]["flops"]


def test_adapters_are_added_into_the_weights_that_the_engine_gets(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    fake_vllm.install(monkeypatch)
    config = with_engine(toy_config(directory, "grpo", updates=2, lora=LoraConfig(rank=2), learning_rate=0.1))
    metrics = run_toy(config, tmp_path / "cell").records("metrics.jsonl")
    assert all(record["sampler/gap_max"] < 1e-4 for record in metrics)


def test_without_an_engine_nothing_is_scored_again(directory: Path, tmp_path: Path) -> None:
    (record,) = run_toy(toy_config(directory, "grpo", updates=1), tmp_path / "a").records("metrics.jsonl")
    assert not [name for name in record if name.startswith("sampler/")]


# ----------------------------------------------------------------------------------------------------- refusals


def test_without_vllm_the_command_is_named(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"pip install 'seed-harness\[vllm\]'"):
        run_toy(with_engine(toy_config(directory)), tmp_path / "cell")
    assert not CellDir(tmp_path / "cell").finished


def test_one_engine_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    check_engine(1)
    with pytest.raises(HarnessError, match="samples for a single training process, and there are 2"):
        check_engine(2)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"cap": 3.0}, "cap belongs to kind vllm"),
        ({"gpu_memory": 0.5}, "gpu_memory belongs to kind vllm"),
        ({"kind": "vllm", "correction": "none", "cap": 3.0}, "cap belongs to the truncated correction"),
        ({"kind": "vlm"}, "'local' or 'vllm'"),
    ],
)
def test_settings_without_a_meaning_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**engine)


def test_recipes_give_the_engine_to_cells_that_run_a_model() -> None:
    envs = [{"env": {"id": "Sokoban-v1"}}]
    recipe = Recipe(name="r", methods=["grpo"], baselines=["random"], envs=envs, engine=VLLM)  # type: ignore[arg-type]
    kinds = {cell.method.name if cell.method else cell.policy: cell.engine.kind for cell in expand(recipe)}
    assert kinds == {"random": "local", "tiny": "vllm", "grpo": "vllm"}
    hot = recipe.model_copy(update={"train": recipe.train.model_copy(update={"temperature": 2.5})})
    with pytest.raises(HarnessError, match=r"train.temperature 2.5: vLLM samples at 0 or from 0.01 to 2"):
        expand(hot)
