"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear maps of a policy's decoder, by way of peft.

Only the adapters are trained. Without them the policy is what it was before, so that no copy of the weights is needed
for the frozen start: :func:`without_adapters` is the same model with the adapters left out.

The model stays a plain model of transformers: its adapted layers are replaced in place, and what is written to disk
is either the whole policy with the adapters added in, or the adapters alone in peft's own format.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.config import LoraConfig
from harness.contracts import HarnessError
from harness.validation import require_extra

if TYPE_CHECKING:
    from harness.policy.local import LocalPolicy

NAME = "default"
"""What peft calls the adapters in a model."""
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""How peft's files begin the name of a weight."""


def add_adapters(policy: LocalPolicy, config: LoraConfig, key: tuple[int, ...]) -> None:
    """Freeze the policy and give it fresh adapters, which change nothing yet; ``key`` decides their first values.

    Raises HarnessError where peft is missing or the decoder has no such layer.
    """
    require_extra("train.lora", "peft", "lora")
    import peft

    wanted = _targets(policy, config.targets)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=wanted, bias="none")  # type: ignore[arg-type]
    with _forked(policy):
        peft.inject_adapter_in_model(settings, policy.model, NAME)
    policy.adapters = adapted_layers(policy.model)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:  # of the adapters, and of nothing else
            parameter.data = parameter.data.float()
    _reset(policy, key)


def _targets(policy: LocalPolicy, wanted: str) -> str:
    """A pattern for the names of the linear maps to adapt, e.g. ``model.layers.\\d+.self_attn.q_proj|...``."""
    model = policy.model
    inside = {id(module) for module in policy.decoder.text.modules() if isinstance(module, torch.nn.Linear)}
    names = [name for name, module in model.named_modules() if id(module) in inside]
    if wanted == "attention":
        names = [name for name in names if "attn" in name or "attention" in name]
    if not names:
        raise HarnessError(f"train.lora.targets {wanted!r} matches no linear layer of {policy.spec!r}'s decoder")
    patterns = {re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in names}
    return "|".join(sorted(patterns))


def adapted_layers(model: Any) -> tuple[Any, ...]:
    """The layers of a model that have adapters."""
    return tuple(module for module in model.modules() if hasattr(module, "lora_A"))


def fold_adapters(policy: LocalPolicy, key: tuple[int, ...]) -> float:
    """Add the adapters to the weights beneath, rounded to their type, and begin with fresh adapters.

    Returns the share of what was added that the rounding kept: how far the weights moved along it, in its own length.
    """
    moved = wanted = 0.0
    with torch.no_grad():
        for layer in policy.adapters:
            weight, change = layer.get_base_layer().weight, layer.get_delta_weight(NAME)
            after = (weight.float() + change).to(weight.dtype)
            moved += float(((after.float() - weight.float()) * change).sum())
            wanted += float(change.square().sum())
            weight.copy_(after)
    _reset(policy, key)
    return moved / wanted if wanted else 1.0


def _reset(policy: LocalPolicy, key: tuple[int, ...]) -> None:
    """A at random (Kaiming), B zero; torch's own generator stays untouched."""
    with _forked(policy):
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        for layer in policy.adapters:
            layer.reset_lora_parameters(NAME, True)


def _forked(policy: LocalPolicy) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else [])


@contextmanager
def switched_off(layers: tuple[Any, ...]) -> Iterator[None]:
    """Run without the adapters of these layers."""
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def without_adapters(policy: LocalPolicy) -> LocalPolicy:
    """The policy as it was when its adapters were added: a view of the same weights, to generate and score with."""
    view = copy.copy(policy)
    view.adapted = False
    return view


# --------------------------------------------------------------------------------------------------- weights


def merged_weights(model: Any, adapted: bool = True) -> dict[str, Tensor]:
    """The model's weights by their own names, with the adapters added in or, where ``adapted`` is False, without.

    In float32 where there are adapters or bfloat16 weights, and on the CPU then; otherwise the very tensors.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    state: dict[str, Tensor] = model.state_dict()
    if not layers and all(tensor.dtype != torch.bfloat16 for tensor in state.values()):
        return state
    copies: dict[int, Tensor] = {}  # by address: tied weights stay tied
    weights = {}
    for name, tensor in state.items():
        if not re.search(r"\.lora_[A-Z]", name):
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu()
            weights[name.replace(".base_layer.", ".")] = copies[tensor.data_ptr()]
    with torch.no_grad():
        for name, layer in layers.items() if adapted else ():
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(NAME).cpu()
    return weights


def save_adapters(policy: LocalPolicy, directory: Path, base: str) -> None:
    """Write the adapters in peft's format; ``base`` is where the weights beneath them are to be found.

    ``peft.PeftModel.from_pretrained(model, directory)`` reads it.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    settings = copy.copy(policy.model.peft_config[NAME])
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(str(directory))
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in _adapters(policy).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def load_adapters(policy: LocalPolicy, directory: Path) -> None:
    """Take over adapters that :func:`save_adapters` wrote. Raises HarnessError where they are another model's."""
    from safetensors.torch import load_file

    stored = load_file(directory / WEIGHTS, device=str(policy.device))
    weights = _adapters(policy)
    if {name: tensor.shape for name, tensor in stored.items()} != {name: w.shape for name, w in weights.items()}:
        raise HarnessError(f"the adapters in {directory} do not fit this policy: another model, rank or targets")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored[name])


def _adapters(policy: LocalPolicy) -> dict[str, Tensor]:
    """The adapters' weights by their names in peft's files."""
    named = policy.model.named_parameters()
    return {f"{PREFIX}{n.replace(f'.{NAME}.', '.')}": weight for n, weight in named if re.search(r"\.lora_[A-Z]", n)}
