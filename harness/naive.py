"""The straightforward way to do what the harness does, written with transformers alone: what ``harness perf`` compares
with. One episode at a time, one ``model.generate`` call a step, whole logits. Nothing here shares code with the policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from harness.contracts import AgentEnv, Prompt, Task, Turn, View
from harness.rollout import Rules


class NaivePolicy:
    """A model directory as a short script would use it.

    Args:
        directory: Model, tokenizer and, for vision models, image processor.
        suppressed: Tokens that are never sampled.
    """

    def __init__(self, directory: Path, suppressed: list[int]) -> None:
        vision = "vision_config" in json.loads((directory / "config.json").read_text(encoding="utf-8"))
        family = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        self.model: Any = family.from_pretrained(directory, use_safetensors=True).eval()
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory)
        self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(directory) if vision else None
        self.suppressed = suppressed

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """What ``generate`` takes for one prompt; pictures become as many image tokens as they have patches."""
        content: Any = prompt.text
        if self.processor is not None:
            head, *tail = prompt.text.split("<image>")
            content = [{"type": "text", "text": head}]
            for piece in tail:
                content += [{"type": "image"}, {"type": "text", "text": piece}]
        message = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        pixels: dict[str, Tensor] = {}
        if prompt.images:
            pixels = self.processor(images=list(prompt.images), return_tensors="pt")
            image = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
            pieces = text.split(image)
            counts = pixels["image_grid_thw"].prod(dim=1) // self.processor.merge_size**2
            text = pieces[0] + "".join(image * int(n) + rest for n, rest in zip(counts, pieces[1:], strict=True))
        made = dict(self.tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False))
        if self.processor is not None:
            made["mm_token_type_ids"] = (made["input_ids"] == self.model.config.image_token_id).long()
        return {**made, **pixels}

    @torch.no_grad()
    def answer(self, prompt: Prompt, rules: Rules) -> tuple[str, int]:
        """One sampled answer and its number of tokens, the end token included."""
        inputs = self.inputs(prompt)
        output = self.model.generate(
            **inputs,
            max_new_tokens=rules.sampling.max_tokens,
            do_sample=True,
            temperature=rules.sampling.temperature,
            top_k=0,
            top_p=1.0,
            suppress_tokens=self.suppressed,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        ids = output[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(ids, skip_special_tokens=True), len(ids)

    def play(self, env: AgentEnv, task: Task, rules: Rules, style: str) -> int:
        """Play one episode; returns the number of sampled tokens."""
        observation, info = env.reset(options={"task": task})
        text, turns, tokens = env.task_text(observation), list[Turn](), 0
        for number in range(1, rules.max_steps + 1):
            history = tuple(turns[-rules.history :]) if rules.history else ()
            view = View(text, number, history, observation["text"], observation["images"], info["admissible"])
            answer, length = self.answer(env.prompt(view, style), rules)
            tokens += length
            action, _ = env.parse(answer)
            turns.append(Turn(number, observation["text"], action))
            observation, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
        return tokens


def full_logits_scores(model: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Log-probs of answers behind their prompts, given as token ids, from the logits of the whole padded batch.

    Returns:
        Flat over the answer tokens of all rows.
    """
    whole = [torch.tensor([*prompt, *answer]) for prompt, answer in rows]
    ids = pad_sequence(whole, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in whole], batch_first=True)
    types = {"mm_token_type_ids": torch.zeros_like(ids)} if hasattr(model.config, "vision_config") else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **types).logits
    logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    spans = [(len(prompt) - 1, len(prompt) + len(answer) - 1) for prompt, answer in rows]
    return torch.cat([row[start:end] for row, (start, end) in zip(logprobs, spans, strict=True)])
