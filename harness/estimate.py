"""What a cell will take: episodes, tokens, FLOPs, memory and hours, estimated before anything runs.

Counts follow the ledger: what ``harness.trainer`` and ``harness.seed`` will charge if episodes and answers are as long
as ``Lengths`` says. Memory and hours rest on assumptions that are named here and printed beside the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from harness.config import CellConfig, LoraConfig, TrainConfig
from harness.methods import Method, Reweighting, full_vocabulary
from harness.policy.sizes import Size

# ------------------------------------------------------------------------------------------------- lengths

STEPS, PROMPT, ANSWER, ANALYSIS = 0.5, 0.5, 0.25, 0.05
"""Shares of their limits that lengths are assumed to have where nothing was measured: episodes of half the steps,
prompts of half the tokens, answers of a quarter; a skill is short beside the 4,096 tokens that it may have."""
SKILL = 30
"""Tokens of a skill in its JSON that there are at least."""


@dataclass(frozen=True)
class Lengths:
    """Means that decide what a cell takes.

    Attributes:
        steps: Of an episode.
        prompt, answer: Tokens of a step.
        analysis_prompt, analysis_answer: Tokens of an analysis.
        kept: Share of the steps that the policy gradient learns from; the others are of groups with one outcome.
        basis: Where the numbers come from, in words.
    """

    steps: float
    prompt: float
    answer: float
    analysis_prompt: float
    analysis_answer: float
    kept: float
    basis: str


def assumed_lengths(cell: CellConfig) -> Lengths:
    """Lengths from the limits of a cell's protocol and the shares above."""
    env, analysis = cell.env, cell.analysis
    if env.max_steps is None:
        raise ValueError("a cell of a recipe states its steps")
    lengths = Lengths(
        steps=max(1.0, STEPS * env.max_steps),
        prompt=PROMPT * env.max_prompt_tokens,
        answer=ANSWER * env.max_response_tokens,
        analysis_prompt=0.0,
        analysis_answer=min(max(SKILL, ANALYSIS * analysis.max_tokens), analysis.max_tokens) if analysis else 0.0,
        kept=1.0,
        basis="assumed",
    )
    return replace(lengths, analysis_prompt=episode_tokens(cell, lengths) if analysis else 0.0)


def episode_tokens(cell: CellConfig, lengths: Lengths) -> float:
    """Tokens of a prompt that shows a whole episode: every answer, and of every step prompt what only it shows."""
    if cell.analysis is None:
        raise ValueError("this cell has no analyses")
    seen = lengths.prompt / (1 + (cell.env.history or 0))
    return min(lengths.steps * (seen + lengths.answer), float(cell.analysis.max_prompt_tokens))


# ---------------------------------------------------------------------------------------------------- work


@dataclass(frozen=True)
class Work:
    """What a cell plays, samples and trains on. The first seven are as in the ledger, which leaves evaluations out.

    Attributes:
        sampling, scoring, training: Tokens that pass through the policy while it answers, scores without gradient, and
            learns; prompts included.
        teacher: Tokens that pass through an external teacher.
        evaluation_episodes: Episodes of all evaluations.
        evaluation: Tokens that pass through the policy in them.
    """

    episodes: float = 0
    env_steps: float = 0
    sampled_tokens: float = 0
    analyzer_tokens: float = 0
    rescored_tokens: float = 0
    trained_tokens: float = 0
    optimizer_steps: float = 0
    sampling: float = 0
    scoring: float = 0
    training: float = 0
    teacher: float = 0
    evaluation_episodes: float = 0
    evaluation: float = 0

    def __add__(self, other: Work) -> Self:
        return replace(self, **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> Self:
        return replace(self, **{f.name: getattr(self, f.name) * times for f in fields(self)})


def work_of(cell: CellConfig, lengths: Lengths, evaluation_tasks: int) -> Work:
    """What a cell takes in all; ``evaluation_tasks`` are those of its evaluation panel."""
    total = _evaluations(cell, lengths, evaluation_tasks)
    if cell.train is None or cell.method is None:
        return total
    total += _preparation(cell, lengths)
    if not cell.train.updates:
        return total
    return total + _update(cell, cell.method, cell.train, lengths) * cell.train.updates


def flops(cell: CellConfig, work: Work, size: Size, teacher: Size | None = None) -> float:
    """Of a cell's training, as the ledger estimates them: 2 x parameters x tokens forward, 6 x when trained, 4 x when
    only adapters are."""
    external = teacher.parameters * work.teacher if teacher else 0.0
    return 2.0 * (size.parameters * (work.sampling + work.scoring + _passes(cell) * work.training) + external)


def _passes(cell: CellConfig) -> int:
    """Forward passes that training costs: one, one for gradients of activations, one for those of weights."""
    return 2 if cell.train and cell.train.lora else 3


def _evaluations(cell: CellConfig, lengths: Lengths, tasks: int) -> Work:
    times = 1
    if cell.train is not None and cell.train.updates:
        times += -(-cell.train.updates // cell.eval.every)  # the start, every so many updates, the last update
    contexts = len(cell.method.evaluation) if cell.method else 1
    episodes = times * contexts * tasks * cell.eval.episodes_per_task
    return Work(
        evaluation_episodes=episodes,
        evaluation=episodes * lengths.steps * (lengths.prompt + lengths.answer),
    )


def _played(episodes: float, lengths: Lengths) -> Work:
    steps = episodes * lengths.steps
    return Work(
        episodes=episodes,
        env_steps=steps,
        sampled_tokens=steps * lengths.answer,
        sampling=steps * (lengths.prompt + lengths.answer),
    )


def _preparation(cell: CellConfig, lengths: Lengths) -> Work:
    """Hindsight-skill SFT, every skill usable; or SFT on a teacher's episodes, half of them successes."""
    if cell.stage1 is not None:
        episodes = cell.stage1.tasks * cell.stage1.attempts
        pairs = episodes * cell.stage1.epochs
        return _played(episodes, lengths) + Work(
            trained_tokens=pairs * lengths.analysis_answer,
            training=pairs * (lengths.analysis_prompt + lengths.analysis_answer),
            optimizer_steps=-(-episodes // cell.stage1.batch) * cell.stage1.epochs,
        )
    if cell.imitation is None:
        return Work()
    played = _played(cell.imitation.tasks * cell.imitation.attempts, lengths)
    rows = played.env_steps * (0.5 if cell.imitation.episodes == "successes" else 1.0)
    return replace(played, sampling=0.0, teacher=played.sampling) + Work(
        trained_tokens=rows * cell.imitation.epochs * lengths.answer,
        training=rows * cell.imitation.epochs * (lengths.prompt + lengths.answer),
        optimizer_steps=-(-rows // cell.imitation.batch) * cell.imitation.epochs,
    )


def _update(cell: CellConfig, method: Method, train: TrainConfig, lengths: Lengths) -> Work:
    """One update: collect, analyse, score, optimise."""
    played = _played(train.tasks * train.group, lengths)
    asked = played.episodes * _distilled_episodes(method) if method.writes_skills else 0.0
    analysed = Work()
    if method.teacher and method.teacher.analyzer != "external":
        analysed = Work(
            analyzer_tokens=asked * lengths.analysis_answer,
            sampling=asked * (lengths.analysis_prompt + lengths.analysis_answer),
        )
    share, taught = _learned(method, lengths)
    rows = min(played.env_steps * share, train.max_rows or float("inf"))
    read = rows * (lengths.prompt + lengths.answer)
    # The first update needs no scores of the reference: it is the policy itself.
    reference = read * (1 - 1 / train.updates) if train.kl else 0.0
    engine = read if cell.engine.kind != "local" else 0.0
    learned = Work(
        trained_tokens=rows * lengths.answer,
        training=read,
        scoring=reference + engine,
        optimizer_steps=train.mini_batches,
    )
    rehearsed = Work()
    if method.rehearsal:
        rehearsed = Work(
            trained_tokens=method.rehearsal.samples * lengths.analysis_answer,
            training=method.rehearsal.samples * (lengths.analysis_prompt + lengths.analysis_answer),
        )
    return played + analysed + learned + rehearsed + _taught(method, lengths, rows * taught / share if share else 0.0)


def _taught(method: Method, lengths: Lengths, rows: float) -> Work:
    """Scores of the teacher for so many rows; a skill is taken to be half of the analysis that holds it."""
    if method.teacher is None or method.teacher.context == "empty_skill":
        return Work()
    skill = 0.0 if method.teacher.context == "plain" else lengths.analysis_answer / 2
    read = rows * (lengths.prompt + skill + lengths.answer)
    external = method.teacher.weights == "external"
    return Work(
        rescored_tokens=rows * lengths.answer, scoring=0.0 if external else read, teacher=read if external else 0.0
    )


def _learned(method: Method, lengths: Lengths) -> tuple[float, float]:
    """Shares of the played steps that an update learns from, and that have a teacher."""
    rewarded = lengths.kept if method.advantage else 0.0
    if method.teacher is None or method.teacher.context == "empty_skill":
        return rewarded, 0.0
    if isinstance(method.signal, Reweighting):
        return rewarded, rewarded
    taught = _distilled_episodes(method)
    scored = 1.0 if full_vocabulary(method.signal) or method.teacher.weights == "current" else taught
    return rewarded + (1 - rewarded) * taught, scored


def _distilled_episodes(method: Method) -> float:
    """Share of the episodes that are distilled: half of them where only successes or only failures are."""
    return 1.0 if method.teacher is None or method.teacher.episodes == "all" else 0.5


# -------------------------------------------------------------------------------------------------- memory

LOGITS = 4 * 2**24 * 4
"""Bytes of a block of logits with what is computed from it (``harness.policy.score.LOGITS_AT_ONCE``)."""
GENERATION_BUDGET = 2**16
"""Padded prompt tokens of the answers that grow together (``LocalPolicy.generation_budget``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        weights: Of the policy; with FSDP2 also this GPU's share of the twin that is trained.
        gradients, optimizer: Of what is trained; AdamW keeps two numbers each.
        reference, teacher: Frozen models beside it.
        cache: Keys and values of the answers that grow at once, and of their prompts; or what vLLM takes.
        activations: Of one micro-batch under the token budget, with the weights rounded for it.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    teacher: float
    cache: float
    activations: float

    @property
    def peak(self) -> float:
        """The larger of playing and learning."""
        lasting = self.weights + self.optimizer + self.reference + self.teacher
        return lasting + max(self.cache, self.gradients + self.activations)


def memory_of(
    cell: CellConfig, size: Size, teacher: Size | None = None, gpus: int = 1, gpu_memory: float = 80e9
) -> Memory:
    """Memory of one of ``gpus`` that share a cell under FSDP2; one alone holds everything."""
    bf16 = cell.precision == "bfloat16"
    frozen = _frozen_bytes(size, bf16)
    cache = cell.engine.gpu_memory * gpu_memory if cell.engine.kind != "local" else _cache_bytes(cell, size)
    method, train = cell.method, cell.train
    if train is None or method is None:
        return Memory(frozen, 0, 0, 0, 0, cache, 0)
    if train.lora:
        trained, weights = adapter_parameters(size, train.lora), frozen
        weights += 4.0 * trained
    else:
        trained, weights = size.parameters, 4.0 * size.parameters
    share = trained / gpus
    start = method.teacher is not None and "start" in (method.teacher.weights, method.teacher.analyzer)
    external = teacher is not None and method.teacher is not None and method.teacher.weights == "external"
    rounded = 2.0 * (size.parameters - size.embeddings) if bf16 and not train.lora else 0.0
    return Memory(
        weights=weights + (weights / gpus if gpus > 1 else 0.0),
        gradients=4.0 * share,
        optimizer=8.0 * share,
        reference=frozen if (train.kl or start) and not train.lora else 0.0,
        teacher=_frozen_bytes(teacher, bf16) if external and teacher else 0.0,
        cache=cache,
        activations=activation_bytes(size, train.token_budget, bf16, train.gradient_checkpointing) + rounded + LOGITS,
    )


def activation_bytes(size: Size, tokens: int, bf16: bool, checkpointing: bool) -> float:
    """What a backward pass over so many tokens keeps, without weights and logits.

    A decoder layer keeps 5 width + 3 attention + 2 keys + 4 mlp numbers of a token in float32, as counted on Qwen2's
    layers; in bfloat16 the products are half as large, while the residual stream stays in float32.
    """
    if bf16:
        layer = 4.0 * (5 * size.width + 2.5 * size.attention + size.keys + 2 * size.mlp)
    else:
        layer = 4.0 * (5 * size.width + 3 * size.attention + 2 * size.keys + 4 * size.mlp)
    kept = size.layers * 4.0 * size.width + layer if checkpointing else size.layers * layer
    return tokens * kept


def adapter_parameters(size: Size, lora: LoraConfig) -> int:
    """Parameters of low-rank adapters: rank x (inputs + outputs) of every adapted linear map."""
    attention = 2 * (size.width + size.attention) + 2 * (size.width + size.keys)
    mlp = 3 * (size.width + size.mlp) if lora.targets == "all-linear" else 0
    return size.layers * lora.rank * (attention + mlp)


def _frozen_bytes(size: Size, bf16: bool) -> float:
    """Weights that are only read; embedding and head stay in float32."""
    return 2.0 * (size.parameters + size.embeddings) if bf16 else 4.0 * size.parameters


def _cache_bytes(cell: CellConfig, size: Size) -> float:
    """Keys and values in the cell's precision, of prompts once more than answers need them."""
    env = cell.env
    flying = max(cell.eval.batch, cell.train.tasks * cell.train.group if cell.train else 0)
    rows = max(1, min(flying, GENERATION_BUDGET // env.max_prompt_tokens))
    tokens = rows * (2 * env.max_prompt_tokens + env.max_response_tokens)
    return (2.0 if cell.precision == "bfloat16" else 4.0) * 2 * size.layers * size.keys * tokens


# --------------------------------------------------------------------------------------------------- hours


@dataclass(frozen=True)
class Speed:
    """How fast a machine works.

    Attributes:
        name: Of the GPU.
        peak: FLOP/s that it could do in the cell's precision.
        memory: Bytes that it has.
        sampling, scoring, training: Shares of the peak that are reached, in FLOPs as the ledger counts them.
        basis: Where the numbers come from, in words.
    """

    name: str
    peak: float
    memory: float
    sampling: float
    scoring: float
    training: float
    basis: str


ASSUMED = Speed("A800 80GB", 312e12, 80e9, 0.03, 0.35, 0.3, "assumed, nothing was measured")
"""The paper's GPU at its data sheet's bfloat16 peak. Small batches of short answers leave a GPU nearly idle; scoring
and training do as well as is usual."""
ASSUMED_VLLM = 0.15
"""Share of the peak that vLLM is assumed to reach, which fills its batches anew and reads shared prompts once."""


def seconds(cell: CellConfig, work: Work, size: Size, speed: Speed, teacher: Size | None = None) -> float:
    """GPU seconds of a cell, evaluations included: FLOPs of each kind over what the GPU reaches."""
    per_token = 2.0 * size.parameters / speed.peak
    own = (work.sampling + work.evaluation) / speed.sampling
    own += work.scoring / speed.scoring + _passes(cell) * work.training / speed.training
    external = 2.0 * teacher.parameters * work.teacher / (speed.peak * speed.scoring) if teacher else 0.0
    return per_token * own + external
