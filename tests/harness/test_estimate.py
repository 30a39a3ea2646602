"""Estimates before a run: by hand, against the ledger of a cell that ran, and against what torch really keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_cells import toy_config, toy_policy
from toy_policies import toy_tokenizer
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from harness import cli, dry_run
from harness.cell import run_cell
from harness.config import (
    AnalysisConfig,
    CellConfig,
    EngineConfig,
    EnvConfig,
    EvalConfig,
    ImitationConfig,
    LoraConfig,
    Stage1Config,
    TrainConfig,
)
from harness.contracts import Prompt
from harness.estimate import (
    ASSUMED,
    LOGITS,
    Lengths,
    activation_bytes,
    adapter_parameters,
    assumed_lengths,
    flops,
    memory_of,
    seconds,
    work_of,
)
from harness.measured import measured_lengths, measured_rate
from harness.methods import Reweighting, get_method
from harness.policy.local import LocalPolicy
from harness.policy.sizes import KNOWN, Size, size_in, size_of
from harness.recipes import expand, load_recipe, vary
from harness.store import CellDir

LENGTHS = Lengths(10, prompt=100, answer=20, analysis_prompt=300, analysis_answer=40, kept=0.5, basis="by hand")
SIZE = Size(1000, layers=2, width=8, attention=8, keys=4, mlp=16, vocabulary=50)


def cell(method: str, **train: Any) -> CellConfig:
    """Five updates of 2 tasks x 4 attempts: 8 episodes, 80 steps each."""
    chosen = get_method(method)
    settings = {"updates": 5, "tasks": 2, "group": 4, "mini_batches": 3, **train}
    return CellConfig(
        env=EnvConfig(id="Sokoban-v1", history=0, max_steps=20, max_prompt_tokens=200, max_response_tokens=80),
        policy="tiny",
        method=chosen,
        teacher="tiny-teacher" if chosen.teacher and chosen.teacher.weights == "external" else "",
        train=TrainConfig(**settings),
        stage1=Stage1Config(tasks=3, attempts=2, epochs=2, batch=4) if chosen.start == "hindsight_sft" else None,
        analysis=AnalysisConfig(max_tokens=800, max_prompt_tokens=2000) if chosen.writes_skills else None,
        eval=EvalConfig(every=2),
    )


# ------------------------------------------------------------------------------------------------------- by hand


def test_grpo_by_hand() -> None:
    work = work_of(cell("grpo"), LENGTHS, evaluation_tasks=16)
    assert (work.episodes, work.env_steps, work.sampled_tokens) == (40, 400, 8000)
    assert work.sampling == 400 * 120
    rows = 5 * 40  # half of the steps are in groups of one outcome
    assert (work.trained_tokens, work.training, work.optimizer_steps) == (rows * 20, rows * 120, 15)
    assert work.scoring == pytest.approx(4 * 40 * 120)  # the reference, but in the first update
    assert (work.analyzer_tokens, work.rescored_tokens, work.teacher) == (0, 0, 0)
    assert work.evaluation_episodes == 4 * 16  # at 0, 2, 4 and 5
    assert flops(cell("grpo"), work, SIZE) == pytest.approx(2000 * (48000 + 19200 + 3 * 24000))


def test_seed_by_hand() -> None:
    work = work_of(cell("seed"), LENGTHS, evaluation_tasks=16)
    assert (work.episodes, work.env_steps) == (40 + 6, 460)
    assert work.analyzer_tokens == 40 * 40
    rows = 5 * 80  # where there is no advantage there is still a skill
    assert work.rescored_tokens == rows * 20
    assert work.scoring == pytest.approx(rows * (120 + 20) + 4 * 80 * 120)  # the skill is half of the analysis
    assert work.trained_tokens == rows * 20 + 6 * 2 * 40
    assert work.optimizer_steps == 15 + 2 * 2


def test_an_external_teacher_costs_its_own_size() -> None:
    config, large = cell("opd-teacher"), replace(SIZE, parameters=7000)
    work = work_of(config, LENGTHS, 1)
    assert flops(config, work, SIZE, large) - flops(config, work, SIZE) == pytest.approx(2 * 7000 * work.teacher)
    extra = seconds(config, work, SIZE, ASSUMED, large) - seconds(config, work, SIZE, ASSUMED)
    assert extra == pytest.approx(2 * 7000 * work.teacher / (ASSUMED.peak * ASSUMED.scoring))


def test_imitation_alone_by_hand() -> None:
    """3 x 2 episodes of 10 steps by the teacher, half of them successes, learned twice; no update."""
    plan = ImitationConfig(tasks=3, attempts=2, epochs=2, batch=4)
    config = cell("grpo", updates=0).model_copy(update={"imitation": plan})
    work = work_of(config, LENGTHS, 0)
    assert (work.episodes, work.sampling, work.teacher) == (6, 0, 60 * 120)
    assert (work.trained_tokens, work.training) == (30 * 2 * 20, 30 * 2 * 120)
    every = config.model_copy(update={"imitation": plan.model_copy(update={"episodes": "all"})})
    assert work_of(every, LENGTHS, 0).trained_tokens == 60 * 2 * 20


def test_what_changes_the_work() -> None:
    plain = work_of(cell("grpo"), LENGTHS, 1)
    assert work_of(cell("grpo", kl=0), LENGTHS, 1).scoring == 0
    assert work_of(cell("grpo", max_rows=10), LENGTHS, 1).trained_tokens == 5 * 10 * 20
    vllm = cell("grpo").model_copy(update={"engine": EngineConfig(kind="vllm")})
    assert work_of(vllm, LENGTHS, 1).scoring == pytest.approx(plain.scoring + 5 * 40 * 120)
    external = work_of(cell("opd-teacher"), LENGTHS, 1)
    assert external.teacher == pytest.approx(5 * 80 * 120)
    assert work_of(cell("rlsd"), LENGTHS, 1).rescored_tokens == plain.trained_tokens
    assert isinstance(get_method("rlsd").signal, Reweighting)
    half = cell("seed").model_copy(
        update={"method": vary(get_method("seed"), {"teacher": {"episodes": "successes"}}, "")}
    )
    assert work_of(half, LENGTHS, 1).analyzer_tokens == 20 * 40
    assert work_of(half, LENGTHS, 1).trained_tokens == (0.5 + 0.25) * 400 * 20 + 6 * 2 * 40
    adapters = cell("grpo", lora={})
    assert flops(adapters, plain, SIZE) == pytest.approx(2000 * (48000 + 19200 + 2 * 24000))


def test_assumed_lengths() -> None:
    assumed = assumed_lengths(cell("seed"))
    assert (assumed.steps, assumed.prompt, assumed.answer, assumed.analysis_answer) == (10, 100, 20, 40)
    assert assumed.analysis_prompt == 10 * (100 + 20)
    assert assumed_lengths(cell("grpo")).analysis_prompt == 0


def test_seconds_by_hand() -> None:
    work = work_of(cell("grpo"), LENGTHS, 16)
    kinds = (48000 + work.evaluation) / ASSUMED.sampling + 19200 / ASSUMED.scoring + 72000 / ASSUMED.training
    assert seconds(cell("grpo"), work, SIZE, ASSUMED) == pytest.approx(2000 * kinds / ASSUMED.peak)


# ------------------------------------------------------------------------------------------------- a real ledger


@pytest.mark.parametrize("method", ["grpo", "seed"])
def test_agrees_with_the_ledger(method: str, tmp_path: Path) -> None:
    """With the lengths that a cell had its counts and FLOPs are found again; with assumed ones their magnitude."""
    toy_policy().save(tmp_path / "policy")
    config = toy_config(tmp_path / "policy", method)
    unread = {"imitation": None, "stage1": config.stage1 if method == "seed" else None}  # as a recipe leaves them out
    env = config.env.model_copy(update={"max_steps": 4, "history": 2})
    config = config.model_copy(update={"env": env, **unread})
    place = CellDir(tmp_path / "cell")
    run_cell(config, place, lambda progress: None)
    ledger = place.read_json("manifest.json")["ledger"]
    size = size_in(tmp_path / "policy")
    assert size.parameters == place.read_json("manifest.json")["policy"]["parameters"]

    lengths = measured_lengths(config, [(place, config)])
    work = work_of(config, lengths, 1)
    for name in ("env_steps", "episodes", "sampled_tokens", "optimizer_steps"):
        assert getattr(work, name) == pytest.approx(ledger[name], rel=0.1), name
    for name in ("trained_tokens", "rescored_tokens", "analyzer_tokens"):
        assert getattr(work, name) == pytest.approx(ledger[name], rel=0.35), name
    assert 0.8 < flops(config, work, size) / ledger["flops"] < 1.25
    guess = work_of(config, assumed_lengths(config), 1)
    assert 0.2 < flops(config, guess, size) / ledger["flops"] < 5  # prompts are far from their limit here
    rate = measured_rate([(place, config)])
    assert rate == pytest.approx(ledger["flops"] / ledger["wall_seconds"])


# -------------------------------------------------------------------------------------------------------- memory


def test_memory_by_hand() -> None:
    config = cell("grpo", token_budget=100)
    memory = memory_of(config, SIZE)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (4000, 4000, 8000, 4000)
    assert memory.cache == 4 * 2 * 2 * 4 * (128 * (2 * 200 + 80))
    shared = memory_of(config, SIZE, gpus=4)
    assert (shared.weights, shared.gradients, shared.optimizer) == (4000 + 1000, 1000, 2000)
    rounded = memory_of(config.model_copy(update={"precision": "bfloat16"}), SIZE)
    assert rounded.weights == 4000  # what is trained stays in float32
    assert rounded.reference == 2 * 1000 + 2 * 400  # what is read is rounded, but for the embedding
    adapters = memory_of(cell("grpo", lora={"rank": 2}), SIZE)
    trained = adapter_parameters(SIZE, LoraConfig(rank=2))
    assert trained == 2 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
    assert (adapters.reference, adapters.gradients) == (0, 4 * trained)
    vllm = config.model_copy(update={"engine": EngineConfig(kind="vllm", gpu_memory=0.5)})
    assert memory_of(vllm, SIZE).cache == 40e9
    assert memory.peak == 4000 + 8000 + 4000 + max(memory.cache, 4000 + memory.activations)
    assert memory_of(cell("seed"), SIZE).teacher == 0
    assert memory_of(cell("opd-teacher"), SIZE, SIZE).teacher == 4000


def test_memory_of_what_is_held_for_a_pass() -> None:
    config = cell("grpo", token_budget=100)
    assert memory_of(config, SIZE).activations == activation_bytes(SIZE, 100, False, False) + LOGITS
    half = config.model_copy(update={"precision": "bfloat16"})
    assert memory_of(half, SIZE).cache == memory_of(config, SIZE).cache / 2
    assert memory_of(half, SIZE).activations == activation_bytes(SIZE, 100, True, False) + 2 * (1000 - 400) + LOGITS


def test_a_frozen_analyzer_is_held() -> None:
    config, method = cell("seed", kl=0), get_method("seed")
    assert method.teacher
    frozen = method.model_copy(update={"teacher": method.teacher.model_copy(update={"analyzer": "start"})})
    assert memory_of(config, SIZE).reference == 0
    assert memory_of(config.model_copy(update={"method": frozen}), SIZE).reference == 4000


def kept_bytes(policy: LocalPolicy) -> tuple[float, int]:
    """What a scoring pass keeps for its backward pass, the weights apart, and over how many tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(4):
        words = rng.integers(1000, size=120)
        rows.append((Prompt(" ".join(map(str, words[:100]))), policy.answer_ids(" ".join(map(str, words[100:])))))
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.score(rows)
    return sum(size for size, _ in kept.values()), sum(policy.prompt_tokens(p) + len(a) for p, a in rows)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_activations_are_what_torch_keeps(bf16: bool, checkpointing: bool) -> None:
    """Two models that differ in depth alone: what the additional layers keep, within a fifth."""
    tokenizer = toy_tokenizer()
    found = {}
    for layers in (2, 6):
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_sliding_window=False,
        )
        policy = LocalPolicy(Qwen2ForCausalLM(config), tokenizer, None, "test")
        policy.compute_in("bfloat16" if bf16 else "float32", trained=True)
        if checkpointing:
            policy.checkpoint_gradients()
        found[layers], tokens = kept_bytes(policy)
    size = Size(0, 2, 64, 64, 32, 176, len(tokenizer))
    more = activation_bytes(Size(**{**vars(size), "layers": 6}), tokens, bf16, checkpointing)
    less = activation_bytes(size, tokens, bf16, checkpointing)
    assert found[6] - found[2] == pytest.approx(more - less, rel=0.2)


# --------------------------------------------------------------------------------------------------------- sizes


def test_known_sizes() -> None:
    """Built on the meta device, which takes no memory, models have the parameters that are written down."""
    text = {"vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16, "tie_word_embeddings": True}
    three = {**text, "intermediate_size": 11008, "num_hidden_layers": 36, "num_key_value_heads": 2}
    smaller = {**text, "intermediate_size": 6144, "num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128}
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    with torch.device("meta"):
        models = {
            "Qwen/Qwen2.5-3B-Instruct": Qwen2ForCausalLM(Qwen2Config(**three)),
            "Qwen/Qwen3-1.7B": Qwen3ForCausalLM(Qwen3Config(**smaller)),
            "Qwen/Qwen2.5-VL-3B-Instruct": Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=three, vision_config=tower, tie_word_embeddings=True)
            ),
        }
    for name, model in models.items():
        known = KNOWN[name]
        assert sum(parameter.numel() for parameter in model.parameters()) == known.parameters
        decoder = model.config.get_text_config()
        assert (decoder.num_hidden_layers, decoder.hidden_size) == (known.layers, known.width)
        assert known.embeddings == model.get_input_embeddings().weight.numel()


def test_sizes_of_directories() -> None:
    tiny = size_of("tiny")
    assert tiny
    assert (tiny.layers, tiny.width, tiny.attention, tiny.keys, tiny.mlp, tiny.tied) == (2, 64, 64, 32, 192, True)
    assert size_of("somebody/some-model") is None


# ------------------------------------------------------------------------------------------------------- the command


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["run", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_dry_run_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is not here is known by its published size, if at all; nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    out = printed(capsys, "paper/ezpoints")
    assert "Qwen/Qwen2.5-VL-3B-Instruct: not on this machine" in out
    assert "3,754,622,976 parameters" in out
    assert "GPU hours of A800 80GB with 312 TFLOP/s" in out
    assert "nothing was measured" in out
    assert "each of 8 GPUs" in out
    out = printed(capsys, "paper/ezpoints", "policy=somebody/some-model")
    assert "somebody/some-model: not on this machine and of unknown size" in out
    assert "12.8k" in out  # episodes are known all the same
    out = printed(capsys, "quick", "envs=[EZPoints-v1]")
    assert "419,264 parameters, counted in its files" in out
    assert "needs.gpus is 0" in out


def test_dry_run_uses_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    shares = {"sampling": 0.02, "scoring": 0.4, "training": 0.25}
    check = {"device": "Test GPU", "peak_flops": 1e15, "memory_bytes": 2e11}
    models = [
        {"name": "3B", "parameters": 3e9, "share_of_peak": shares},
        {"name": "1", "parameters": 1, "share_of_peak": {}},
    ]
    Path("results/gpu-check.json").write_text(json.dumps({**check, "models": models}))
    out = printed(capsys, "paper/ezpoints")
    assert "GPU hours of Test GPU with 1,000 TFLOP/s, of which sampling reaches 2%" in out
    assert "measured by scripts/gpu_check.sh on 3B" in out
    Path("results/gpu-check.json").write_text(json.dumps({**check, "memory_bytes": 1e9, "models": models}))
    assert "GB, and Test GPU has 1: the table of its memory shows what fits" in printed(capsys, "paper/ezpoints")
    Path("results/gpu-check.json").write_text("{}")
    assert cli.main(["run", "paper/ezpoints", "--dry-run"]) == 2
    assert "does not hold a GPU check" in capsys.readouterr().err


def test_what_is_finished_is_not_missing() -> None:
    work = work_of(cell("grpo"), LENGTHS, 1)
    plan = dry_run.Plan(cell("grpo"), False, work, LENGTHS, "", SIZE, flops=1e9, hours=2.0)
    table = dry_run._estimates_table([plan, replace(plan, finished=True)])
    last = [list(column.cells)[-1] for column in table.columns]
    assert last[:3] == ["all that is missing", "1", dry_run.short(work.episodes)]
    assert last[-3:] == ["1G", "-", "2"]
    unknown = dry_run._estimates_table([replace(plan, absent="no data")])
    assert [list(column.cells)[-1] for column in unknown.columns][-4:] == ["≥" + last[-4], "1G", "-", "≥2"]


def test_hours_at_the_speed_of_finished_cells_hold_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "measured_rate", lambda alike: 1e9)
    recipe = load_recipe("quick", ["envs=[EZPoints-v1]", "methods=[grpo]", "baselines=[]", "seeds=[0]"])
    plan = next(plan for plan in dry_run.plans_of(recipe, expand(recipe), tmp_path) if plan.cell.train)
    assert plan.size
    assert plan.flops
    assert plan.hours == pytest.approx((plan.flops + 2 * plan.size.parameters * plan.work.evaluation) / 1e9 / 3600)


def test_counts_are_short() -> None:
    assert [dry_run.short(n) for n in (0, 999, 1000, 12_345, 999_600, 4.56e9, 1.2e19)] == [
        "0",
        "999",
        "1k",
        "12.3k",
        "1M",
        "4.56G",
        "12E",
    ]
    assert [dry_run.decimal(n) for n in (0, 0.001, 0.5, 82.66, 1234.5)] == ["0", "<0.01", "0.5", "82.7", "1,234"]
