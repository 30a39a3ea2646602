"""A module with the part of vLLM's interface that the harness uses, strict about what it is given.

It answers with transformers' own forward over whole sequences and shares no code with the policy. The model's weights
are read from files alone, as vLLM's are; ``blur`` scales its logits, as another kernel would change them a little.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The fields of vLLM's that are used; vLLM refuses values out of these ranges."""

    temperature: float
    max_tokens: int
    seed: int
    logprobs: int
    stop_token_ids: list[int]
    logit_bias: dict[int, float]
    detokenize: bool

    def __post_init__(self) -> None:
        assert self.temperature == 0 or 0.01 <= self.temperature <= 2
        assert self.max_tokens >= 1
        assert 0 <= self.seed < 2**63
        assert self.logprobs == 0
        assert 1 <= len(self.stop_token_ids) <= 128
        assert len(self.logit_bias) <= 1024
        assert all(-100 <= bias <= 100 for bias in self.logit_bias.values())


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    text: str = ""  # nothing is detokenised


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """One engine; ``LLM.made`` are all of them, ``log`` is what became of its memory and weights."""

    made: ClassVar[list[LLM]] = []
    blur = 1.0

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float,
        tensor_parallel_size: int,
        enable_sleep_mode: bool,
        logprobs_mode: str,
        generation_config: str,
        mm_processor_cache_gb: float = 4.0,
    ) -> None:
        assert dtype in ("float32", "bfloat16")
        assert (enable_sleep_mode, logprobs_mode, generation_config) == (True, "processed_logprobs", "vllm")
        assert 0 < gpu_memory_utilization < 1 <= tensor_parallel_size
        self.max_model_len, self.log = max_model_len, ["load"]
        self.asleep: set[str] = set()
        self.vision = (Path(model) / "preprocessor_config.json").is_file()
        assert mm_processor_cache_gb == 0 or not self.vision
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(model) if self.vision else None
        self._read(model)
        LLM.made.append(self)

    def _read(self, directory: str) -> None:
        family = AutoModelForImageTextToText if self.vision else AutoModelForCausalLM
        self.model: Any = family.from_pretrained(directory, dtype="float32").eval()

    # ------------------------------------------------------------------------------------------ memory, weights

    def sleep(self, level: int) -> None:
        assert level == 2
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.model = None
        self.log.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        assert len(tags) == 1
        assert tags[0] in self.asleep
        assert tags == ["weights"] or self.model is not None  # else garbage would answer
        self.asleep -= set(tags)

    def collective_rpc(self, method: str, *, kwargs: dict[str, str]) -> None:
        assert (method, list(kwargs)) == ("reload_weights", ["weights_path"])
        assert self.asleep == {"kv_cache"}
        self._read(kwargs["weights_path"])
        self.log.append("reload")

    # ---------------------------------------------------------------------------------------------- answers

    def generate(
        self, prompts: list[dict[str, Any]], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert not use_tqdm
        assert not self.asleep
        return [self._answer(prompt, how) for prompt, how in zip(prompts, params, strict=True)]

    @torch.no_grad()
    def _answer(self, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        ids, extra = self._inputs(prompt)
        assert len(ids) + params.max_tokens <= self.max_model_len
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        bias = torch.zeros(vocabulary)
        bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
        draw = torch.Generator().manual_seed(params.seed)
        answer: list[int] = []
        logprobs: list[dict[int, Logprob]] = []
        while len(answer) < params.max_tokens and not (answer and answer[-1] in params.stop_token_ids):
            processed = self._logits([*ids, *answer], extra) * self.blur + bias
            distribution = (processed / (params.temperature or 1)).log_softmax(dim=-1)
            drawn = torch.multinomial(distribution.exp(), 1, generator=draw)
            token = int(drawn) if params.temperature else int(processed.argmax())
            answer.append(token)
            logprobs.append({token: Logprob(float(distribution[token]))})
        reason = "stop" if answer[-1] in params.stop_token_ids else "length"
        return RequestOutput(ids, [CompletionOutput(answer, logprobs, reason)])

    def _logits(self, ids: list[int], extra: dict[str, Tensor]) -> Tensor:
        tokens = torch.tensor([ids])
        if self.vision:
            extra = {**extra, "mm_token_type_ids": (tokens == self.model.config.image_token_id).int()}
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **extra).logits[0, -1].float()
        return logits

    def _inputs(self, prompt: dict[str, Any]) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids with each picture's single token multiplied, and its pixels."""
        assert set(prompt) <= {"prompt_token_ids", "multi_modal_data"}
        ids = prompt["prompt_token_ids"]
        assert all(type(token) is int for token in ids)
        if "multi_modal_data" not in prompt:
            assert not self.vision or self.model.config.image_token_id not in ids
            return ids, {}
        images = prompt["multi_modal_data"]["image"]
        assert self.processor is not None
        assert images
        assert all(isinstance(image, PIL.Image.Image) for image in images)
        assert ids.count(self.model.config.image_token_id) == len(images)
        made = self.processor(images=images, return_tensors="pt")
        counts = iter((made["image_grid_thw"].prod(dim=1) // self.processor.merge_size**2).tolist())
        whole = [
            token for one in ids for token in [one] * (next(counts) if one == self.model.config.image_token_id else 1)
        ]
        return whole, {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


def install(monkeypatch: pytest.MonkeyPatch, blur: float = 1.0) -> type[LLM]:
    """Make ``import vllm`` find this; returns its ``LLM``."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setattr(LLM, "blur", blur)
    return LLM
