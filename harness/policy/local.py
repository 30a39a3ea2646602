"""A policy on this machine: a causal language model, or a vision-language model of a known family, of transformers."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from harness.config import Precision
from harness.contracts import HarnessError, Prompt, Response, digest
from harness.policy.architecture import longest_text
from harness.policy.base import Policy, Request, Sampling
from harness.policy.chat import read_chat
from harness.policy.encode import Encoded, Encoder
from harness.policy.families import vision_of
from harness.policy.forward import BANNED, Decoder, parts_of
from harness.policy.generate import generate
from harness.policy.lora import adapted_layers, merged_weights, switched_off
from harness.policy.precision import computing_in, hold_rounded
from harness.policy.score import (
    LOGITS_AT_ONCE,
    Row,
    Scores,
    answer_states,
    join_scores,
    plan_micro_batches,
    token_scores,
)

disable_progress_bar()

STYLE_FILE = "harness.json"
"""Beside a model's own files: ``{"prompt_style": "compact"}``. Models without it get the paper's prompts."""

VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
"""Configuration entries that do not change what a model computes."""


class LocalPolicy(Policy):
    """Generates, scores and trains.

    Attributes:
        model: The transformers model; its parameters may be trained in place.
        tokenizer: Its tokenizer, with a chat template.
        eos_ids: Tokens that end an answer.
        banned_ids: Tokens that are never sampled and have probability 0 in scores: image and vision tokens, padding,
            every other special token, and ids beyond the tokenizer's vocabulary.
        token_budget: Padded tokens per pass without gradients; small on a CPU, where activations should stay in its
            cache.
        generation_budget: Padded prompt tokens of the answers that grow together in ``generate``.
        precision: What the policy computes in (:mod:`harness.policy.precision`); see ``compute_in``.
        adapters: The layers with low-rank adapters, if it has any (:mod:`harness.policy.lora`).
        adapted: Whether the adapters take part.
    """

    precision: Precision = "float32"
    adapters: tuple[Any, ...] = ()
    adapted: bool = True

    def __init__(
        self, model: Any, tokenizer: Any, image_processor: Any | None, spec: str, prompt_style: str = "paper"
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.spec = spec
        self.prompt_style = prompt_style
        self.checkpointing = False

        config = model.config
        vision = vision_of(model, image_processor, tokenizer)
        chat = read_chat(tokenizer, vision.token if vision else "")
        self.encoder = Encoder(tokenizer, vision, chat)
        self.decoder = Decoder(model, vision)
        self.token_budget = 2**12 if self.device.type == "cpu" else 2**16
        self.generation_budget = 2**16

        text_config = config.get_text_config()
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        ends = [chat.end, tokenizer.eos_token_id, *_named_ends(model)]
        self.eos_ids = frozenset(int(token) for token in ends if token is not None)
        if not self.eos_ids:
            raise HarnessError("neither the model's tokenizer nor its chat template says what ends an answer")
        self._end = next(int(token) for token in ends if token is not None)
        beyond = range(max(tokenizer.get_vocab().values()) + 1, self.vocabulary)
        pictures = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
        pictures |= {getattr(config, name, None) for name in ("vision_start_token_id", "vision_end_token_id")}
        banned = self.encoder.special_ids | {index for index in pictures if index is not None} | set(beyond)
        self.banned_ids = frozenset(banned - self.eos_ids)
        bias = torch.zeros(self.vocabulary, device=self.device)
        bias[sorted(index for index in self.banned_ids if index < self.vocabulary)] = BANNED
        self._bias = bias
        self.longest = longest_text(model)
        self._soft_cap = getattr(text_config, "final_logit_softcapping", None)
        _still(model)

    # --------------------------------------------------------------------------------------------------- facts

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def parameters(self) -> int:
        """Number of parameters, shared ones counted once, adapters included."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """SHA-256 of weights, configuration, tokenizer and prompt style as they are now."""
        weights = merged_weights(self.model, self.adapted)
        own = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        return digest(
            {
                "weights": weights_digest({name: weights[name] for name in own & weights.keys()}),
                "config": _lasting(self.model.config.to_dict()),
                "eos": sorted(self.eos_ids),
                "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
                "template": self.tokenizer.chat_template,
                "prompt_style": self.prompt_style,
            }
        )

    # -------------------------------------------------------------------------------------------------- tokens

    def encode(self, prompt: Prompt) -> Encoded:
        """The prompt as one user message in the model's chat format, cached."""
        return self.encoder(prompt)

    def prompt_tokens(self, prompt: Prompt) -> int:
        return len(self.encode(prompt))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Tokens of an answer to learn, end token included; special tokens in the text are spelled out."""
        return (*self.encoder.text_ids(self.encoder.chat.lead + text), self._end)

    # ------------------------------------------------------------------------------------------------ generate

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Answer every request, in order; an answer depends on its prompt and key, not on its neighbours."""
        encoded = [self.encode(request.prompt) for request in requests]
        self._check_length(max((len(prompt) for prompt in encoded), default=0) + sampling.max_tokens)
        order = sorted(range(len(requests)), key=lambda i: (len(encoded[i]), encoded[i].key, requests[i].key))
        responses: dict[int, Response] = {}
        for part in parts_of([encoded[i] for i in order], self.generation_budget):
            chosen, order = order[: len(part)], order[len(part) :]
            prompts = list({prompt.key: prompt for prompt in part}.values())
            number = {prompt.key: index for index, prompt in enumerate(prompts)}
            owner = [number[prompt.key] for prompt in part]
            keys = [requests[i].key for i in chosen]
            with self._computing():
                answers = generate(
                    self.decoder, self.logits, prompts, owner, keys, sampling, self.token_budget, self.eos_ids
                )
            texts = self.tokenizer.batch_decode([answer.ids for answer in answers], skip_special_tokens=True)
            for i, answer, text in zip(chosen, answers, texts, strict=True):
                text = text.removeprefix(self.encoder.chat.lead)
                responses[i] = Response(text, tuple(answer.ids), tuple(answer.logprobs), answer.finished)
        return [responses[i] for i in range(len(requests))]

    # --------------------------------------------------------------------------------------------------- score

    def score(
        self,
        rows: Sequence[tuple[Prompt, Sequence[int]]],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        distribution: bool = False,
    ) -> Scores:
        """Log-probabilities of given answers; identical rows are computed once.

        Gradients flow where torch records them; such a call is one pass, to be sized with ``plan_micro_batches``.
        Raises ValueError for an empty answer or one that contains a banned token.
        """
        if not rows:
            return Scores(torch.empty(0, device=self.device), [])
        encoded = self._rows(rows)
        distinct = list({_name(row): row for row in encoded}.values())
        parts = [list(range(len(distinct)))]
        if not torch.is_grad_enabled():
            parts = plan_micro_batches(distinct, self.token_budget)
        starts: dict[object, int] = {}
        passes = []
        total = 0
        for part in parts:
            chosen = [distinct[index] for index in part]
            with self._computing():
                passes.append(self._pass(chosen, temperature, entropy, distribution))
            for row in chosen:
                starts[_name(row)] = total
                total += len(row[1])
        places = [starts[_name(row)] + token for row in encoded for token in range(len(row[1]))]
        return join_scores(passes, torch.tensor(places, device=self.device), [len(answer) for _, answer in encoded])

    def plan_micro_batches(self, rows: Sequence[tuple[Prompt, Sequence[int]]], token_budget: int) -> list[list[int]]:
        """Indices of rows to score together so that no call exceeds ``token_budget`` padded tokens."""
        return plan_micro_batches(self._rows(rows), token_budget)

    def logits(self, states: Tensor) -> Tensor:
        """Logits (rows, vocabulary) in float32 of hidden states (rows, width); banned tokens are pushed down."""
        head = self.model.get_output_embeddings()
        if self.precision == "bfloat16":
            with torch.autocast(self.device.type, enabled=False):
                logits: Tensor = head(states.float())
        else:
            logits = head(states).float()
        if self._soft_cap:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return logits + self._bias

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around passes of the model: their precision, and with or without adapters."""
        with computing_in(self.precision, self.device), switched_off(() if self.adapted else self.adapters):
            yield

    def _pass(self, rows: Sequence[Row], temperature: float, entropy: bool, distribution: bool) -> Scores:
        share = not (self.checkpointing and torch.is_grad_enabled())
        states = answer_states(self.decoder, rows, share)
        targets = torch.tensor([token for _, answer in rows for token in answer], device=self.device)
        lengths = [len(answer) for _, answer in rows]
        size = max(1, LOGITS_AT_ONCE // self.vocabulary)
        return token_scores(self.logits, states, targets, lengths, temperature, entropy, distribution, size)

    def _rows(self, rows: Sequence[tuple[Prompt, Sequence[int]]]) -> list[Row]:
        encoded = [(self.encode(prompt), tuple(answer)) for prompt, answer in rows]
        for number, (_, answer) in enumerate(encoded):
            if not answer or not self.banned_ids.isdisjoint(answer):
                raise ValueError(f"row {number}: an answer needs at least one token, and none that is banned: {answer}")
        self._check_length(max((len(prompt) + len(answer) for prompt, answer in encoded), default=0))
        return encoded

    def _check_length(self, tokens: int) -> None:
        if tokens > self.longest:
            raise HarnessError(f"{self.spec!r} reads {self.longest} tokens at most; prompt and answer need {tokens}")

    # ------------------------------------------------------------------------------------------------- weights

    def forget_pictures(self) -> None:
        """Drop remembered picture features: what is computed next does not depend on what was computed before."""
        self.decoder.forget_pictures()

    def share_encodings(self, other: LocalPolicy) -> None:
        """Read the other's encoded prompts and cut pictures; both have one tokenizer and one image processor."""
        self.encoder = other.encoder
        self.decoder.cuts = other.decoder.cuts

    def compute_in(self, precision: Precision, trained: bool = False) -> None:
        """Set the precision of all passes; weights in bfloat16 are for policies that stay frozen or train adapters."""
        self.precision = precision
        if precision == "bfloat16" and not trained:
            hold_rounded(self.model)
            self.model.requires_grad_(False)

    def checkpoint_gradients(self) -> None:
        """Trade time for memory in training: layers are computed again in the backward pass."""
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.decoder.written_out = False
        self.checkpointing = True

    def clone(self) -> LocalPolicy:
        """A frozen copy, e.g. the reference or the teacher."""
        model = copy.deepcopy(self.model).requires_grad_(False)
        made = LocalPolicy(model, self.tokenizer, self.image_processor, self.spec, self.prompt_style)
        made.precision, made.adapters, made.adapted = self.precision, adapted_layers(model), self.adapted
        made.share_encodings(self)
        return made

    @torch.no_grad()
    def copy_weights_from(self, other: LocalPolicy) -> None:
        """Take over another policy's weights; both have one architecture and the same adapters, or none."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(theirs)

    def save(self, directory: str | Path) -> None:
        """Write weights, tokenizer and processor; the directory appears complete or not at all.

        Raises HarnessError where it cannot be written.
        """
        target = Path(directory)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
                self._write(Path(work, "new"))
                if target.exists():
                    os.replace(target, Path(work, "old"))
                os.replace(Path(work, "new"), target)
        except OSError as error:
            raise HarnessError(f"cannot write the policy to {target}: {error.strerror or error}") from error

    def _write(self, path: Path) -> None:
        weights = merged_weights(self.model, self.adapted)
        types = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values() if tensor.is_floating_point()}
        self.model.save_pretrained(path, safe_serialization=True, state_dict=weights)
        config = json.loads((path / "config.json").read_text())
        if len(types) == 1 and config.get("dtype") not in types:  # transformers names the type of some weight in memory
            (path / "config.json").write_text(json.dumps({**config, "dtype": types.pop()}, indent=2) + "\n")
        self.tokenizer.save_pretrained(path)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(path)
        (path / STYLE_FILE).write_text(json.dumps({"prompt_style": self.prompt_style}) + "\n")


def _name(row: Row) -> tuple[object, ...]:
    """What makes two rows the same computation."""
    return row[0].key, row[1]


def weights_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous().cpu()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its volatile entries, at any depth."""
    return {
        key: _lasting(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in VOLATILE
    }


def _named_ends(model: Any) -> list[int]:
    """The tokens at which the model's own generation stops."""
    named = getattr(model.generation_config, "eos_token_id", None) if model.can_generate() else None
    return [named] if isinstance(named, int) else list(named or [])


def _still(model: Any) -> None:
    """Evaluation mode without any dropout, so that scores repeat even where training mode is switched on."""
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
