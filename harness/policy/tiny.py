"""The embedded policy: the Qwen2.5-VL architecture at toy size, with its own small tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from harness.contracts import HarnessError
from harness.policy.local import LocalPolicy

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
IMAGE = "<|image_pad|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
VIDEO = "<|video_pad|>"
SPECIAL = (PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO)

PATCH = 14
"""Side in pixels of the square that becomes one visual token."""

PIXELS = 6 * PATCH
"""Pictures larger than a square of this side are scaled down to its area; a 6x6 room has one token a cell."""

# A user turn is wrapped in two tokens; the answer follows at once and ends with the second one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|im_start|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}"
)


def build_tokenizer(texts: Iterable[str], phrases: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on texts, with fixed phrases as single tokens.

    Any Unicode text survives encoding and decoding. Words and numbers carry their leading blank, as in GPT-2. The
    longest phrase wins where several match; phrases are ordinary tokens, not special ones.

    Args:
        texts: What the policy will read and write; the same texts in the same order give the same tokenizer.
        phrases: Fixed pieces of prompts and answers, plain ASCII.
        vocab_size: Tokens in all, special tokens and phrases included.

    Raises:
        HarnessError: The vocabulary is too small, or a phrase is not plain ASCII.
    """
    distinct = list(dict.fromkeys(phrases))
    for phrase in distinct:
        if not phrase or not phrase.isascii():
            raise HarnessError(f"phrase {phrase!r} cannot be a token: phrases are non-empty ASCII text")
    room = vocab_size - len(distinct)
    smallest = len(SPECIAL) + 256
    if room < smallest:
        raise HarnessError(f"a vocabulary of {vocab_size} cannot hold {len(distinct)} phrases and {smallest} basics")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The pieces between phrases: no merge is spent on words that only occur within one.
    between = re.compile("|".join(sorted(map(re.escape, distinct), key=len, reverse=True)))
    tokenizer.train_from_iterator((piece for text in texts for piece in between.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in distinct])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, VISION_START, VISION_END, IMAGE, VIDEO],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int = 2,
    mlp: int = 192,
    vision_width: int = 64,
    vision_layers: int = 2,
    spread: float = 0.1,
) -> Qwen2_5_VLConfig:
    """Configuration at toy size; every vision layer sees the whole picture, and in- and output embeddings are tied.

    ``spread`` is the standard deviation of fresh weights: at this width the usual 0.02 hardly learns to see.
    """
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    half = width // heads // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
            "bos_token_id": None,
            "eos_token_id": ids[END],
            "pad_token_id": ids[PAD],
            "tie_word_embeddings": True,
            "initializer_range": spread,
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_width,
            "intermediate_size": 2 * vision_width,
            "num_heads": heads,
            "out_hidden_size": width,
            "fullatt_block_indexes": list(range(vision_layers)),
            "patch_size": PATCH,
            "spatial_merge_size": 1,
            "initializer_range": spread,
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
        initializer_range=spread,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )


def new_tiny(tokenizer: PreTrainedTokenizerFast, seed: int, config: Qwen2_5_VLConfig | None = None) -> LocalPolicy:
    """A policy with random weights; one seed gives one policy and leaves torch's own generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config or tiny_config(tokenizer))
    processor = Qwen2VLImageProcessorPil(
        min_pixels=PATCH * PATCH, max_pixels=PIXELS * PIXELS, patch_size=PATCH, merge_size=1
    )
    return LocalPolicy(model.float(), tokenizer, processor, spec="tiny", prompt_style="compact")
