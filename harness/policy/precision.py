"""The number type a policy computes in.

``float32``: everything. ``bfloat16``: the products of the layers (linear maps, attention) are taken in bfloat16; what
adds up across them stays in float32: the residual stream, norms, the logits and all that follows from them. A fully
trained policy keeps its weights in float32, since a step of 1e-6 is far below what bfloat16 can tell apart (1 part in
256); they are rounded for each call. Frozen weights are rounded once and held so. Both give the same numbers, bit for
bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.config import Precision


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Context of a policy's passes. Each weight is rounded once within it, however many tokens are generated."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def hold_rounded(model: Any) -> None:
    """Round the weights of a frozen model's layers to bfloat16, in place; the others are held in float32.

    Embeddings, the language-model head, norms and biases stay in float32: few numbers, read in float32.
    """
    head = model.get_output_embeddings()
    linear = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    rounded = {id(m.weight) for m in model.modules() if isinstance(m, linear) and m is not head}
    rounded -= {id(model.get_input_embeddings().weight)}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if id(parameter) in rounded else torch.float32)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
