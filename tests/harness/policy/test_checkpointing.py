"""Gradient checkpointing: the same gradients for less memory, whatever the model and whatever is trained."""

from __future__ import annotations

import pytest
import torch
from toy_policies import close, picture

from harness.config import LoraConfig
from harness.contracts import Prompt
from harness.policy.lora import add_adapters
from harness.policy.tiny import new_tiny

ROWS = [(Prompt(f"put a clean mug in desk {i}. " * 12), (20 + i, 21, 2)) for i in range(6)]
SEEN = [(Prompt("see <image>. " + prompt.text, (picture(3),)), answer) for prompt, answer in ROWS]


def trained(policy, written_out, precision, lora, checkpointing):
    """Gradients of a policy's copy, by name, and the bytes that its graph kept for the backward pass."""
    copied = policy.clone()
    copied.model.requires_grad_(True)
    copied.decoder.written_out = written_out
    copied.compute_in(precision, trained=True)
    if lora:
        add_adapters(copied, LoraConfig(rank=4), (0,))
        with torch.no_grad():
            for layer in copied.adapters:
                layer.lora_B["default"].weight.fill_(0.01)
    if checkpointing:
        copied.checkpoint_gradients()
    weights = {parameter.untyped_storage().data_ptr() for parameter in copied.model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = copied.score(ROWS if policy.image_processor is None else SEEN).logprobs.mean()
    loss.backward()
    grads = {name: p.grad for name, p in copied.model.named_parameters() if p.grad is not None}
    return loss.item(), grads, sum(kept.values())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("sees", "written_out"), [(True, True), (True, False), (False, True)])
def test_same_gradients_for_less_memory(tokenizer, text_only, sees, written_out, precision, lora):
    policy = new_tiny(tokenizer, seed=1) if sees else text_only
    plain_loss, plain, plain_bytes = trained(policy, written_out, precision, lora, checkpointing=False)
    loss, grads, few_bytes = trained(policy, written_out, precision, lora, checkpointing=True)
    tolerance = 1e-6 if precision == "float32" else 2e-2
    close(loss / plain_loss, 1.0, tolerance)
    assert grads.keys() == plain.keys()
    assert all("lora_" in name for name in grads) == lora
    scale = max(grad.abs().max() for grad in plain.values())
    for key, grad in grads.items():
        torch.testing.assert_close(grad / scale, plain[key] / scale, atol=tolerance, rtol=0)
    assert few_bytes < 0.6 * plain_bytes
