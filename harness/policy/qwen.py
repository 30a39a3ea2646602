"""The decoder layers of the Qwen2 family, written out over transformers' own modules.

Same weights and same numbers as the modules' ``forward``, without the work nobody reads: the last layer runs only at
the tokens whose hidden states are wanted, which nearly halves a two-layer model, and rotary positions are applied to
contiguous rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FAMILY = ("Qwen2Model", "Qwen2VLTextModel", "Qwen2_5_VLTextModel")
"""Class names of the decoders this module runs."""


def run_layers(
    stack: Any, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, wanted: Tensor | None
) -> Tensor:
    """Hidden states after the last layer and its norm.

    Args:
        stack: The decoder module.
        hidden: Embedded tokens, shape (rows, n, width).
        positions: Rotary positions, shape ([axes,] rows or 1, n).
        mask: True where a token may look, shape (rows, 1, n, keys); None is causal.
        cache: Takes every layer's keys and values and returns those to look at; None keeps none.
        wanted: Places whose states are returned, shape (rows, m), for a causal pass; None is all.
    """
    cos, sin = _turns(stack, hidden, positions)
    for index, layer in enumerate(stack.layers):
        attention = layer.self_attn
        size = attention.head_dim
        normed = layer.input_layernorm(hidden)
        keys = _heads(_rotate(attention.k_proj(normed), cos, sin, size), size)  # first: gradients add up in this order
        values = _heads(attention.v_proj(normed), size)
        keys = keys.to(values.dtype)
        if cache is not None:
            keys, values = cache.update(keys, values, index)
        if wanted is not None and index == len(stack.layers) - 1:
            mask = (torch.arange(hidden.shape[1], device=hidden.device) <= wanted[:, :, None])[:, None]
            cos, sin = pick(cos.expand(len(hidden), -1, -1), wanted), pick(sin.expand(len(hidden), -1, -1), wanted)
            hidden, normed = pick(hidden, wanted), pick(normed, wanted)
        queries = _heads(_rotate(attention.q_proj(normed), cos, sin, size), size).to(values.dtype)
        attended, _ = sdpa_attention_forward(attention, queries, keys, values, mask, scaling=attention.scaling)
        hidden = hidden + attention.o_proj(attended.flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    normalised: Tensor = stack.norm(hidden)
    return normalised


def pick(states: Tensor, wanted: Tensor) -> Tensor:
    """States (rows, n, width) at places (rows, m): shape (rows, m, width)."""
    return states[torch.arange(len(states), device=states.device)[:, None], wanted]


def _turns(stack: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines repeated for every head, shape (rows or 1, n, heads * head size)."""
    cos, sin = stack.rotary_emb(hidden, positions)
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    heads = stack.config.num_attention_heads
    return cos.repeat(1, 1, heads), signed.repeat(1, 1, heads)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
    """Rotary position embedding of all heads at once; states (rows, n, heads * size)."""
    first, second = states.unflatten(-1, (-1, 2, size // 2)).unbind(-2)
    swapped = torch.stack([second, first], dim=-2).flatten(-3)
    width = states.shape[-1]
    rotated: Tensor = torch.addcmul(states * cos[..., :width], swapped, sin[..., :width])
    return rotated


def _heads(states: Tensor, size: int) -> Tensor:
    """(rows, n, heads * size) -> (rows, heads, n, size)."""
    heads: Tensor = states.unflatten(-1, (-1, size)).transpose(1, 2)
    return heads
