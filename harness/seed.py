"""SEED: self-evolving on-policy distillation, the parts of the loop that make it (``harness.methods.SEED``).

Stage 1 (once): play training tasks with the base policy, let an annotator write one hindsight skill per finished
episode, fine-tune the policy on (analysis prompt -> skill). The result both acts and analyses.

Stage 2, every update:

1. collect: N episodes per task with the weights of the update's start, ordinary prompts, no skills;
2. analyse: the same weights write, greedily, one skill for each finished episode, won or lost;
3. re-score: the same weights score the same sampled tokens again with the episode's own skill in the prompt;
4. optimise: group-relative policy gradient plus the gated distillation term of ``harness.objective.gated_nll``.

An unreadable skill leaves plain policy gradient for its episode and is counted. Acting after training needs neither
skills nor analysis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from harness.config import AnalysisConfig, Stage1Config
from harness.contracts import Episode, HarnessError, Ledger, Prompt, Skill
from harness.policy.base import Request, Sampling
from harness.policy.local import LocalPolicy
from harness.skills import analysis_prompt, as_it_is, insert_skill, read_skill, shuffle_skills, skill_answer
from harness.trainer import Row, forward_flops

NO_SKILL = Skill(text="", summary="", author="", update=-1, raw="")


def analyse(
    analyzer: LocalPolicy,
    episodes: Sequence[Episode],
    config: AnalysisConfig,
    update: int,
    ledger: Ledger,
    brief: Callable[[str], str] = as_it_is,
) -> list[Skill]:
    """The analyzer's hindsight skill for each episode: one greedy attempt, malformed answers stay empty.

    ``brief`` is the environment's, for policies that read compact prompts.

    Episodes without a step and analysis prompts that do not fit get no skill.
    """
    requests: dict[int, Request] = {}
    for index, episode in enumerate(episodes):
        prompt, _ = analysis_prompt(
            episode, analyzer.prompt_style, config.max_prompt_tokens, analyzer.prompt_tokens, brief
        )
        if prompt is not None and episode.steps and episode.counted:
            requests[index] = Request(prompt, key=(update, index))
    responses = analyzer.generate(list(requests.values()), Sampling(temperature=0.0, max_tokens=config.max_tokens))
    tokens = sum(len(response.token_ids) for response in responses)
    ledger.analyzer_tokens += tokens
    ledger.flops += forward_flops(analyzer, (request.prompt for request in requests.values()), tokens)
    skills = [NO_SKILL] * len(episodes)
    for index, response in zip(requests, responses, strict=True):
        skills[index] = read_skill(response.text, "policy", update)
    return skills


def teacher_prompts(
    rows: Sequence[Row], skills: Sequence[Skill], context: str, groups: Sequence[int], key: tuple[int, ...]
) -> list[Prompt | None]:
    """What the teacher reads in place of each row's prompt (x+ of the paper); None where the row is not distilled.

    Args:
        skills: One per episode; unread where the context asks for none.
        context: ``Teacher.context`` of the method.
        groups: Group of each episode; shuffled skills come from another episode.
    """
    if context == "plain":
        return [row.prompt for row in rows]
    if context == "shuffled_skill":
        skills = shuffle_skills(skills, groups, key)
    if context == "empty_skill":
        skills = [NO_SKILL] * len(groups)
    return [insert_skill(row.prompt, skills[row.episode].text) if skills[row.episode].usable else None for row in rows]


def hindsight_sft(
    policy: LocalPolicy,
    samples: Sequence[tuple[Prompt, tuple[int, ...]]],
    config: Stage1Config,
    seed: int,
    token_budget: int,
    ledger: Ledger,
    report: Callable[[int, int], None],
) -> float:
    """Fine-tune on (analysis prompt -> skill answer) and return the last epoch's loss, the mean over answer tokens.

    AdamW with betas (0.9, 0.95), weight decay 0.01, 10 % linear warm-up, cosine decay, gradient norm clipped at 1.

    Raises:
        HarnessError: No sample is left, i.e. no episode could be annotated.
    """
    if not samples:
        raise HarnessError("stage 1 has no usable skill to train on; check the annotator")
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    total = config.epochs * math.ceil(len(samples) / config.batch)
    warmup = max(1, round(0.1 * total))
    step, loss_sum, token_sum = 0, 0.0, 0
    for epoch in range(config.epochs):
        loss_sum, token_sum = 0.0, 0
        order = np.random.default_rng([seed, epoch, 3]).permutation(len(samples))
        for start in range(0, len(samples), config.batch):
            batch = [samples[i] for i in order[start : start + config.batch]]
            tokens = sum(len(answer) for _, answer in batch)
            progress = (step - warmup) / max(1, total - warmup)
            scale = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = config.learning_rate * scale
            optimizer.zero_grad(set_to_none=True)
            for part in policy.plan_micro_batches(batch, token_budget):
                loss = -policy.score([batch[i] for i in part]).logprobs.sum() / tokens
                loss.backward()
                loss_sum += loss.item() * tokens
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
            step += 1
            token_sum += tokens
            ledger.optimizer_steps += 1
            ledger.trained_tokens += tokens
            ledger.flops += 3 * forward_flops(policy, (prompt for prompt, _ in batch), tokens)
            report(step, total)
    return loss_sum / token_sum


def sft_samples(
    policy: LocalPolicy,
    episodes: Sequence[Episode],
    skills: Sequence[Skill],
    max_prompt_tokens: int,
    brief: Callable[[str], str] = as_it_is,
) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Training pairs of stage 1: only well-formed skills (v_tau = 1) of episodes whose prompt fits."""
    samples = []
    for episode, skill in zip(episodes, skills, strict=True):
        if not skill.usable or not episode.steps:
            continue
        prompt, _ = analysis_prompt(episode, policy.prompt_style, max_prompt_tokens, policy.prompt_tokens, brief)
        if prompt is not None:
            samples.append((prompt, policy.answer_ids(skill_answer(skill.summary, skill.text))))
    return samples
