"""Low-rank adapters: what they change and what not, how they are written, and whole cells that train them."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pyarrow.parquet
import pytest
import torch
from toy_cells import run_in_child, run_toy, toy_config, toy_policy
from toy_envs import Doors
from toy_policies import SAMPLED, close, requests_for, rows_of

from harness.config import LoraConfig
from harness.contracts import HarnessError
from harness.policy.load import load_local, load_policy
from harness.policy.lora import NAME, add_adapters, fold_adapters, load_adapters, save_adapters, without_adapters
from harness.recipes import expand, load_recipe
from harness.rows import forward_flops, training_flops
from harness.store import CellDir

RANK_4 = LoraConfig(rank=4, alpha=8)


def with_adapters(policy, config=RANK_4, key=(0,)):
    copied = policy.clone()
    copied.model.requires_grad_(True)
    add_adapters(copied, config, key)
    return copied


def learn(policy, rows, steps=3):
    """A few steps towards the rows; returns the optimizer."""
    optimizer = torch.optim.AdamW([p for p in policy.model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (-policy.score(rows).logprobs.mean()).backward()
        optimizer.step()
    return optimizer


def scores(policy, rows):
    with torch.no_grad():
        return policy.score(rows).logprobs


@pytest.fixture(params=["tiny", "text_only"])
def policy(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def rows(policy):
    requests = requests_for(policy, 6)
    return rows_of(requests, policy.generate(requests, SAMPLED))


# ------------------------------------------------------------------------------------------------ what they change


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fresh_adapters_change_nothing(policy, rows, precision):
    policy = policy.clone()
    policy.compute_in(precision)
    adapted = with_adapters(policy)
    assert torch.equal(scores(adapted, rows), scores(policy, rows))
    requests = requests_for(policy, 6)
    assert adapted.generate(requests, SAMPLED) == policy.generate(requests, SAMPLED)
    assert adapted.fingerprint == policy.fingerprint


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_adapters_learn_and_the_start_stays_within_reach(policy, rows, precision):
    policy = policy.clone()
    policy.compute_in(precision)
    adapted = with_adapters(policy)
    optimizer = learn(adapted, rows)
    parameters = dict(adapted.model.named_parameters())
    learned = [name for name, parameter in parameters.items() if parameter.grad is not None]
    assert learned == [name for name in parameters if ".lora_" in name]
    assert {parameters[name].dtype for name in learned} == {torch.float32}
    assert len(optimizer.state) == len(learned)
    start = without_adapters(adapted)
    assert torch.equal(scores(start, rows), scores(policy, rows))
    assert (scores(adapted, rows) - scores(policy, rows)).mean() > 0.1
    assert start.fingerprint == policy.fingerprint != adapted.fingerprint
    requests = requests_for(policy, 6)
    assert start.generate(requests, SAMPLED) == policy.generate(requests, SAMPLED)
    assert adapted.generate(requests, SAMPLED) != policy.generate(requests, SAMPLED)
    assert all(parameters[name].requires_grad for name in learned)


def test_first_values_are_a_function_of_their_key(policy):
    state = torch.get_rng_state()
    one, same, other = (with_adapters(policy, key=key) for key in [(5, 6), (5, 6), (5, 7)])
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (layers.adapters[0].lora_A[NAME].weight for layers in (one, same, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_alpha_over_rank_scales_what_adapters_add(policy):
    """RANK_4 has alpha 8."""
    layer = with_adapters(policy).adapters[0]
    with torch.no_grad():
        layer.lora_B[NAME].weight.normal_()
    torch.testing.assert_close(layer.get_delta_weight(NAME), 2 * layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight)


def test_targets(policy):
    """The decoder's alone: never the vision tower, the embeddings or the head."""
    layers = len(policy.model.get_decoder().layers)
    assert len(with_adapters(policy).adapters) == 7 * layers
    attention = with_adapters(policy, LoraConfig(targets="attention"))
    assert len(attention.adapters) == 4 * layers
    assert not any("visual" in name and ".lora_" in name for name, _ in attention.model.named_parameters())
    bare = policy.clone()
    bare.decoder.text = torch.nn.Identity()
    with pytest.raises(HarnessError, match=r"train\.lora\.targets 'all-linear' matches no linear layer of"):
        add_adapters(bare, RANK_4, (0,))


def test_a_frozen_base_costs_a_third_less_to_train(policy, rows):
    prompts = [prompt for prompt, _ in rows]
    assert training_flops(policy, prompts, 9) == 3 * forward_flops(policy, prompts, 9)
    adapted = with_adapters(policy)
    assert training_flops(adapted, prompts, 9) == 2 * forward_flops(adapted, prompts, 9)


# ----------------------------------------------------------------------------------------------------------- files


def test_merged_weights_score_as_the_adapters_do(policy, rows, tmp_path: Path):
    adapted = with_adapters(policy)
    learn(adapted, rows)
    adapted.save(tmp_path / "merged")
    merged = load_local(str(tmp_path / "merged"))
    close(scores(merged, rows), scores(adapted, rows), 1e-5)
    assert merged.fingerprint == adapted.fingerprint
    without_adapters(adapted).save(tmp_path / "start")
    assert load_local(str(tmp_path / "start")).fingerprint == policy.fingerprint


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_folding_makes_a_new_start(policy, rows, tmp_path: Path, precision):
    policy = policy.clone()
    policy.compute_in(precision)
    adapted = with_adapters(policy)
    learn(adapted, rows)
    before = scores(adapted, rows)
    assert 0.9 < fold_adapters(adapted, (1,)) < 1.1
    assert torch.equal(scores(without_adapters(adapted), rows), scores(adapted, rows))
    close(scores(adapted, rows), before, 1e-5 if precision == "float32" else 0.5)
    adapted.save(tmp_path / "start")
    read = load_policy(str(tmp_path / "start"), Doors(), precision=precision)
    assert torch.equal(scores(read, rows), scores(adapted, rows))


def test_what_rounding_loses_is_told(policy, rows):
    """What is learned in steps too small for weights in bfloat16 is lost when it is added to them."""
    for precision, share in (("float32", 1.0), ("bfloat16", 0.0)):
        rounded = policy.clone()
        rounded.compute_in(precision)
        adapted = with_adapters(rounded)
        with torch.no_grad():
            for layer in adapted.adapters:
                layer.lora_B[NAME].weight.normal_(std=1e-5)
        close(fold_adapters(adapted, (1,)), share, 0.25)


def test_peft_reads_the_adapters(policy, rows, tmp_path: Path):
    adapted = with_adapters(policy)
    learn(adapted, rows)
    save_adapters(adapted, tmp_path, "a/base")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "a/base"
    read = peft.PeftModel.from_pretrained(policy.clone().model, str(tmp_path))
    ids = torch.tensor([[20, 21, 22, 23]])
    with torch.no_grad():
        close(read(input_ids=ids).logits, adapted.model(input_ids=ids).logits, 1e-5)
        assert not torch.allclose(read(input_ids=ids).logits, policy.model(input_ids=ids).logits, atol=1e-2)


def test_adapters_are_read_back_exactly_and_only_where_they_fit(policy, rows, tmp_path: Path):
    adapted, fresh = with_adapters(policy), with_adapters(policy, key=(1,))
    learn(adapted, rows)
    save_adapters(adapted, tmp_path, "a/base")
    load_adapters(fresh, tmp_path)
    assert torch.equal(scores(fresh, rows), scores(adapted, rows))
    for other in (LoraConfig(rank=8), LoraConfig(rank=4, targets="attention")):
        with pytest.raises(HarnessError, match="do not fit this policy: another model, rank or targets"):
            load_adapters(with_adapters(policy, other), tmp_path)


# ----------------------------------------------------------------------------------------------------------- cells


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("toy")
    toy_policy().save(place / "policy")
    toy_policy(seed=1).save(place / "teacher")
    return place


def lora_cell(base: Path, method: str, precision: str = "float32", **train):
    settings = {"lora": {"rank": 4}, "learning_rate": 1e-2, "mini_batches": 2, **train}
    config = toy_config(base / "policy", method, base / "teacher", **settings)
    return config.model_copy(update={"precision": precision})


def weights(directory: Path):
    return load_local(str(directory)).model.state_dict()


@pytest.mark.parametrize("method", ["seed", "opd-teacher"])
def test_a_cell_leaves_the_start_the_adapters_and_their_sum(base: Path, tmp_path: Path, method: str) -> None:
    cell = run_toy(lora_cell(base, method, updates=2), tmp_path)
    start = tmp_path / "start" if method == "seed" else base / "policy"
    stated = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert stated["base_model_name_or_path"] == ("../start" if method == "seed" else str(base / "policy"))
    both = load_local(str(start))
    add_adapters(both, RANK_4.model_copy(update={"alpha": 32.0}), (9,))
    load_adapters(both, tmp_path / "adapter")
    both.save(tmp_path / "both")
    final, expected, before = weights(tmp_path / "policy"), weights(tmp_path / "both"), weights(start)
    moved = {name for name, weight in final.items() if not torch.equal(weight, before[name])}
    assert all(torch.equal(final[name], expected[name]) for name in final)
    assert {name.split(".")[-2] for name in moved} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    metrics = cell.records("metrics.jsonl")
    assert metrics[0]["loss/kl"] < metrics[1]["loss/kl"]
    assert not (tmp_path / "checkpoints").exists()


KILLS = [
    ("torch:save", 1),  # in checkpoint 0
    ("harness.trainer:Trainer._optimise", 2),  # in update 1, between two optimizer steps
    ("harness.training:Training.update", 2),  # between checkpoint 1 and update 2
    ("harness.store:replace_tree", 1),  # all is done, but not yet closed
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "precision"), [("seed", "bfloat16"), ("grpo", "float32")])
def test_a_killed_cell_ends_with_the_same_bits(base: Path, tmp_path: Path, method: str, precision: str) -> None:
    in_stage1 = [("torch.nn.utils:clip_grad_norm_", 3)] if method == "seed" else []
    config = lora_cell(base, method, precision, updates=2, gradient_checkpointing=True)
    whole = run_toy(config, tmp_path / "whole")
    killed = CellDir(tmp_path / "killed")
    for place in [*in_stage1, *KILLS]:
        assert run_in_child(config, killed.path, dies_at=place) == -9, f"never came to {place}"
    assert run_in_child(config, killed.path) == 0
    for name in ("policy/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (killed.path / name).read_bytes() == (whole.path / name).read_bytes()
    tables = [pyarrow.parquet.read_table(cell.path / "credit.parquet") for cell in (whole, killed)]
    assert tables[0].equals(tables[1])


@pytest.mark.slow
def test_a_cell_in_bfloat16_trains_float32_weights_and_ends_the_same_after_a_kill(base: Path, tmp_path: Path) -> None:
    config = lora_cell(base, "grpo", "bfloat16", lora=None, learning_rate=1e-3, updates=2, mini_batches=1)
    whole = run_toy(config, tmp_path / "whole")
    assert run_in_child(config, tmp_path / "killed", dies_at=("harness.training:Training.update", 2)) == -9
    assert run_in_child(config, tmp_path / "killed") == 0
    stored = [(tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert stored[0] == stored[1]
    assert not (whole.path / "adapter").exists()
    first, second = whole.records("metrics.jsonl")
    assert abs(first["loss/kl"]) < 1e-3 < second["loss/kl"]
    assert {p.dtype for p in load_local(str(whole.path)).model.parameters()} == {torch.float32}


# --------------------------------------------------------------------------------------------------------- refusals


def test_without_peft_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quick", ["train.lora={rank: 4}"])
    assert any(cell.train and cell.train.lora for cell in expand(recipe))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"train\.lora needs peft: pip install 'seed-harness\[lora\]'"):
        expand(recipe)


def test_nothing_without_weights_gets_adapters() -> None:
    with pytest.raises(HarnessError, match="policy 'random' cannot be trained"):
        expand(load_recipe("quick", ["policy=random", "train.lora={rank: 4}"]))
