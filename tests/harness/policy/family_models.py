"""Models of published families at reduced size: their architecture, tokenizer rules, chat format and image processor.

Weights are random, vocabularies small, and the chat templates are written in the form of the families' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

TEXTS = [f"put a clean mug in desk {i}.\n\nYou see a drawer {i}.\nUser: go  on\n" for i in range(40)]

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")

CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + CONTENT + "<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n"
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ date_string if date_string is defined else strftime_now('%d %b %Y') }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
FRAMES = (
    "BOS{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    + CONTENT
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MARKS = ("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)))

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """How a family's reduced model is made.

    Attributes:
        words: Its rule of words; empty means single digits and GPT-2's words, as SmolLM2 has.
        special: Special tokens, the one that ends a turn first.
        template: Chat template.
        model: Makes the model from the ids of tokens.
        eos: What the tokenizer calls its end of sequence, often another token than a turn's end; empty is none.
        added: Added tokens that are not marked special.
        processor: Makes the family's own processor of text and pictures from a tokenizer.
    """

    words: str
    special: tuple[str, ...]
    template: str
    model: Callable[[Any, int], Any]
    eos: str = ""
    added: tuple[str, ...] = ()
    processor: Callable[[Any], Any] | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        made = Tokenizer(models.BPE())
        if self.words:
            split = pre_tokenizers.Split(Regex(self.words), "isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        else:
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(TEXTS, trainer)
        made.add_special_tokens([AddedToken(token, normalized=False) for token in self.special])
        made.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        names = {"eos_token": self.eos} if self.eos else {}
        if "<|begin_of_text|>" in self.special:
            names["bos_token"] = "<|begin_of_text|>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)
        tokenizer.chat_template = self.template
        return tokenizer

    def save(self, directory: Path) -> None:
        """Write the model as it would be published."""
        tokenizer = self.tokenizer()
        torch.manual_seed(0)
        model = self.model(tokenizer.get_vocab(), len(tokenizer) + 3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)  # distributions that are not nearly uniform
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        if self.processor is not None:
            self.processor(tokenizer).image_processor.save_pretrained(directory)


def qwen2(ids: Any, size: int) -> Any:
    config = Qwen2Config(**TEXT, vocab_size=size, use_sliding_window=False, sliding_window=64, max_window_layers=1)
    return _stops(Qwen2ForCausalLM(config), [ids["<|im_end|>"], ids["<|endoftext|>"]])


def qwen3(ids: Any, size: int) -> Any:
    return _stops(Qwen3ForCausalLM(Qwen3Config(**TEXT, vocab_size=size, head_dim=16)), [ids["<|im_end|>"]])


def llama(ids: Any, size: int) -> Any:
    config = LlamaConfig(**TEXT, vocab_size=size, rope_parameters=LLAMA3_ROPE)
    return _stops(LlamaForCausalLM(config), [ids["<|end_of_text|>"], ids["<|eot_id|>"]])


def smollm2(ids: Any, size: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(**TEXT, vocab_size=size, tie_word_embeddings=True))


def qwen2_5_vl(ids: Any, size: int) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": size, "rope_parameters": M_ROPE},
        vision_config={**vision, "out_hidden_size": 32, "patch_size": 14, "window_size": 56},
        **_qwen_ids(ids),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(ids: Any, size: int) -> Any:
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 16}
    config = Qwen3VLConfig(
        text_config={
            **TEXT,
            "vocab_size": size,
            "head_dim": 8,
            "rope_parameters": M_ROPE | {"mrope_interleaved": True},
        },
        vision_config={**vision, "out_hidden_size": 32, "patch_size": 16, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=True,
        **_qwen_ids(ids),
    )
    return Qwen3VLForConditionalGeneration(config)


def frames(config_class: Any, model_class: Any) -> Callable[[Any, int], Any]:
    def make(ids: Any, size: int) -> Any:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = config_class(
            text_config={**TEXT, "vocab_size": size, "model_type": "llama", "pad_token_id": 0},
            vision_config={**vision, "image_size": 32, "patch_size": 8},
            scale_factor=2,
            image_token_id=ids["<image>"],
            pad_token_id=0,
        )
        return _stops(model_class(config), [ids["<end_of_utterance>"]])

    return make


def _qwen_ids(ids: Any) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: ids[token] for name, token in zip(names, QWEN_VISION, strict=True)}


def _stops(model: Any, ids: Sequence[int]) -> Any:
    model.generation_config = GenerationConfig(eos_token_id=list(ids), pad_token_id=ids[0])
    return model


def _qwen_images(patch: int) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(min_pixels=(2 * patch) ** 2, max_pixels=(8 * patch) ** 2, patch_size=patch)


SPLIT = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}

FAMILIES = {
    "Qwen2.5": Family(
        QWEN_WORDS, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), SYSTEM + CHATML + ASK, qwen2, "<|im_end|>"
    ),
    "Qwen3": Family(
        QWEN_WORDS,
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        THINKING,
        qwen3,
        "<|im_end|>",
        added=("<think>", "</think>"),
    ),
    "Llama 3": Family(
        LLAMA_WORDS,
        ("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        LLAMA,
        llama,
        "<|end_of_text|>",
    ),
    "SmolLM2": Family("", ("<|im_end|>", "<|im_start|>"), SYSTEM + CHATML + ASK, smollm2),
    "Qwen2.5-VL": Family(
        QWEN_WORDS,
        ("<|im_end|>", "<|im_start|>", *QWEN_VISION),
        SYSTEM + CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>") + ASK,
        qwen2_5_vl,
        "<|im_end|>",
        processor=lambda tokenizer: Qwen2_5_VLProcessor(_qwen_images(14), tokenizer),
    ),
    "Qwen3-VL": Family(
        QWEN_WORDS,
        ("<|im_end|>", "<|im_start|>", *QWEN_VISION),
        CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>") + ASK,
        qwen3_vl,
        "<|im_end|>",
        processor=lambda tokenizer: Qwen3VLProcessor(_qwen_images(16), tokenizer),
    ),
    "Idefics3": Family(
        LLAMA_WORDS,
        ("<end_of_utterance>", "<|begin_of_text|>", "<|end_of_text|>", "<image>", MARKS[0]),
        FRAMES.replace("IMAGE", "<image>").replace("BOS", "<|begin_of_text|>"),
        frames(Idefics3Config, Idefics3ForConditionalGeneration),
        "<|end_of_text|>",
        added=MARKS[1:],
        processor=lambda tokenizer: Idefics3Processor(Idefics3ImageProcessorPil(**SPLIT), tokenizer, image_seq_len=4),
    ),
    "SmolVLM": Family(
        "",
        ("<end_of_utterance>", "<|im_start|>", "<image>", *MARKS),
        FRAMES.replace("IMAGE", "<image>").replace("BOS", "<|im_start|>"),
        frames(SmolVLMConfig, SmolVLMForConditionalGeneration),
        "<end_of_utterance>",
        processor=lambda tokenizer: SmolVLMProcessor(SmolVLMImageProcessorPil(**SPLIT), tokenizer, None, 4),
    ),
}
