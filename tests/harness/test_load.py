"""Policies by name: saved, loaded, damaged, scripted."""

from __future__ import annotations

import json

import pytest
import torch
from toy_policies import (
    SAMPLED,
    requests_for,
    rows_of,
)

from harness.contracts import HarnessError, Prompt
from harness.policy.base import Request
from harness.policy.load import check_policy_spec, load_local, load_policy
from harness.policy.tiny import new_tiny

# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["tiny", "text_only"])
def test_a_saved_policy_is_the_same_policy(name, request, tmp_path):
    policy = request.getfixturevalue(name)
    policy.save(tmp_path / "model")
    policy.save(tmp_path / "model")  # replaces what is there
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = load_local(str(tmp_path / "model"))
    assert loaded.fingerprint == policy.fingerprint
    assert loaded.prompt_style == policy.prompt_style
    requests = requests_for(policy, 8)
    responses = policy.generate(requests, SAMPLED)
    assert loaded.generate(requests, SAMPLED) == responses
    rows = rows_of(requests, responses)
    with torch.no_grad():
        assert torch.equal(loaded.score(rows).logprobs, policy.score(rows).logprobs)


def test_clones_are_frozen_and_independent(tokenizer):
    policy = new_tiny(tokenizer, seed=0)
    clone = policy.clone()
    assert clone.fingerprint == policy.fingerprint
    assert not any(parameter.requires_grad for parameter in clone.model.parameters())
    with torch.no_grad():
        policy.model.get_input_embeddings().weight += 0.1
    assert clone.fingerprint != policy.fingerprint
    clone.copy_weights_from(policy)
    assert clone.fingerprint == policy.fingerprint


def test_one_seed_is_one_policy(tokenizer):
    state = torch.get_rng_state()
    assert new_tiny(tokenizer, seed=3).fingerprint == new_tiny(tokenizer, seed=3).fingerprint
    assert new_tiny(tokenizer, seed=3).fingerprint != new_tiny(tokenizer, seed=4).fingerprint
    assert torch.equal(state, torch.get_rng_state())


def damage(directory, name, content):
    if content is None:
        (directory / name).unlink()
    elif isinstance(content, bytes):
        (directory / name).write_bytes(content)
    else:
        values = json.loads((directory / name).read_text())
        content(values)
        (directory / name).write_text(json.dumps(values))


def wider(config):
    config["text_config"]["hidden_size"] = 32


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "is damaged"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "header is cut off"),
        ("model.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "header cannot be read"),
        ("preprocessor_config.json", None, "preprocessor_config.json is missing"),
        ("tokenizer.json", b"{}", "tokenizer.json is damaged: it holds no tokenizer"),
        ("chat_template.jinja", None, "model has no chat template"),
    ],
)
def test_broken_directories_are_named_before_a_model_loads(tiny, tmp_path, name, content, message):
    tiny.save(tmp_path / "model")
    damage(tmp_path / "model", name, content)
    for load in (check_policy_spec, load_local):
        with pytest.raises(HarnessError, match=message) as caught:
            load(str(tmp_path / "model"))
        assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_refused(tokenizer, tmp_path):
    policy = new_tiny(tokenizer, seed=0)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[3, 4] = torch.nan
    policy.save(tmp_path / "model")
    with pytest.raises(HarnessError, match=r"model are not finite, e.g. .*embed_tokens.weight"):
        load_local(str(tmp_path / "model"))


def test_weights_that_do_not_fit_their_configuration_are_refused(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    damage(tmp_path / "model", "config.json", wider)
    with pytest.raises(HarnessError) as caught:
        load_local(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_refused(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(HarnessError, match="bytes instead of"):
        check_policy_spec(str(tmp_path / "model"))


def test_specs(tiny, tmp_path):
    for spec, message in [
        ("rnadom", "did you mean 'random'"),
        ("nobody/no-such-model", "neither a directory nor available from the hub"),
        (str(tmp_path / "none"), "no policy directory"),
        (str(tmp_path), "config.json is missing"),
    ]:
        with pytest.raises(HarnessError, match=message) as caught:
            check_policy_spec(spec)
        assert "\n" not in str(caught.value)
    for update in (5, 10):
        tiny.save(tmp_path / "cell" / "checkpoints" / str(update) / "policy")
    assert check_policy_spec(str(tmp_path / "cell")) == check_policy_spec(
        str(tmp_path / "cell" / "checkpoints" / "10" / "policy")
    )
    with pytest.raises(HarnessError, match="device 'cuda:7'"):
        load_local(str(tmp_path / "cell"), device="cuda:7")


# ------------------------------------------------------------------------------------------------------ scripted


def test_scripted_policies():
    env = pytest.importorskip("envs_vision.ezpoints").EZPoints()
    random, oracle = load_policy("random", env), load_policy("oracle", env)
    requests = [Request(Prompt(""), (0, i), ("1", "+", "="), expert="=") for i in range(300)]
    actions = [env.parse(response.text) for response in random.generate(requests, SAMPLED)]
    assert all(valid for _, valid in actions)
    assert all(60 < [action for action, _ in actions].count(name) < 140 for name in ("1", "+", "="))
    assert random.generate(requests[5:6], SAMPLED) == random.generate(requests, SAMPLED)[5:6]
    assert {env.parse(response.text) for response in oracle.generate(requests, SAMPLED)} == {("=", True)}
    assert oracle.needs_expert
    assert not random.needs_expert
