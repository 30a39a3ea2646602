"""One update: what enters the gradient, and what must not change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_cells import toy_policy

from harness import trainer as trainer_module
from harness.config import AnalysisConfig, Stage1Config, TrainConfig
from harness.contracts import Episode, HarnessError, Ledger, Prompt, Response, Skill, Step, StopReason, Task
from harness.methods import SEED, Method, Signal, Teacher, get_method
from harness.policy.base import Request, Sampling
from harness.policy.local import LocalPolicy
from harness.seed import NO_SKILL, analyse, hindsight_sft, sft_samples, teacher_prompts
from harness.skills import insert_skill, read_skill
from harness.trainer import Row, Trainer, score_rows

GRPO = get_method("grpo")
CONFIG = TrainConfig(learning_rate=1e-3, kl=0.0, grad_clip=1e9)
SKILL = "Open the left door."
CLOSE = 5e-6
"""Rounding of float32 gradients, relative to the largest entry."""


def external(**signal: Any) -> Method:
    """Distillation from another policy, without reward."""
    teacher = Teacher(weights="external", context="plain")
    return Method(name="opd", summary="", advantage=None, teacher=teacher, signal=Signal(kind="reverse_kl", **signal))


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
        self.statistics = self.trainer.update(rows, 1, self.ledger)
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
    statistics = done.trainer.update(rows, 2, done.ledger)
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
        ("shuffled_skill", [NO_SKILL] * 12),
    ],
)
def test_without_a_usable_skill_seed_is_grpo_bit_for_bit(rows: list[Row], context: str, skills: list[Skill]) -> None:
    contexts = teacher_prompts(rows, skills, context, [i // 4 for i in range(12)], (0, 1))
    assert contexts == [None] * 12
    silent = [replace(row, teacher_prompt=prompt) for row, prompt in zip(rows, contexts, strict=True)]
    assert SEED.teacher is not None
    method = SEED.model_copy(update={"teacher": SEED.teacher.model_copy(update={"context": context})})
    seed, grpo = Update(silent, method), Update(silent)
    assert seed.same(grpo)
    assert not Update(rows, SEED).same(grpo)
    assert {name: seed.statistics[name] for name in grpo.statistics} == grpo.statistics
    assert seed.ledger.rescored_tokens == 0


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
    "seed": SEED.model_copy(update={"signal": Signal(kind="gated_nll", coefficient=1.0)}),
    "seed-current": SEED.model_copy(
        update={"teacher": Teacher(weights="current", context="own_skill"), "signal": Signal(kind="gated_nll")}
    ),
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
    method = SEED.model_copy(update={"signal": Signal(kind="gated_nll", coefficient=0.5)})
    mute = SEED.model_copy(update={"signal": Signal(kind="gated_nll", coefficient=0.0)})
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


def test_a_gradient_that_is_not_finite_is_skipped(rows: list[Row]) -> None:
    done = Update([replace(row, advantage=float("inf")) for row in rows])
    assert done.statistics["skipped_steps"] == 1
    assert done.policy.fingerprint == toy_policy().fingerprint
    assert done.ledger.optimizer_steps == 0


def test_mini_batches_and_row_limit(rows: list[Row]) -> None:
    done = Update(rows, config=CONFIG.model_copy(update={"mini_batches": 2, "max_rows": 10}))
    assert done.statistics["rows"] == 10
    assert done.ledger.optimizer_steps == 2
    assert done.ledger.trained_tokens <= sum(len(row.response) for row in rows)


# -------------------------------------------------------------------------------------------------------- stage 1


def finished(count: int) -> list[Episode]:
    episodes = []
    for n in range(count):
        image = np.full((28, 28, 3), 20 * n, np.uint8)
        observation: Any = {"text": "You have opened", "images": (image,)}
        prompt = Prompt("<image>Find the prize.", (image,))
        step = Step(observation, prompt, Response("left", (5,), (-1.0,)), "left", True, float(n % 2))
        reason = StopReason.SUCCESS if n % 2 else StopReason.FAILURE
        episodes.append(Episode(Task(f"t/{n}", "toy", "t", "", {}, str(n)), 0, "Find the prize.", [step], reason))
    return episodes


def test_hindsight_sft_teaches_to_write_skills() -> None:
    policy, episodes, ledger = toy_policy(), finished(8), Ledger()
    answer = '{"episode_summary": "1 steps.", "episode_skill": "Open the left door."}'
    skills = [read_skill(answer, "scripted", -1)] * 7 + [NO_SKILL]
    samples = sft_samples(policy, episodes, skills, 256)
    assert len(samples) == 7
    settings = Stage1Config(epochs=1, batch=4, learning_rate=1e-2)
    first = hindsight_sft(policy, samples, settings, 0, 512, ledger, lambda done, total: None)
    settings = settings.model_copy(update={"epochs": 12})
    last = hindsight_sft(policy, samples, settings, 0, 512, ledger, lambda done, total: None)
    assert last < 0.2 * first
    written = analyse(policy, episodes, AnalysisConfig(max_tokens=16), 1, ledger)
    assert [skill.text for skill in written] == [SKILL] * 8
    assert ledger.analyzer_tokens == 8 * len(policy.answer_ids(answer))
    assert ledger.optimizer_steps == 2 * 13
    assert ledger.trained_tokens == 13 * sum(len(tokens) for _, tokens in samples)


def test_stage_1_without_any_skill_is_one_clear_line() -> None:
    with pytest.raises(HarnessError, match="no usable skill"):
        hindsight_sft(toy_policy(), [], Stage1Config(), 0, 512, Ledger(), lambda done, total: None)


def test_episodes_without_a_step_or_a_score_are_not_analysed() -> None:
    policy, episodes, ledger = toy_policy(), finished(3), Ledger()
    episodes[0].steps = []
    episodes[1].stop_reason = StopReason.ENV_ERROR
    skills = analyse(policy, episodes, AnalysisConfig(max_tokens=4), 1, ledger)
    assert skills[:2] == [NO_SKILL] * 2
    assert skills[2].author == "policy"
    assert not skills[2].usable
    assert ledger.analyzer_tokens <= 4
