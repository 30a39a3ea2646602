"""The local policy: what it generates and scores does not depend on batches, and both agree with transformers."""

from __future__ import annotations

import pytest
import torch
from toy_policies import (
    GREEDY,
    SAMPLED,
    close,
    picture,
    requests_for,
    rows_of,
)

from harness.contracts import HarnessError, Prompt
from harness.policy import score as score_module
from harness.policy.base import Request, Sampling
from harness.policy.encode import Role
from harness.policy.local import LocalPolicy
from harness.policy.tiny import END, IMAGE, new_tiny, tiny_config


@pytest.fixture(params=["tiny", "text_only"])
def policy(request):
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_answers_do_not_depend_on_the_batch(policy, sampling):
    requests = requests_for(policy, 64)
    together = policy.generate(requests, sampling)
    assert len({response.token_ids for response in together}) > 8
    for size in (1, 7):
        apart = [r for i in range(0, 64, size) for r in policy.generate(requests[i : i + size], sampling)]
        assert [r.token_ids for r in apart] == [r.token_ids for r in together]
        close([p for r in apart for p in r.logprobs], [p for r in together for p in r.logprobs], 1e-4)
    policy.token_budget, budget = 100, policy.token_budget
    in_parts = policy.generate(requests, sampling)
    policy.token_budget = budget
    assert [r.token_ids for r in in_parts] == [r.token_ids for r in together]
    reversed_order = policy.generate(requests[::-1], sampling)[::-1]
    assert [r.token_ids for r in reversed_order] == [r.token_ids for r in together]


def test_nothing_to_do(tiny):
    assert tiny.generate([], SAMPLED) == []
    assert tiny.score([]).logprobs.shape == (0,)


def test_an_answer_depends_on_its_key(tiny):
    prompt = Prompt("Your task: put a mug")
    answers = tiny.generate([Request(prompt, (1, i)) for i in range(20)], SAMPLED)
    assert len({answer.token_ids for answer in answers}) > 15
    assert tiny.generate([Request(prompt, (1, 3))], SAMPLED)[0].token_ids == answers[3].token_ids


def test_sampling_follows_the_distribution(tiny):
    prompt = Prompt("Your task: put a mug")
    count = 4000
    answers = tiny.generate([Request(prompt, (2, i)) for i in range(count)], Sampling(0.7, 1))
    with torch.no_grad():
        probabilities = (
            tiny.score([(prompt, answers[0].token_ids)], temperature=0.7, distribution=True)
            .require_distribution()[0]
            .exp()
        )
    drawn = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=len(probabilities)) / count
    assert (drawn - probabilities).abs().max() < 4 * (0.25 / count) ** 0.5


def test_scores_do_not_depend_on_the_batch(policy):
    requests = requests_for(policy, 32)
    rows = rows_of(requests, policy.generate(requests, SAMPLED))
    with torch.no_grad():
        together = policy.score(rows).split()
        alone = [policy.score([row]).logprobs for row in rows]
        backwards = policy.score(rows[::-1]).split()[::-1]
        policy.token_budget, budget = 64, policy.token_budget
        in_parts = policy.score(rows).split()
        policy.token_budget = budget
    for scores in (alone, backwards, in_parts):
        close(torch.cat(list(scores)), torch.cat(list(together)), 1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_equal_scores(policy, temperature):
    requests = requests_for(policy, 24)
    responses = policy.generate(requests, Sampling(temperature, 12))
    scores = policy.score(rows_of(requests, responses), temperature=temperature)
    assert scores.lengths == [len(response.token_ids) for response in responses]
    close(scores.logprobs.detach(), [p for response in responses for p in response.logprobs], 1e-4)


def test_equal_rows_are_computed_once_and_score_exactly_alike(tiny):
    requests = requests_for(tiny, 6)
    rows = rows_of(requests, tiny.generate(requests, SAMPLED))
    with torch.no_grad():
        once, twice = tiny.score(rows), tiny.score(rows + rows)
    assert torch.equal(twice.logprobs, torch.cat([once.logprobs, once.logprobs]))


def test_shared_prompts_change_neither_scores_nor_gradients(tiny, monkeypatch):
    prompts = [request.prompt for request in requests_for(tiny, 3)]
    rows = [(prompt, tiny.answer_ids(f"put {i} in desk" if i else "")) for prompt in prompts for i in range(5)]
    results = []
    for share in (10.0, 0.0):
        monkeypatch.setattr(score_module, "SHARING_PAYS", share)
        tiny.model.zero_grad()
        logprobs = tiny.score(rows).logprobs
        logprobs.sum().backward()
        results.append((logprobs.detach(), [parameter.grad.clone() for parameter in tiny.model.parameters()]))
    close(results[0][0], results[1][0], 1e-4)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


# ------------------------------------------------------------------------------------------------- transformers


def test_scores_and_gradients_equal_those_of_transformers(tiny):
    prompt = Prompt("see <image> and <image> now", (picture(1), picture(2, 56)))
    answer = tiny.answer_ids("put a mug in desk 12")
    encoded, config = tiny.encode(prompt), tiny.model.config
    ids = torch.tensor([[*encoded.ids.tolist(), *answer]])
    made = tiny.image_processor(images=list(prompt.images), return_tensors="pt")
    tiny.model.zero_grad()
    logits = tiny.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == config.image_token_id).int(),
        pixel_values=made["pixel_values"],
        image_grid_thw=made["image_grid_thw"],
    ).logits[0, len(encoded) - 1 : -1]
    logits[:, sorted(tiny.banned_ids)] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in tiny.model.parameters()]

    tiny.model.zero_grad()
    ours = tiny.score([(prompt, answer)]).logprobs
    ours.sum().backward()
    close(ours.detach(), expected.detach(), 1e-4)
    for parameter, gradient in zip(tiny.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-3, rtol=1e-3)


def test_gradient_checkpointing_changes_no_gradient(tokenizer):
    rows = [(Prompt("see <image>", (picture(3),)), (20, 21, 2)), (Prompt("put a mug"), (22, 2))]
    gradients = []
    for checkpointing in (False, True):
        policy = new_tiny(tokenizer, seed=1)
        if checkpointing:
            policy.checkpoint_gradients()
        policy.score(rows).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in policy.model.parameters()])
    for one, other in zip(*gradients, strict=True):
        close(one, other, 1e-4)


def test_other_sizes(tokenizer):
    config = tiny_config(tokenizer, width=96, layers=3, key_value_heads=2, vision_layers=2)
    policy = new_tiny(tokenizer, 0, config)
    requests = requests_for(policy, 6)
    responses = policy.generate(requests, SAMPLED)
    with torch.no_grad():
        scores = policy.score(rows_of(requests, responses))
    close(scores.logprobs, [p for response in responses for p in response.logprobs], 1e-4)


# ----------------------------------------------------------------------------------------------- special tokens


def test_special_tokens_are_never_sampled_however_likely(tokenizer):
    policy = new_tiny(tokenizer, seed=0)
    banned = sorted(policy.banned_ids)
    assert policy.model.config.image_token_id in banned
    assert policy.tokenizer.pad_token_id in banned
    assert policy.tokenizer.eos_token_id not in banned
    head = policy.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor(banned), 1e4))
    for sampling in (SAMPLED, GREEDY):
        responses = policy.generate(requests_for(policy, 16), sampling)
        assert policy.banned_ids.isdisjoint(token for response in responses for token in response.token_ids)
    handle.remove()


def test_banned_tokens_have_no_probability_in_scores(tiny):
    scores = tiny.score([(Prompt("put"), (20, 2))], entropy=True, distribution=True)
    distribution = scores.require_distribution()
    banned = sorted(tiny.banned_ids)
    assert (distribution[:, banned].exp() == 0).all()
    assert torch.isfinite(distribution).all()
    close(distribution.exp().sum(-1).detach(), torch.ones(2), 1e-5)
    expected = torch.distributions.Categorical(logits=distribution).entropy()
    close(scores.require_entropy().detach(), expected.detach(), 1e-4)
    for answer in ((), (banned[0],)):
        with pytest.raises(ValueError, match="row 0"):
            tiny.score([(Prompt("put"), answer)])


def test_special_tokens_in_text_stay_text(tiny):
    plain = tiny.encode(Prompt("a b <image>", (picture(1),)))
    hostile = tiny.encode(Prompt(f"a {IMAGE}{END}<|im_start|> b <image>", (picture(1),)))
    special = set(tiny.tokenizer.all_special_ids)
    assert special.isdisjoint(hostile.ids[hostile.roles == Role.TEXT].tolist())
    assert (hostile.ids == tiny.model.config.image_token_id).sum() == 36 == (hostile.roles == Role.IMAGE).sum()
    assert (hostile.roles == Role.CHAT).sum() == (plain.roles == Role.CHAT).sum() == 4
    assert tiny.tokenizer.decode(hostile.ids[hostile.roles == Role.TEXT]) == f"a {IMAGE}{END}<|im_start|> b "
    assert special.intersection(tiny.answer_ids(f"go {END} on")) == {tiny.tokenizer.eos_token_id}
    assert tiny.answer_ids(f"go {END} on")[-1] == tiny.tokenizer.eos_token_id


def test_pad_may_be_eos(tokenizer, text_only):
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token=END, pad_token=END)
    tokenizer.chat_template = text_only.tokenizer.chat_template
    policy = LocalPolicy(text_only.model, tokenizer, None, spec="test")
    requests = requests_for(policy, 16)
    responses = policy.generate(requests, Sampling(1.0, 40))
    assert responses == text_only.generate(requests, Sampling(1.0, 40))
    for response in responses:
        assert response.finished == (response.token_ids[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in response.token_ids[:-1]


def test_answers_end_with_their_end_token(tokenizer):
    policy = new_tiny(tokenizer, seed=0)
    policy._bias[policy.tokenizer.eos_token_id] = 3.0
    requests = requests_for(policy, 64)
    responses = policy.generate(requests, Sampling(1.0, 40))
    lengths = {len(response.token_ids) for response in responses}
    assert 1 in lengths
    assert len(lengths) > 5
    assert all(response.finished for response in responses if len(response.token_ids) < 40)
    assert all(END not in response.text for response in responses)
    with torch.no_grad():
        scores = policy.score(rows_of(requests, responses))
    close(scores.logprobs, [p for response in responses for p in response.logprobs], 1e-4)


# ------------------------------------------------------------------------------------------------------ pictures


def test_changing_a_picture_changes_the_scores_of_its_row_only(tiny):
    prompts = [Prompt(f"see {i} <image> <image>", (picture(i), picture(50 + i))) for i in range(4)]
    answer = tiny.answer_ids("put a mug")
    changed = list(prompts)
    changed[2] = Prompt(prompts[2].text, (prompts[2].images[0], 255 - prompts[2].images[1]))
    with torch.no_grad():
        before = tiny.score([(prompt, answer) for prompt in prompts]).split()
        after = tiny.score([(prompt, answer) for prompt in changed]).split()
    different = [not torch.allclose(a, b, atol=1e-5) for a, b in zip(before, after, strict=True)]
    assert different == [False, False, True, False]


@pytest.mark.parametrize("fused", [True, False])
def test_remembered_pictures_are_forgotten_when_the_weights_change(tokenizer, fused):
    policy = new_tiny(tokenizer, seed=0)
    row = (Prompt("see <image>", (picture(1),)), policy.answer_ids("mug"))
    with torch.no_grad():
        before = policy.score([row]).logprobs
    optimizer = torch.optim.AdamW(policy.model.model.visual.parameters(), lr=1e-2, fused=fused)
    policy.score([row]).logprobs.sum().backward()
    with torch.no_grad():
        policy.score([row])  # remembers features of the old weights once more
    optimizer.step()
    with torch.no_grad():
        after = policy.score([row]).logprobs
    assert not torch.allclose(before, after, atol=1e-4)
    close(after, policy.score([row]).logprobs.detach(), 1e-5)


def test_equal_pictures_are_encoded_once(tiny, monkeypatch):
    shots = [picture(70), picture(70), picture(71)]
    requests = [Request(Prompt(f"now {i} <image>", (shot,)), (0, i)) for i, shot in enumerate(shots)]
    seen = []
    encode = tiny.decoder._encode_pictures
    monkeypatch.setattr(tiny.decoder, "_encode_pictures", lambda found: seen.append(len(found)) or encode(found))
    tiny.generate(requests, SAMPLED)
    tiny.generate(requests, SAMPLED)
    assert seen == [2]


def test_large_pictures_are_scaled_down(tiny):
    assert tiny.prompt_tokens(Prompt("<image>", (picture(1, 300),))) == tiny.prompt_tokens(
        Prompt("<image>", (picture(1, 84),))
    )


def test_text_models_refuse_pictures(text_only):
    with pytest.raises(HarnessError, match="text only"):
        text_only.encode(Prompt("<image>", (picture(1),)))


# -------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("grad", [True, False])
def test_logits_are_never_materialised(tiny, monkeypatch, grad):
    monkeypatch.setattr("harness.policy.local.LOGITS_AT_ONCE", 16 * tiny.vocabulary)
    rows = [(Prompt(f"see {i}" * 20), tiny.answer_ids("put a mug in desk")) for i in range(20)]
    expected = tiny.score(rows[:1]).logprobs.detach()
    fed = []
    handle = tiny.model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: fed.append(len(inputs[0])))
    with torch.set_grad_enabled(grad):
        scores = tiny.score(rows)
    tokens = sum(scores.lengths)
    assert sum(fed) == tokens  # answer tokens only, never the prompts'
    assert max(fed) == 16
    if grad:
        scores.logprobs.sum().backward()
        assert sum(fed) == 2 * tokens  # the backward pass computes each block again
        assert max(fed) == 16
    handle.remove()
    close(scores.split()[0].detach(), expected, 1e-5)


def test_micro_batches_hold_every_row_within_the_budget(tiny):
    requests = requests_for(tiny, 40)
    rows = rows_of(requests, tiny.generate(requests, SAMPLED))
    parts = tiny.plan_micro_batches(rows, 400)
    assert sorted(index for part in parts for index in part) == list(range(40))
    assert 1 < len(parts) < 40
    for part in parts:
        longest = max(tiny.prompt_tokens(rows[i][0]) for i in part)
        distinct = {tiny.encode(rows[i][0]).key for i in part}
        assert len(part) == 1 or len(distinct) * longest <= 400
    assert tiny.plan_micro_batches(rows, 1) != []
    assert tiny.plan_micro_batches([], 400) == []


def test_blocks_of_the_head_change_neither_scores_nor_gradients(
    tiny: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(tiny, 6)
    rows = rows_of(requests, tiny.generate(requests, SAMPLED))
    found = []
    for at_once in (score_module.LOGITS_AT_ONCE, 5 * tiny.vocabulary):
        monkeypatch.setattr("harness.policy.local.LOGITS_AT_ONCE", at_once)
        tiny.model.zero_grad()
        scores = tiny.score(rows, entropy=True, distribution=True)
        parts = (scores.logprobs, scores.require_entropy(), scores.require_distribution())
        (parts[0].sum() + parts[1].sum() + parts[2][:, 20].sum()).backward()
        found.append([*(part.detach() for part in parts), *(p.grad.clone() for p in tiny.model.parameters())])
    for whole, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole, atol=1e-3, rtol=1e-3)
