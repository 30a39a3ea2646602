"""Building the embedded policies from scripted demonstrations.

Three stages, each deterministic from its seed:

- ``able``: expert demonstrations (some with a skill in the prompt, some that recover from blunders) and
  (episode -> skill) pairs; then the same with most rows from where larger batches are needed: ``sight`` from EZPoints,
  whose cards are only learned from many rows at once, ``names`` from WebShop and SearchQA, whose many rare words are
  only copied safely after it. The result acts well, follows skills and writes them.
- ``tiny`` continues from ``able`` on demonstrations whose plain part is often random: it keeps syntax, copying,
  procedure and skill reading, and chooses poorly. This is the base policy that methods improve.
- ``tiny-teacher`` continues from ``able`` on the same data for much longer, and in ``search`` on plain demonstrations
  by the expert that only knows what it saw, which is what a policy without hidden knowledge can imitate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from harness.contracts import HarnessError
from harness.policy.demonstrations import SOURCES, Demonstrator, Source, Stage, demonstrations
from harness.policy.load import MODELS, load_local
from harness.policy.local import LocalPolicy
from harness.policy.measure import Ability, measure
from harness.policy.tiny import build_tokenizer, new_tiny
from harness.provenance import provenance
from harness.skills import PHRASES, render_analysis, skill_answer

Report = Callable[[str, int, int, float], None]
"""Called with (stage, step, steps, loss)."""

EVEN = (0.14, 0.05, 0.03, 0.06, 0.14, 0.10, 0.22, 0.26)
"""Shares of the sources once everything is learned."""

STAGES = {
    "able": Stage(20000, 2e-3, 1e-3, weakened=False, skilled=0.4, analysed=0.15, seed=1),
    "sight": Stage(
        500,
        2e-3,
        1e-3,
        weakened=False,
        skilled=0.0,
        analysed=0.0,
        seed=4,
        rows=32,
        shares=(0.03, 0.01, 0.01, 0.01, 0.03, 0.87, 0.02, 0.02),
    ),
    "names": Stage(
        4000,
        2e-3,
        1e-4,
        weakened=False,
        skilled=0.4,
        analysed=0.12,
        seed=6,
        rows=32,
        shares=(0.10, 0.03, 0.02, 0.04, 0.10, 0.07, 0.26, 0.38),
    ),
    "tiny": Stage(2000, 1e-3, 5e-5, weakened=True, skilled=0.4, analysed=0.2, seed=2, rows=32, shares=EVEN),
    "tiny-teacher": Stage(5000, 1e-3, 1e-4, weakened=False, skilled=0.2, analysed=0.1, seed=3, rows=32, shares=EVEN),
    "search": Stage(
        2000,
        5e-4,
        2e-5,
        weakened=False,
        skilled=0.15,
        analysed=0.05,
        seed=5,
        rows=32,
        searching=True,
        shares=(0.24, 0.08, 0.08, 0.14, 0.08, 0.08, 0.14, 0.16),
    ),
}

TOKEN_BUDGET = 2048
"""Padded tokens per pass: short rows are not padded to the length of an analysis."""

COMMON = ("able", "sight", "names")
"""Stages of the common ancestor."""

PARTS = {"able": (), "tiny": ("tiny",), "tiny-teacher": ("tiny-teacher", "search")}
"""Stages of each policy after its common ancestor."""

VOCABULARY = 4096
"""At most so many tokens; the texts hold fewer words."""

CORPUS_EPISODES = 150
"""Episodes of each source that the tokenizer is built from."""


def fit(policy: LocalPolicy, name: str, report: Report, stage: Stage | None = None) -> None:
    """Train on a stage's demonstrations: mean negative log-likelihood of the answer tokens, AdamW, cosine decay."""
    stage = stage or STAGES[name]
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    smooth = 0.0
    for step, batch in zip(range(stage.steps), demonstrations(stage, policy.prompt_tokens), strict=False):
        warm = min(1.0, (step + 1) / 100)
        cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
        rate = stage.final_rate + (stage.learning_rate - stage.final_rate) * cosine
        optimizer.param_groups[0]["lr"] = rate * warm
        rows = [(prompt, policy.answer_ids(answer)) for prompt, answer in batch]
        tokens = sum(len(answer) for _, answer in rows)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in policy.plan_micro_batches(rows, TOKEN_BUDGET):
            loss = -policy.score([rows[i] for i in part]).logprobs.sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        smooth = total if step == 0 else 0.98 * smooth + 0.02 * total
        if step % 50 == 0 or step + 1 == stage.steps:
            report(name, step + 1, stage.steps, smooth)


def corpus(episodes: int) -> tuple[list[str], list[str]]:
    """Texts to build the tokenizer from, and the phrases that become single tokens."""
    texts: list[str] = []
    phrases: dict[str, None] = dict.fromkeys(PHRASES)
    for index, source in enumerate(SOURCES):
        stage = Stage(0, 0.0, 0.0, weakened=True, skilled=0.5, analysed=0.5, seed=0)
        demonstrator = Demonstrator(replace(source, weak=0.3), stage, np.random.default_rng([0, index]))
        phrases |= dict.fromkeys(demonstrator.env.phrases)
        for _ in range(episodes):
            rows, episode = demonstrator.demonstrate()
            texts += [text for prompt, answer in rows for text in (prompt.text, answer)]
            note = demonstrator.env.annotate(episode)
            if note:
                asked = render_analysis(episode, "compact", len(episode.steps), demonstrator.env.brief)
                texts += [asked.text, skill_answer(*note)]
    return texts, list(phrases)


def build_able(report: Report) -> LocalPolicy:
    """The common ancestor: fresh tokenizer, fresh weights, common stages."""
    texts, phrases = corpus(CORPUS_EPISODES)
    policy = new_tiny(build_tokenizer(texts, phrases, VOCABULARY), seed=0)
    for stage in COMMON:
        fit(policy, stage, report)
    return policy


def main(name: str, out: Path | None, start: Path | None = None) -> int:
    """``harness build-policy``: build one policy, measure it, write it with model card and manifest.

    Args:
        name: ``able``, ``tiny`` or ``tiny-teacher``.
        out: Directory to write; default: where the package looks for it.
        start: An ``able`` built before; default: build it first.
    """
    from harness.terminal import Terminal

    torch.set_num_threads(1)
    console, clock = Terminal(stderr=True), time.perf_counter()

    def report(stage: str, step: int, steps: int, loss: float) -> None:
        spent = time.perf_counter() - clock
        console.print(f"{stage} {step}/{steps}  loss {loss:.3f}  {spent:.0f} s", highlight=False)

    target = out or MODELS / name
    if target.exists() and not (target / "config.json").is_file():
        raise HarnessError(f"{target} exists and is not a model directory; name another with --out")
    policy = load_local(str(start)) if start else build_able(report)
    for stage in PARTS[name]:
        fit(policy, stage, report)
    package(name, policy, target)
    console.print(f"wrote {target} ({policy.parameters:,} parameters)")
    return 0


def package(name: str, policy: LocalPolicy, target: Path) -> None:
    """Measure a built policy and write it with model card and manifest."""
    abilities = {source.label: ability(policy, source) for source in SOURCES}
    policy.save(target)
    facts = {
        "name": name,
        "fingerprint": policy.fingerprint,
        "parameters": policy.parameters,
        "stages": {stage: asdict(STAGES[stage]) for stage in (*COMMON, *PARTS[name])},
        "sources": [asdict(source) for source in SOURCES],
        "ability": {source: asdict(value) for source, value in abilities.items()},
        **provenance(),
    }
    (target / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n")
    (target / "README.md").write_text(model_card(name, policy, abilities))


def ability(policy: LocalPolicy, source: Source, tasks: int = 128) -> Ability:
    """What the policy can do in a source's environment."""
    return measure(policy, source.env, source.options, tasks, source.history, source.max_steps)


def model_card(name: str, policy: LocalPolicy, abilities: dict[str, Ability]) -> str:
    """The README of a packaged policy."""
    purpose = {
        "able": "The common ancestor of the embedded policies.",
        "tiny": "The embedded base policy: it follows a good skill far better than it chooses on its own, so that "
        "there is something to learn. It stands in for an instruct model on a laptop.",
        "tiny-teacher": "The embedded teacher: the same architecture trained far longer on expert demonstrations.",
    }[name]
    rows = "\n".join(
        f"| {source} | {a.plain:.1%} | {a.skilled:.1%} | {a.misled:.1%} | {a.valid:.1%} | {a.written:.1%} |"
        for source, a in abilities.items()
    )
    return f"""# {name}

{purpose}

Architecture: Qwen2.5-VL from transformers at toy size, {policy.parameters:,} parameters, {policy.vocabulary} tokens,
compact prompts. Trained from scripted demonstrations only; rebuild it with `harness build-policy {name}`.
It knows nothing but these games and must not be used for anything else.

Success over 128 tasks of each eval panel at temperature 1: on ordinary prompts, with the oracle's skill in the prompt,
with another task's skill; then the share of actions that the environment accepts, and of own
skills that equal the scripted annotator's.

| environment | plain | right skill | wrong skill | valid actions | skills written exactly |
|---|---|---|---|---|---|
{rows}

Licence: Apache-2.0, as the package.
"""
