"""Running the decoder: prompts once, answers on top of their keys and values, logits only where they are needed.

Rows are padded on the right. Under a causal mask no real token sees the padding behind it, so prompts need no mask at
all; answers see their prompt through an explicit one. Positions are always explicit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from harness.policy.encode import Encoded, Picture, Role
from harness.policy.families import Vision
from harness.policy.qwen import FAMILY, pick, run_layers

BANNED = -1e9
"""Added to the logits of tokens that can never be answers: their probability is exactly 0 and 0 * log p stays 0."""

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, shape (rows, key heads, tokens, head size)."""

CUT_BYTES = 256 * 2**20
FEATURE_BYTES = 256 * 2**20
VISION_BATCH = 64
VISION_VALUES = 2**24
"""Pictures that go through the tower together: no more than this many, or values of what was cut from them."""


class PromptKeys:
    """Keys and values of prompts, one row per answer, to which an answer's own are appended for one pass.

    Speaks the part of transformers' cache protocol that attention layers use. Differentiable.
    """

    def __init__(self, layers: Layers, owner: Tensor) -> None:
        self.layers = [(keys[owner], values[owner]) for keys, values in layers]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        before = self.layers[layer]
        return torch.cat([before[0], keys.to(before[0].dtype)], dim=2), torch.cat([before[1], values], dim=2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.layers[layer][0].shape[2]


class AnswerKeys:
    """Keys and values of prompts and growing answers in buffers with room ahead; rows can be dropped."""

    def __init__(self, layers: Layers, owner: Tensor) -> None:
        self.length = layers[0][0].shape[2]
        self.layers = [(self._roomy(keys[owner]), self._roomy(values[owner])) for keys, values in layers]

    def _roomy(self, tensor: Tensor) -> Tensor:
        rows, heads, length, size = tensor.shape
        return torch.cat([tensor, tensor.new_empty(rows, heads, max(32, length // 4), size)], dim=2)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer == 0:
            if self.length == self.layers[0][0].shape[2]:
                self.layers = [(self._roomy(k), self._roomy(v)) for k, v in self.layers]
            self.length += 1
        buffers = self.layers[layer]
        buffers[0][:, :, self.length - 1] = keys[:, :, 0]
        buffers[1][:, :, self.length - 1] = values[:, :, 0]
        return buffers[0][:, :, : self.length], buffers[1][:, :, : self.length]

    def keep(self, rows: Tensor) -> None:
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length


class Decoder:
    """The parts of a transformers model we call, and the features of pictures seen lately."""

    def __init__(self, model: Any, vision: Vision | None) -> None:
        self.model = model
        self.text: Any = model.get_decoder()
        self.embedding: Any = model.get_input_embeddings()
        self.vision = vision
        self.axes = vision.axes if vision is not None else 1
        self.written_out = type(self.text).__name__ in FAMILY
        """Whether layers run through ``harness.policy.qwen`` instead of their own ``forward``."""
        self.cuts: OrderedDict[bytes, Tensor] = OrderedDict()
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self._features_of = b""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.weight.device
        return device

    def run(self, prompts: Sequence[Encoded], answers: Sequence[Sequence[int]], cache: Any = None) -> Tensor:
        """Hidden states of every prompt's last token and of the answer tokens behind it.

        Shape (rows, 1 + longest answer, width); rows with shorter answers end in padding.
        """
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt, answer in zip(ids, prompts, answers, strict=True):
            row[: len(prompt)] = prompt.ids
            row[len(prompt) : len(prompt) + len(answer)] = answer
        embedded, deeper = self._embed(torch.from_numpy(ids).to(self.device), prompts)
        after = torch.arange(1 + max(map(len, answers)), device=self.device)
        wanted = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)[:, None] + after
        positions = self._positions(prompts, longest)
        return self._text(embedded, positions, None, cache, wanted.clamp(max=longest - 1), deeper)

    def prefill(self, prompts: Sequence[Encoded]) -> tuple[Tensor, Layers]:
        """Hidden state of every prompt's last token, shape (rows, width), and every layer's keys and values."""
        cache = DynamicCache()
        last = self.run(prompts, [()] * len(prompts), cache)[:, 0]
        # Rotary positions are in float32 and make the keys so; attention reads them in the type of the values.
        return last, [(layer.keys.to(layer.values.dtype), layer.values) for layer in cache.layers]

    def prefill_in_parts(self, prompts: Sequence[Encoded], token_budget: int) -> tuple[Tensor, Layers]:
        """As ``prefill``, ``token_budget`` padded tokens at a time; prompts are best sorted by length."""
        parts = [self.prefill(part) for part in parts_of(prompts, token_budget)]
        if len(parts) == 1:
            return parts[0]
        width = max(layers[0][0].shape[2] for _, layers in parts)

        def join(tensors: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(tensor, (0, 0, 0, width - tensor.shape[2])) for tensor in tensors])

        joined = [
            (join([keys for keys, _ in layer]), join([values for _, values in layer]))
            for layer in zip(*(layers for _, layers in parts), strict=True)
        ]
        return torch.cat([last for last, _ in parts]), joined

    def extend(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: PromptKeys | AnswerKeys) -> Tensor:
        """Hidden states of answer tokens behind their prompts.

        Args:
            ids: Token ids, shape (rows, n).
            positions: Their rotary positions, shape (rows, n).
            mask: True where a token may look, shape (rows, 1, n, cached + n).
            cache: Keys and values of what came before.
        """
        if self.axes > 1:
            positions = positions.expand(self.axes, *positions.shape)
        return self._text(self.embedding(ids), positions, mask, cache, None)

    def _text(
        self,
        embedded: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        wanted: Tensor | None,
        deeper: dict[str, Any] | None = None,
    ) -> Tensor:
        if self.written_out:
            return run_layers(self.text, embedded, positions, mask, cache, wanted)
        output = self.text(
            inputs_embeds=embedded,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            **(deeper or {}),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden if wanted is None else pick(hidden, wanted)

    def _positions(self, prompts: Sequence[Encoded], longest: int) -> Tensor:
        """Rotary positions, padding counted on; one row stands for all where they are the same."""
        counted = self.axes == 1 or not any(prompt.pictures for prompt in prompts)
        alike = counted or all(prompt.positions is prompts[0].positions for prompt in prompts)
        rows = prompts[:1] if alike else prompts
        table = np.empty((self.axes, len(rows), longest), dtype=np.int64)
        for number, prompt in enumerate(rows):
            table[:, number, : len(prompt)] = prompt.positions
            table[:, number, len(prompt) :] = prompt.next_position + np.arange(longest - len(prompt))
        positions = torch.from_numpy(table).to(self.device)
        return positions if self.axes > 1 else positions[0]

    def _embed(self, ids: Tensor, prompts: Sequence[Encoded]) -> tuple[Tensor, dict[str, Any] | None]:
        """Embedded tokens with pictures in their places, and what the decoder adds to inner layers there, if any."""
        embedded: Tensor = self.embedding(ids)
        pictures = [picture for prompt in prompts for picture in prompt.pictures]
        if not pictures:
            return embedded, None
        table = np.zeros(tuple(ids.shape), dtype=bool)
        for row, prompt in zip(table, prompts, strict=True):
            row[: len(prompt)] = prompt.roles == Role.IMAGE
        where = torch.from_numpy(table).to(self.device)
        features = self._picture_features({picture.digest: picture for picture in pictures})
        values = torch.cat([features[picture.digest] for picture in pictures]).to(embedded.dtype)
        first, *deeper = values.split(embedded.shape[-1], dim=-1)
        embedded = embedded.masked_scatter(where.unsqueeze(-1), first)
        return embedded, {"visual_pos_masks": where, "deepstack_visual_embeds": deeper} if deeper else None

    # ------------------------------------------------------------------------------------------------- pictures

    def forget_pictures(self) -> None:
        """Drop remembered features."""
        self._features.clear()

    def _picture_features(self, pictures: dict[bytes, Picture]) -> dict[bytes, Tensor]:
        """Feature vectors of distinct pictures (``Vision.features``), remembered where none takes a gradient."""
        assert self.vision is not None
        parameters = [parameter for module in self.vision.tower(self.model) for parameter in module.parameters()]
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            return self._encode_pictures(pictures)
        weights = _sample(parameters)
        if weights != self._features_of:
            self._features.clear()
            self._features_of = weights
        fresh = {digest: picture for digest, picture in pictures.items() if digest not in self._features}
        if fresh:
            with torch.no_grad():
                encoded = self._encode_pictures(fresh)
            self._features.update({digest: feature.clone() for digest, feature in encoded.items()})
        found = {digest: self._features[digest] for digest in pictures}
        for digest in pictures:
            self._features.move_to_end(digest)
        _shrink(self._features, FEATURE_BYTES)
        return found

    def _encode_pictures(self, pictures: dict[bytes, Picture]) -> dict[bytes, Tensor]:
        assert self.vision is not None
        features: dict[bytes, Tensor] = {}
        remaining = list(pictures.items())
        while remaining:
            batch, remaining = remaining[:VISION_BATCH], remaining[VISION_BATCH:]
            cuts = self._cut([picture for _, picture in batch])
            fit = max(1, int((np.cumsum([cut.numel() for cut in cuts]) <= VISION_VALUES).sum()))
            batch, remaining = batch[:fit], batch[fit:] + remaining
            grids = [picture.grid for _, picture in batch]
            made = self.vision.features(self.model, [cut.to(self.device) for cut in cuts[:fit]], grids)
            features.update({digest: feature for (digest, _), feature in zip(batch, made, strict=True)})
        return features

    def _cut(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """What the image processor makes of each picture, remembered."""
        assert self.vision is not None
        fresh = [picture for picture in pictures if picture.digest not in self.cuts]
        if fresh:
            made = self.vision.cut([picture.image for picture in fresh], [picture.grid for picture in fresh])
            self.cuts.update({picture.digest: cut.clone() for picture, cut in zip(fresh, made, strict=True)})
        for picture in pictures:
            self.cuts.move_to_end(picture.digest)
        cuts = [self.cuts[picture.digest] for picture in pictures]
        _shrink(self.cuts, CUT_BYTES)
        return cuts


def parts_of(prompts: Sequence[Encoded], token_budget: int) -> list[Sequence[Encoded]]:
    """Consecutive runs of prompts that pad to ``token_budget`` tokens at most; a longer prompt is a run of its own."""
    parts, start, width = [], 0, 0
    for place, prompt in enumerate(prompts):
        width = max(width, len(prompt))
        if place > start and (place + 1 - start) * width > token_budget:
            parts.append(prompts[start:place])
            start, width = place, len(prompt)
    return [*parts, prompts[start:]] if prompts else []


def _sample(parameters: Sequence[Tensor]) -> bytes:
    """Hash of up to 4,096 values of every parameter: any optimizer step changes it.

    Version counters cannot be trusted here: fused optimizers leave them alone.
    """
    flat = (parameter.detach().flatten() for parameter in parameters)
    values = torch.cat([values[:: 1 + len(values) // 4096].float() for values in flat])
    return hashlib.sha1(values.cpu().numpy().data, usedforsecurity=False).digest()


def _shrink(store: OrderedDict[bytes, Tensor], limit: int) -> None:
    """Forget the least recently used tensors until the store is within its limit (bytes)."""
    total = sum(tensor.nbytes for tensor in store.values())
    while total > limit and len(store) > 1:
        total -= store.popitem(last=False)[1].nbytes
