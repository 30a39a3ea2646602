"""One update: what enters the gradient, and what must not change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_cells import toy_episodes, toy_policy

from harness import trainer as trainer_module
from harness.cards import Ledger
from harness.config import TrainConfig
from harness.contracts import Prompt, Skill
from harness.methods import SEED, GatedNLL, Method, ReverseKL, Reweighting, Teacher, get_method
from harness.policy.base import Request, Sampling
from harness.policy.local import LocalPolicy
from harness.recipes import vary
from harness.rows import Row, score_rows
from harness.seed import NO_SKILL, teacher_prompt, teacher_texts
from harness.skills import insert_skill, read_skill
from harness.trainer import Trainer

GRPO = get_method("grpo")
CONFIG = TrainConfig(learning_rate=1e-3, kl=0.0, grad_clip=1e9)
SKILL = "Open the left door."
CLOSE = 5e-6
"""Rounding of float32 gradients, relative to the largest entry."""


def external(**signal: Any) -> Method:
    """Distillation from another policy, without reward."""
    teacher = Teacher(weights="external", context="plain")
    return Method(name="opd", summary="", advantage=None, teacher=teacher, signal=ReverseKL(**signal))


def make_rows(policy: LocalPolicy, temperature: float = 1.0, skills: bool = True) -> list[Row]:
    """Three groups of four sampled rows; two prompts a group; every third row without skill."""
    prompts = []
    for place in range(6):
        image = np.full((28, 28, 3), 30 * place, np.uint8)
        prompts.append(Prompt(f"<image>Find the prize.\nNow: {'opened left, ' * (place % 3)}closed", (image,)))
    requests = [Request(prompts[i // 2], key=(3, i)) for i in range(12)]
    responses = policy.generate(requests, Sampling(temperature, 5))
    return [
        Row(
            prompt=request.prompt,
            response=response.token_ids,
            logp_old=response.logprobs,
            episode=i,
            group=i // 4,
            advantage=(-1.0) ** i * (1 + i % 5),
            teacher_prompt=insert_skill(request.prompt, SKILL) if skills and i % 3 else None,
        )
        for i, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]


class Update:
    """The result of updating a fresh policy on some rows."""

    def __init__(self, rows: Sequence[Row], method: Method = GRPO, config: TrainConfig = CONFIG, **others: Any) -> None:
        self.policy, self.ledger = toy_policy(), Ledger()
        self.trainer = Trainer(self.policy, method, config, seed=0, **others)
        self.statistics, self.credit = self.trainer.update(rows, 1, self.ledger)
        self.gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            for name, weight in self.policy.model.named_parameters()
        }

    def same(self, other: Update) -> bool:
        """Whether gradients and new weights are equal, bit for bit."""
        mine, theirs = dict(self.policy.model.named_parameters()), dict(other.policy.model.named_parameters())
        return all(
            torch.equal(mine[name], theirs[name]) and torch.equal(self.gradients[name], other.gradients[name])
            for name in mine
        )


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between two gradients, relative to the largest entry."""
    largest = max(float(value.abs().max()) for value in a.values())
    assert largest > 1e-3
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(toy_policy())


@pytest.fixture(scope="module")
def other() -> LocalPolicy:
    return toy_policy(seed=1)


# ------------------------------------------------------------------------------------------- on-policy identities


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_update_is_on_policy(temperature: float) -> None:
    policy = toy_policy()
    rows = make_rows(policy, temperature)
    sampled = torch.tensor([value for row in rows for value in row.logp_old])
    scored = torch.cat(score_rows(policy, [(row.prompt, row.response) for row in rows], temperature))
    torch.testing.assert_close(scored, sampled, atol=1e-4, rtol=0)
    done = Update(rows, config=CONFIG.model_copy(update={"temperature": temperature}))
    assert done.statistics["clip_fraction"] == done.statistics["dual_clip_fraction"] == 0
    assert abs(done.statistics["approx_kl"]) < 1e-5
    wrong = Update(rows, config=CONFIG.model_copy(update={"temperature": 2 * temperature}))
    assert abs(wrong.statistics["approx_kl"]) > 1e-2


def test_the_first_kl_to_the_start_needs_no_scoring(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[LocalPolicy] = []

    def spy(policy: LocalPolicy, *arguments: Any) -> list[Tensor]:
        scored.append(policy)
        return score_rows(policy, *arguments)

    monkeypatch.setattr(trainer_module, "score_rows", spy)
    reference = toy_policy()
    start = reference.fingerprint
    done = Update(rows, config=CONFIG.model_copy(update={"kl": 0.5}), reference=reference)
    assert scored == []
    assert abs(done.statistics["loss/kl"]) < 1e-6
    statistics = done.trainer.update(rows, 2, done.ledger).statistics
    assert scored == [reference]
    assert statistics["loss/kl"] > 1e-5
    assert reference.fingerprint == start


# ------------------------------------------------------------------------------------------- distillation or none


def test_an_empty_skill_scores_exactly_as_the_plain_prompt(rows: list[Row]) -> None:
    policy = toy_policy()
    plain = score_rows(policy, [(row.prompt, row.response) for row in rows], 1.0)
    empty = score_rows(policy, [(insert_skill(row.prompt, " "), row.response) for row in rows], 1.0)
    advised = score_rows(policy, [(insert_skill(row.prompt, SKILL), row.response) for row in rows], 1.0)
    assert torch.equal(torch.cat(plain), torch.cat(empty))
    assert not torch.allclose(torch.cat(plain), torch.cat(advised), atol=1e-3)


@pytest.mark.parametrize(
    ("context", "skills"),
    [
        ("empty_skill", []),
        ("own_skill", [read_skill("no JSON", "policy", 1)] * 12),
        ("same_task_skill", [read_skill("no JSON", "policy", 1)] * 12),
        ("other_task_skill", [NO_SKILL] * 12),
        ("library", []),
    ],
)
def test_without_a_usable_skill_seed_is_grpo_bit_for_bit(rows: list[Row], context: Any, skills: list[Skill]) -> None:
    teacher = Teacher(weights="update_start", context=context)
    texts = teacher_texts(teacher, toy_episodes(12), skills, [i // 4 for i in range(12)], lambda task: "", (0, 1))
    assert texts == [None] * 12
    silent = [replace(row, teacher_prompt=teacher_prompt(row.prompt, texts[row.episode])) for row in rows]
    seed, grpo = Update(silent, SEED.model_copy(update={"teacher": teacher})), Update(silent)
    assert seed.same(grpo)
    assert not Update(rows, SEED).same(grpo)
    assert {name: seed.statistics[name] for name in grpo.statistics} == grpo.statistics
    assert seed.ledger.rescored_tokens == 0


LOUD = GatedNLL(coefficient=1.0)
NEIGHBOURS: dict[str, tuple[Method, Method]] = {
    "coefficient 0 of seed is grpo": (SEED.model_copy(update={"signal": GatedNLL(coefficient=0.0)}), GRPO),
    "seed with a library's skill for its own is sdar": (
        SEED.model_copy(update={"start": "base", "signal": get_method("sdar").signal}),
        get_method("sdar"),
    ),
    "seed with a constant gate is grpo-opsd": (
        SEED.model_copy(update={"signal": GatedNLL(beta=0.0)}),
        get_method("grpo-opsd"),
    ),
    "lambda 0 of rlsd is grpo": (vary(get_method("rlsd"), {"signal": {"coefficient": 0.0}}, ""), GRPO),
    "coefficient 0 of skill-sd is grpo": (vary(get_method("skill-sd"), {"signal": {"coefficient": 0.0}}, ""), GRPO),
    "coefficient 0 of opd-teacher-grpo is grpo": (
        vary(get_method("opd-teacher-grpo"), {"signal": {"coefficient": 0.0}}, ""),
        GRPO,
    ),
    "the frozen start at its own first update is the update's start": (
        vary(SEED, {"signal": LOUD.model_dump(), "teacher": {"weights": "start"}}, ""),
        vary(SEED, {"signal": LOUD.model_dump()}, ""),
    ),
    "rehearsal without pairs is seed": (vary(SEED, {"rehearsal": {}}, ""), SEED),
}


@pytest.mark.parametrize(("one", "other_method"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_methods_meet_their_neighbours(rows: list[Row], one: Method, other_method: Method) -> None:
    start = {"reference": toy_policy(), "teacher": toy_policy(seed=1)}
    assert distance(Update(rows, one, **start).gradients, Update(rows, other_method, **start).gradients) < CLOSE


@pytest.mark.parametrize("name", ["opsd", "grpo-opsd", "skill-sd", "rlsd", "sdar", "opd-teacher", "opd-teacher-grpo"])
def test_methods_differ_from_grpo_where_they_say_so(rows: list[Row], other: LocalPolicy, name: str) -> None:
    method = get_method(name)
    if method.signal is not None and name != "rlsd":
        method = vary(method, {"signal": {"coefficient": 1.0}}, "")
    assert distance(Update(rows, method, teacher=other).gradients, Update(rows).gradients) > 1e-3


def test_a_constant_gate_is_half_of_learning_the_own_answers_by_heart(rows: list[Row]) -> None:
    """GRPO+OPSD: whatever the skill says, its term pulls every distilled token alike."""
    told = [replace(row, advantage=None) for row in rows if row.teacher_prompt is not None]
    method = vary(get_method("grpo-opsd"), {"signal": {"coefficient": 1.0}}, "")
    policy = toy_policy()
    (-policy.score([(row.prompt, row.response) for row in told]).logprobs.mean() / 2).backward()
    halved = {name: weight.grad for name, weight in policy.model.named_parameters() if weight.grad is not None}
    found = Update(told, method).gradients
    assert distance({name: found[name] for name in halved}, halved) < CLOSE
    assert distance(found, Update(told, vary(method, {"signal": {"beta": 5.0}}, "")).gradients) > 1e-3


def test_rlsd_fades_into_grpo(rows: list[Row]) -> None:
    rlsd, grpo = get_method("rlsd"), Update(rows)
    assert isinstance(rlsd.signal, Reweighting)
    faded = Trainer(toy_policy(), rlsd, CONFIG, seed=0)
    faded.update(rows, rlsd.signal.decay_updates + 1, Ledger())
    trained = {name: weight.grad for name, weight in faded.policy.model.named_parameters() if weight.grad is not None}
    assert distance({name: grpo.gradients[name] for name in trained}, trained) < CLOSE
    assert distance(grpo.gradients, Update(rows, rlsd).gradients) > 1e-3


def test_a_gate_weighs_the_divergence_of_each_token(rows: list[Row], other: LocalPolicy) -> None:
    def gradients(vocabulary: str, beta: float | None) -> dict[str, Tensor]:
        given = [replace(row, advantage=None) for row in rows]
        return Update(given, external(coefficient=1.0, vocabulary=vocabulary, beta=beta), teacher=other).gradients

    for vocabulary in ("sampled", "full"):
        plain, half, sharp = (gradients(vocabulary, beta) for beta in (None, 0.0, 5.0))
        assert distance(plain, {name: 2 * value for name, value in half.items()}) < CLOSE
        assert distance(plain, {name: 2 * value for name, value in sharp.items()}) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": {"weights": "current"}},
        {"teacher": {"weights": "start"}, "signal": {"kind": "reverse_kl", "vocabulary": "full"}},
    ],
    ids=["current weights", "full vocabulary"],
)
def test_a_teacher_scored_inside_the_loss_is_charged_like_one_scored_before(
    rows: list[Row], other: LocalPolicy, changes: dict[str, Any]
) -> None:
    inside, before = Update(rows, vary(SEED, changes, ""), reference=other), Update(rows, SEED)
    assert inside.ledger.rescored_tokens == before.ledger.rescored_tokens > 0
    assert inside.ledger.flops >= before.ledger.flops


def test_rehearsal_adds_the_gradient_of_the_answers(rows: list[Row]) -> None:
    samples = [(row.prompt, row.response) for row in rows[:5]]
    method = vary(SEED, {"rehearsal": {"coefficient": 0.3}}, "")
    policy, ledger = toy_policy(), Ledger()
    trainer = Trainer(policy, method, CONFIG.model_copy(update={"token_budget": 100}), seed=0)
    statistics = trainer.update(rows, 1, ledger, samples).statistics
    found = {name: weight.grad.clone() for name, weight in policy.model.named_parameters()}
    fresh = toy_policy()
    loss = -fresh.score(samples).logprobs.mean()
    (0.3 * loss).backward()
    alone = Update(rows, SEED)
    added = {name: weight.grad for name, weight in fresh.model.named_parameters() if weight.grad is not None}
    expected = {name: alone.gradients[name] + added.get(name, 0.0) for name in alone.gradients}
    assert distance(expected, found) < CLOSE
    assert statistics["loss/rehearsal"] == pytest.approx(loss.item(), rel=1e-5)
    assert ledger.trained_tokens - alone.ledger.trained_tokens == sum(len(answer) for _, answer in samples)


def test_credit_tells_what_each_token_was_told_to_learn(rows: list[Row]) -> None:
    """GRPO pulls every token by its advantage; SEED adds lambda g, in the share of the distilled tokens."""
    watched = [replace(row, watched=row.group != 1) for row in rows]
    grpo = Update(watched).credit
    assert sorted(grpo) == [i for i, row in enumerate(watched) if row.watched]
    for i, credit in grpo.items():
        assert (credit.teacher, credit.gate) == (None, None)
        assert credit.pull == pytest.approx([rows[i].advantage] * len(rows[i].response), rel=1e-5)
    by_episode = Update(watched, config=CONFIG.model_copy(update={"normalise": "episode"})).credit
    assert {i: credit.pull for i, credit in by_episode.items()} == {i: pytest.approx(c.pull) for i, c in grpo.items()}

    method = SEED.model_copy(update={"signal": LOUD})
    seed = Update(watched, method)
    assert seed.same(Update(rows, method))  # watching changes nothing
    tokens = sum(len(row.response) for row in rows)
    distilled = sum(len(row.response) for row in rows if row.teacher_prompt)
    for i, credit in seed.credit.items():
        if rows[i].teacher_prompt is None:
            assert credit.pull == pytest.approx(grpo[i].pull, rel=1e-5)
            continue
        assert credit.teacher is not None
        assert credit.gate is not None
        gates = torch.sigmoid(5 * (torch.tensor(credit.teacher) - torch.tensor(rows[i].logp_old)))
        assert credit.gate == pytest.approx(gates.tolist(), abs=1e-6)
        expected = [pull + gate * tokens / distilled for pull, gate in zip(grpo[i].pull, credit.gate, strict=True)]
        assert credit.pull == pytest.approx(expected, rel=1e-4)


def test_a_plain_teacher_with_the_same_weights_opens_every_gate_halfway(rows: list[Row]) -> None:
    done = Update([replace(row, teacher_prompt=row.prompt) for row in rows], SEED)
    assert abs(done.statistics["skill/gap"]) < 1e-5
    assert done.statistics["skill/gate"] == pytest.approx(0.5, abs=1e-4)
    assert done.ledger.rescored_tokens == 0  # the sampling log-probs are the answer


def test_a_row_without_skill_is_not_distilled(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Any] = []

    def spy(policy: LocalPolicy, pairs: Sequence[Any], temperature: float) -> list[Tensor]:
        scored.extend(pairs)
        return score_rows(policy, pairs, temperature)

    monkeypatch.setattr(trainer_module, "score_rows", spy)
    done = Update(rows, SEED)
    distilled = [row for row in rows if row.teacher_prompt is not None]
    assert [response for _, response in scored] == [row.response for row in distilled]
    assert done.ledger.rescored_tokens == sum(len(row.response) for row in distilled)


# ----------------------------------------------------------------------------------------- what a gradient ignores


METHODS = {
    "grpo": GRPO,
    "seed": SEED.model_copy(update={"signal": GatedNLL(coefficient=1.0)}),
    "seed-current": SEED.model_copy(
        update={"teacher": Teacher(weights="current", context="own_skill"), "signal": GatedNLL()}
    ),
    "skill-sd": vary(get_method("skill-sd"), {"signal": {"coefficient": 1.0}}, ""),
    "rlsd": get_method("rlsd"),
    "opd": external(coefficient=1.0),
    "opd-full": external(coefficient=1.0, vocabulary="full"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("normalise", ["token", "episode"])
def test_micro_batches_order_and_duplicates_change_no_gradient(
    rows: list[Row], other: LocalPolicy, method: Method, normalise: str
) -> None:
    if method.advantage is None:
        rows = [replace(row, advantage=None, teacher_prompt=row.prompt) for row in rows]
    config = CONFIG.model_copy(update={"kl": 0.1, "entropy": 0.01, "normalise": normalise})
    others = {"reference": other, "teacher": other}

    def gradients(rows: Sequence[Row], **settings: Any) -> dict[str, Tensor]:
        return Update(rows, method, config.model_copy(update=settings), **others).gradients

    whole = gradients(rows)
    assert distance(whole, gradients(rows, token_budget=1)) < CLOSE
    assert distance(whole, gradients(rows, token_budget=100)) < CLOSE
    assert distance(whole, gradients(rows[::-1])) < CLOSE
    assert distance(whole, gradients([row for row in rows for _ in range(2)])) < CLOSE


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.teacher])
def test_every_teacher_tells_how_far_it_is_from_the_policy(rows: list[Row], other: LocalPolicy, name: str) -> None:
    statistics = Update(rows, METHODS[name], teacher=other).statistics
    told = statistics.get("skill/gap", statistics.get("skill/teacher_kl"))
    assert told is not None
    assert abs(told) > 1e-3


def test_rows_that_no_term_uses_change_nothing(rows: list[Row]) -> None:
    idle = [replace(row, advantage=None, teacher_prompt=None, logp_old=(float("nan"),) * 9) for row in rows]
    empty = replace(rows[0], response=(), logp_old=())
    done = Update([*idle, *rows, empty], SEED)
    assert done.same(Update(rows, SEED))
    assert done.statistics["rows"] == 12
    nothing = Update(idle, SEED)
    assert nothing.statistics == {"rows": 0.0}
    assert nothing.ledger.optimizer_steps == 0


def test_loss_components_do_not_rescale_each_other(rows: list[Row], other: LocalPolicy) -> None:
    """grad(total) = grad(policy) + lambda grad(distillation) + beta grad(KL), each as it is when it stands alone."""
    rows = [replace(row, advantage=None) if row.group == 2 else row for row in rows]  # distilled or idle
    method = SEED.model_copy(update={"signal": GatedNLL(coefficient=0.5)})
    mute = SEED.model_copy(update={"signal": GatedNLL(coefficient=0.0)})
    no_reward = [replace(row, advantage=None) for row in rows]
    together, alone = Update(rows, method).gradients, Update(rows, GRPO).gradients
    assert distance(alone, Update(rows, mute).gradients) < CLOSE
    distilled = Update(no_reward, method).gradients
    assert distance(together, {name: alone[name] + distilled[name] for name in alone}) < CLOSE

    config = CONFIG.model_copy(update={"kl": 0.3})

    def two_updates(config: TrainConfig, rows: Sequence[Row]) -> dict[str, Tensor]:
        trainer = Trainer(toy_policy(), GRPO, config, seed=0, reference=other)
        trainer.steps = 1  # so that the reference is another policy
        trainer.update(rows, 1, Ledger())
        return {name: weight.grad.clone() for name, weight in trainer.policy.model.named_parameters()}

    rewarded = [row for row in rows if row.advantage is not None]
    only_kl = two_updates(config, [replace(row, advantage=0.0) for row in rewarded])
    alone = Update(rewarded).gradients
    expected = {name: alone[name] + only_kl[name] for name in alone}
    assert distance(two_updates(config, rewarded), expected) < CLOSE


@pytest.mark.parametrize("advantage", [float("inf"), float("nan"), 1e9])
def test_a_gradient_that_exploded_is_skipped(rows: list[Row], advantage: float) -> None:
    done = Update([replace(row, advantage=advantage) for row in rows])
    assert done.statistics["skipped_steps"] == 1
    assert done.policy.fingerprint == toy_policy().fingerprint
    assert done.ledger.optimizer_steps == 0


def test_mini_batches_and_row_limit(rows: list[Row]) -> None:
    done = Update(rows, config=CONFIG.model_copy(update={"mini_batches": 2, "max_rows": 10}))
    assert done.statistics["rows"] == 10
    assert done.ledger.optimizer_steps == 2
    assert done.ledger.trained_tokens <= sum(len(row.response) for row in rows)
