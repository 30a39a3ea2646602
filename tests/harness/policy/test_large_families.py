"""Every model family in bfloat16, with adapters and with gradient checkpointing, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES
from toy_envs import Doors
from toy_policies import SAMPLED, close, picture, rows_of
from transformers import ProcessorMixin

from harness.config import LoraConfig
from harness.contracts import Prompt
from harness.policy.base import Request
from harness.policy.load import load_policy
from harness.policy.lora import add_adapters, without_adapters


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_bfloat16_with_adapters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)  # wants torchvision
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str, raising=False)
    FAMILIES[name].save(tmp_path)
    prompts = [Prompt("go"), Prompt("You see a drawer 12. " * 5)]
    if FAMILIES[name].processor:
        prompts += [Prompt("<image> and <image>", (picture(1), picture(2))), Prompt("see <image>", (picture(3, 56),))]
    requests = [Request(prompt, (number,)) for number, prompt in enumerate(prompts)]
    frozen, trained = (
        load_policy(str(tmp_path), Doors(), precision="bfloat16", trained=trained) for trained in (False, True)
    )
    responses = trained.generate(requests, SAMPLED)
    assert frozen.generate(requests, SAMPLED) == responses
    rows = rows_of(requests, responses)
    with torch.no_grad():
        start = trained.score(rows).logprobs
        assert torch.equal(frozen.score(rows).logprobs, start)

    add_adapters(frozen, LoraConfig(rank=4), (0,))
    frozen.checkpoint_gradients()
    optimizer = torch.optim.AdamW([p for p in frozen.model.parameters() if p.requires_grad], lr=1e-2)
    logprobs = frozen.score(rows).logprobs
    close(logprobs.detach().mean(), start.mean(), 0.05)  # rows that share prompts are put together otherwise
    (-logprobs.mean()).backward()
    optimizer.step()
    with torch.no_grad():
        assert frozen.score(rows).logprobs.mean() > start.mean()
        close(without_adapters(frozen).score(rows).logprobs.mean(), start.mean(), 0.05)
