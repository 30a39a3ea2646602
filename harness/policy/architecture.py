"""Which models run as this package runs them: prompts once, answers on top of their keys and values, own logits."""

from __future__ import annotations

from typing import Any

import torch

from harness.contracts import HarnessError


def check_architecture(model: Any) -> None:
    """Raise HarnessError for models that LocalPolicy would run wrongly.

    Rows share their prompts' keys and values under plain causal attention. A sliding window is that as long as no text
    is longer, which ``longest_text`` sees to.
    """
    kind, text = model.config.model_type, model.config.get_text_config()
    known = {"full_attention", "sliding_attention"} if _window(model) else {"full_attention"}
    if not set(getattr(text, "layer_types", None) or known) <= known:
        raise HarnessError(f"{kind!r} uses attention other than full causal attention, which is not supported")
    if not hasattr(model.config, "vision_config"):
        _check_logits(model)


def longest_text(model: Any) -> int:
    """Tokens of the longest text, prompt and answer, that may be read: what the model was made for, and its window."""
    made_for = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(made_for or 2**62, _window(model) or 2**62)


def _window(model: Any) -> int:
    """How far the model's layers, or some of them, look back; 0 is all the way."""
    return int(getattr(model.config.get_text_config(), "sliding_window", None) or 0)


def _check_logits(model: Any) -> None:
    """Whether states, head and cap as we put them together give the model's own logits."""
    probe = torch.arange(8, device=model.device)[None]
    with torch.no_grad():
        expected = model(input_ids=probe, use_cache=False).logits[0, -1].float()
        states = model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state[0, -1]
        ours = model.get_output_embeddings()(states).float()
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        ours = cap * torch.tanh(ours / cap) if cap else ours
    if not torch.allclose(ours, expected, atol=1e-2, rtol=1e-2):
        raise HarnessError(f"{model.config.model_type!r} computes its logits in a way that is not supported")
