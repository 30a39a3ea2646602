"""Log-probabilities of given answers without ever holding the logits of a batch.

Hidden states are gathered at the answers' tokens first; the language-model head runs over them in blocks that the
backward pass computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness import objective
from harness.policy.encode import Encoded
from harness.policy.forward import Decoder, PromptKeys

Row = tuple[Encoded, tuple[int, ...]]
"""A prompt and the token ids of an answer to it."""

LOGITS_AT_ONCE = 2**24
"""Logits held at a time, in numbers."""

SHARING_PAYS = 0.75
"""Prompts are read apart from their answers when distinct ones are fewer than this share of the rows."""


@dataclass(frozen=True)
class Scores:
    """Flat over the answer tokens of all rows, in order; N = sum of ``lengths``, V = vocabulary.

    Attributes:
        logprobs: Log-probability of every token, shape (N,), float32.
        lengths: Tokens of each row.
        entropy: Entropy in nats of the distribution each token was drawn from, shape (N,).
        log_distribution: That distribution in logarithms, shape (N, V); banned tokens about -1e9, never -inf.
    """

    logprobs: Tensor
    lengths: list[int]
    entropy: Tensor | None = None
    log_distribution: Tensor | None = None

    def require_entropy(self) -> Tensor:
        """The entropy; raises ValueError where it was not asked for."""
        if self.entropy is None:
            raise ValueError("these scores were made without entropy=True")
        return self.entropy

    def require_distribution(self) -> Tensor:
        """The log-distribution; raises ValueError where it was not asked for."""
        if self.log_distribution is None:
            raise ValueError("these scores were made without distribution=True")
        return self.log_distribution

    def split(self) -> tuple[Tensor, ...]:
        """Log-probabilities of each row."""
        return torch.split(self.logprobs, self.lengths)


def answer_states(decoder: Decoder, rows: Sequence[Row], share: bool) -> Tensor:
    """Hidden states that predict the answers' tokens, flat over rows, shape (N, width).

    ``share`` allows rows with one prompt to read it once.
    """
    device = decoder.device
    longest = max(len(answer) for _, answer in rows)
    counts = torch.tensor([len(answer) for _, answer in rows], device=device)
    used = torch.arange(longest, device=device) < counts[:, None]
    prompts = list({prompt.key: prompt for prompt, _ in rows}.values())
    if not share or len(prompts) > SHARING_PAYS * len(rows):
        return decoder.run([prompt for prompt, _ in rows], [answer[:-1] for _, answer in rows])[used]

    number = {prompt.key: index for index, prompt in enumerate(prompts)}
    owner = torch.tensor([number[prompt.key] for prompt, _ in rows], device=device)
    last, layers = decoder.prefill(prompts)
    states = last[owner][:, None]
    if longest > 1:
        ids = torch.zeros(len(rows), longest - 1, dtype=torch.long)
        for padded, (_, answer) in zip(ids, rows, strict=True):
            padded[: len(answer) - 1] = torch.tensor(answer[:-1])
        steps = torch.arange(longest - 1, device=device)
        positions = torch.tensor([prompt.next_position for prompt, _ in rows], device=device)[:, None] + steps
        lengths = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
        seen = torch.arange(layers[0][0].shape[2], device=device) < lengths[:, None]
        causal = steps[:, None] >= steps
        mask = torch.cat(
            [seen[:, None].expand(-1, longest - 1, -1), causal.expand(len(rows), -1, -1)], dim=2
        )  # (rows, longest - 1, prompt + longest - 1)
        cache = PromptKeys(layers, owner)
        states = torch.cat([states, decoder.extend(ids.to(device), positions, mask[:, None], cache)], dim=1)
    return states[used]


def token_scores(
    logits: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    lengths: list[int],
    temperature: float,
    entropy: bool,
    distribution: bool,
    size: int,
) -> Scores:
    """Scores of target tokens (N,) given the states (N, width) that predict them, ``size`` tokens at a time."""

    def block(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        distributions = (logits(states) / temperature).log_softmax(dim=-1)
        chosen = distributions.gather(1, targets[:, None])[:, 0]
        spread = objective.entropy(distributions) if entropy else None
        return chosen, spread, distributions if distribution else None

    blocks = list(zip(torch.split(states, size), torch.split(targets, size), strict=True))
    if len(blocks) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(block, *pair, use_reentrant=False, preserve_rng_state=False) for pair in blocks]
    else:
        parts = [block(*pair) for pair in blocks]
    if len(parts) == 1:
        return Scores(parts[0][0], lengths, *parts[0][1:])
    chosen, spread, distributions = zip(*parts, strict=True)
    return Scores(
        torch.cat(chosen),
        lengths,
        torch.cat(spread) if entropy else None,
        torch.cat(distributions) if distribution else None,
    )


def join_scores(passes: Sequence[Scores], places: Tensor, lengths: list[int]) -> Scores:
    """Tokens of several passes, end to end, rearranged: token i of the result is token ``places[i]`` of theirs."""

    def join(parts: list[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present)[places] if present else None

    logprobs = torch.cat([scores.logprobs for scores in passes])[places]
    entropy = join([scores.entropy for scores in passes])
    return Scores(logprobs, lengths, entropy, join([scores.log_distribution for scores in passes]))


def plan_micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Partition rows so that no part costs more than ``token_budget`` tokens, padding included.

    Rows are sorted by length, rows of one prompt stay together; a row longer than the budget is a part of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i][0]), rows[i][0].key, len(rows[i][1]), rows[i][1], i))
    parts: list[list[int]] = []
    prompts: set[object] = set()
    answers: set[object] = set()
    widest = longest = 0
    for index in order:
        prompt, answer = rows[index]
        width, length = max(widest, len(prompt)), max(longest, len(answer))
        prompts.add(prompt.key)
        answers.add((prompt.key, answer))
        if not parts or _cost(len(prompts), len(answers), width, length) > token_budget:
            parts.append([])
            prompts, answers = {prompt.key}, {(prompt.key, answer)}
            width, length = len(prompt), len(answer)
        parts[-1].append(index)
        widest, longest = width, length
    return parts


def _cost(prompts: int, answers: int, width: int, length: int) -> int:
    """Padded tokens of a pass over distinct prompts and answers of at most these lengths."""
    if prompts > SHARING_PAYS * answers:
        return answers * (width + length)
    # Each answer also carries its prompt's keys and values, about an eighth of the prompt's activations.
    return prompts * width + answers * (length + width // 8)
