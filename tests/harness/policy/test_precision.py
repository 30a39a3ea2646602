"""bfloat16 and float32: what is rounded, what is not, and that frozen and trained weights give the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_envs import Doors
from toy_policies import GREEDY, SAMPLED, close, requests_for, rows_of

from harness.policy.load import load_local, load_policy


@pytest.fixture(params=["tiny", "text_only"])
def policy(request):
    """A vision-language model whose layers are written out, and a text model with a padded vocabulary."""
    return request.getfixturevalue(request.param)


def in_bfloat16(policy, trained):
    copied = policy.clone()
    copied.model.requires_grad_(trained)
    copied.compute_in("bfloat16", trained)
    return copied


def scores(policy, rows):
    with torch.no_grad():
        return policy.score(rows).logprobs


def test_frozen_and_trained_weights_give_the_same_numbers(policy):
    frozen, trained = in_bfloat16(policy, trained=False), in_bfloat16(policy, trained=True)
    requests = requests_for(policy, 8)
    responses = trained.generate(requests, SAMPLED)
    assert frozen.generate(requests, SAMPLED) == responses
    rows = rows_of(requests, responses)
    assert torch.equal(scores(frozen, rows), scores(trained, rows))
    assert torch.equal(scores(trained, rows), trained.score(rows).logprobs.detach())


def test_what_is_held_in_which_type(policy):
    head = policy.model.get_output_embeddings().weight
    frozen = in_bfloat16(policy, trained=False).model
    types = Counter((parameter.dtype, parameter.ndim > 1) for parameter in frozen.parameters())
    assert {dtype for dtype, matrix in types if not matrix} == {torch.float32}
    assert types[torch.bfloat16, True] > 10
    assert torch.equal(frozen.get_output_embeddings().weight, head)
    assert frozen.get_input_embeddings().weight.dtype == torch.float32
    trained = in_bfloat16(policy, trained=True).model
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}


def test_bfloat16_is_near_float32_and_its_log_probs_are_not_rounded():
    policy = load_local("tiny")
    requests = requests_for(policy, 8)
    rows = rows_of(requests, policy.generate(requests, SAMPLED))
    exact, found = scores(policy, rows), scores(in_bfloat16(policy, trained=True), rows)
    assert found.dtype == torch.float32
    gap = (found - exact).abs()
    assert 0 < gap.mean() < 0.05
    assert gap.max() < 0.5
    assert not torch.equal(found, found.bfloat16().float())


def test_sampling_and_scoring_agree_in_bfloat16(policy):
    rounded = in_bfloat16(policy, trained=True)
    requests = requests_for(policy, 8)
    responses = rounded.generate(requests, SAMPLED)
    sampled = [logprob for response in responses for logprob in response.logprobs]
    gap = (scores(rounded, rows_of(requests, responses)) - torch.tensor(sampled)).abs()
    assert gap.mean() < 0.02


class Roundings(TorchDispatchMode):
    """Counts how often each tensor is converted to bfloat16."""

    def __init__(self, watched):
        super().__init__()
        self.watched, self.counts = {tensor.data_ptr() for tensor in watched}, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rounds = function is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        if rounds and args[0].data_ptr() in self.watched:
            self.counts[args[0].data_ptr()] += 1
        return function(*args, **kwargs)


def test_generating_rounds_each_weight_once_however_many_tokens_there_are(policy):
    trained = in_bfloat16(policy, trained=True)
    with Roundings(trained.model.parameters()) as roundings:
        (answer,) = trained.generate(requests_for(policy, 1), GREEDY)
    assert len(answer.token_ids) > 3
    assert set(roundings.counts.values()) == {1}
    frozen = in_bfloat16(policy, trained=False)
    matrices = [parameter for parameter in frozen.model.parameters() if parameter.ndim > 1]
    with Roundings(matrices) as roundings:
        frozen.generate(requests_for(policy, 1), GREEDY)
    assert not roundings.counts


def test_a_step_of_a_millionth_is_kept(text_only):
    """In bfloat16 weights it would vanish: near 1 the next number is 1 / 128 away."""
    trained = in_bfloat16(text_only, trained=True)
    weight = trained.model.get_decoder().layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    requests = requests_for(trained, 4)
    trained.score(rows_of(requests, trained.generate(requests, SAMPLED))).logprobs.sum().backward()
    assert weight.grad.dtype == torch.float32
    optimizer.step()
    moved = weight.detach() - before
    assert (moved != 0).float().mean() > 0.9
    close(moved[moved != 0].abs().median(), 1e-6, 2e-7)
    assert ((before + moved).bfloat16() == before.bfloat16()).float().mean() > 0.95


def test_float32_whatever_the_files_hold_and_files_that_hold_all_there_is(policy, tmp_path: Path):
    rounded = policy.clone()
    rounded.model.to(torch.bfloat16)
    rounded.model.save_pretrained(tmp_path / "half")
    rounded.save(tmp_path / "model")  # tokenizer and processor; written in float32
    assert {p.dtype for p in load_local(str(tmp_path / "model")).model.parameters()} == {torch.float32}
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "half" / name).replace(tmp_path / "model" / name)
    spec = str(tmp_path / "model")

    exact = load_policy(spec, Doors())
    assert {parameter.dtype for parameter in exact.model.parameters()} == {torch.float32}
    frozen, trained = (load_policy(spec, Doors(), precision="bfloat16", trained=trained) for trained in (False, True))
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}
    rows = [(request.prompt, (20, 21, 22)) for request in requests_for(policy, 5)]
    assert torch.equal(scores(frozen, rows), scores(trained, rows))
    frozen.save(tmp_path / "again")
    again = load_policy(str(tmp_path / "again"), Doors(), precision="bfloat16")
    assert torch.equal(scores(again, rows), scores(frozen, rows))
    assert again.fingerprint == frozen.fingerprint == exact.fingerprint
