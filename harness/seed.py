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

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from harness.cards import Ledger
from harness.config import AnalysisConfig, ImitationConfig, Stage1Config, TrainConfig
from harness.contracts import AgentEnv, Episode, HarnessError, Prompt, Skill, Task
from harness.methods import Teacher
from harness.policy.base import Policy, Request, Sampling
from harness.policy.local import LocalPolicy
from harness.policy.sharded import clip_gradients, learner_of, take_back
from harness.rows import Sample, forward_flops, training_flops
from harness.skills import (
    analysis_prompt,
    as_it_is,
    exchange_attempts,
    insert_skill,
    read_skill,
    shuffle_skills,
    skill_answer,
)
from harness.skipping import Skips, likely_cause
from harness.world import World

log = logging.getLogger(__name__)

NO_SKILL = Skill(text="", summary="", author="", update=-1, raw="")


def analyse(
    analyzer: Policy,
    episodes: Sequence[Episode],
    config: AnalysisConfig,
    update: int,
    ledger: Ledger,
    brief: Callable[[str], str] = as_it_is,
    world: World | None = None,
) -> list[Skill]:
    """The analyzer's hindsight skill for each episode: one greedy attempt, malformed answers stay empty.

    ``brief`` is the environment's, for policies that read compact prompts.

    Episodes without a step and analysis prompts that do not fit get no skill.
    """
    world = world or World()
    requests: dict[int, Request] = {}
    for index, episode in enumerate(episodes):
        prompt, _ = analysis_prompt(
            episode, analyzer.prompt_style, config.max_prompt_tokens, analyzer.prompt_tokens, brief
        )
        if prompt is not None and episode.steps and episode.counted:
            requests[index] = Request(prompt, key=(update, index))
    mine = world.mine(list(requests.values()))
    responses = world.collect(analyzer.generate(mine, Sampling(temperature=0.0, max_tokens=config.max_tokens)))
    tokens = sum(len(response.token_ids) for response in responses)
    ledger.analyzer_tokens += tokens
    ledger.flops += forward_flops(analyzer, (request.prompt for request in requests.values()), tokens)
    skills = [NO_SKILL] * len(episodes)
    for index, response in zip(requests, responses, strict=True):
        skills[index] = read_skill(response.text, "policy", update)
    return skills


def teacher_texts(
    teacher: Teacher,
    episodes: Sequence[Episode],
    skills: Sequence[Skill],
    groups: Sequence[int],
    given: Callable[[Task], str],
    key: tuple[int, ...],
) -> list[str | None]:
    """The skill that the teacher reads about each episode; empty: an ordinary prompt; None: it is not distilled.

    Args:
        skills: What was written about each episode; unread where the context asks for none.
        groups: Group of each episode; skills of other attempts and tasks are told apart by it.
        given: The text for a task where nobody writes about episodes: from the library or by the environment.
        key: Names the exchange of skills between episodes.
    """
    texts: list[str | None]
    match teacher.context:
        case "plain":
            texts = [""] * len(episodes)
        case "empty_skill":
            texts = [None] * len(episodes)
        case "library" | "oracle_skill":
            texts = [given(episode.task) or None for episode in episodes]
        case "own_skill":
            texts = _usable(skills)
        case "same_task_skill":
            texts = _usable(exchange_attempts(skills, groups, key))
        case "other_task_skill":
            texts = _usable(shuffle_skills(skills, groups, key))
    return [text if chosen(teacher, episode) else None for text, episode in zip(texts, episodes, strict=True)]


def oracle_skill(env: AgentEnv, task: Task) -> str:
    """The environment's own skill for a task, written from its hidden state; resets ``env``."""
    env.reset(options={"task": task})
    return env.oracle_skill()


def chosen(teacher: Teacher, episode: Episode) -> bool:
    """Whether the method distils episodes that ended like this one."""
    return teacher.episodes == "all" or episode.success == (teacher.episodes == "successes")


def _usable(skills: Sequence[Skill]) -> list[str | None]:
    return [skill.text if skill.usable else None for skill in skills]


def teacher_prompt(prompt: Prompt, text: str | None) -> Prompt | None:
    """What the teacher reads in place of a step's prompt (x+ of the paper); None where the step is not distilled."""
    return insert_skill(prompt, text) if text else None if text is None else prompt


def fine_tune(
    policy: LocalPolicy,
    samples: Sequence[Sample],
    config: Stage1Config | ImitationConfig,
    seed: int,
    train: TrainConfig,
    ledger: Ledger,
    report: Callable[[int, int], None],
    world: World | None = None,
) -> float:
    """Fine-tune on (prompt -> answer) and return the last epoch's loss, the mean over answer tokens.

    AdamW with betas (0.9, 0.95), weight decay 0.01, 10 % linear warm-up, cosine decay, gradient norm clipped at 1.
    ``train`` says how many tokens a micro-batch holds and which steps are left out; HarnessError if too many are.
    """
    world = world or World()
    learner = learner_of(policy, world)
    trained = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    total = config.epochs * math.ceil(len(samples) / config.batch)
    warmup = max(1, round(0.1 * total))
    step, skipped, loss_sum, token_sum = 0, 0, 0.0, 0
    skips = Skips(train.max_skipped, train.exploding)
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
            learned = 0.0
            for part, counts in world.deal(policy.plan_micro_batches(batch, train.token_budget)):
                loss = counts * -learner.score([batch[i] for i in part]).logprobs.sum() / tokens
                loss.backward()
                learned += loss.item() * tokens
            learned = world.total({"loss": learned})["loss"]
            world.add_gradients(trained)
            norm = clip_gradients(trained, 1.0)
            step += 1
            where = f"fine-tuning step {step} of {total}"
            if skips.steps(norm, where, lambda: likely_cause(optimizer)):
                optimizer.step()
                loss_sum += learned
                token_sum += tokens
                ledger.optimizer_steps += 1
            else:
                skipped += 1
            ledger.trained_tokens += tokens
            ledger.flops += training_flops(policy, (prompt for prompt, _ in batch), tokens)
            report(step, total)
    take_back(policy, learner)
    if skipped:
        log.warning("fine-tuning left out %d of %d steps: their gradients exploded", skipped, total)
    return loss_sum / max(1, token_sum)


def skill_samples(
    policy: LocalPolicy,
    episodes: Sequence[Episode],
    skills: Sequence[Skill],
    max_prompt_tokens: int,
    brief: Callable[[str], str] = as_it_is,
) -> list[Sample]:
    """Training pairs of stage 1: only well-formed skills (v_tau = 1) of episodes whose prompt fits.

    Raises HarnessError where none is left.
    """
    samples = []
    for episode, skill in zip(episodes, skills, strict=True):
        if not skill.usable or not episode.steps:
            continue
        prompt, _ = analysis_prompt(episode, policy.prompt_style, max_prompt_tokens, policy.prompt_tokens, brief)
        if prompt is not None:
            samples.append((prompt, policy.answer_ids(skill_answer(skill.summary, skill.text))))
    if not samples:
        raise HarnessError("stage 1 has no usable skill to train on; check the annotator")
    return samples


def imitation_samples(episodes: Sequence[Episode], wanted: str) -> list[Sample]:
    """Training pairs from a teacher's episodes: each step's prompt and answer.

    ``wanted`` is ``ImitationConfig.episodes``. Raises HarnessError where none is left.
    """
    kept = [episode for episode in episodes if episode.counted and (episode.success or wanted == "all")]
    samples = [(step.prompt, step.response.token_ids) for episode in kept for step in episode.steps]
    if not samples:
        raise HarnessError(f"the teacher solved none of its {len(episodes)} episodes; there is nothing to imitate")
    return samples
