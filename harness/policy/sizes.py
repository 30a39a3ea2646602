"""How large a model is, without loading or downloading it: what memory and time are estimated from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from harness.contracts import HarnessError
from harness.policy.files import INDEX, MODEL_FILES, WEIGHTS, read_json, tensors_in, weight_files
from harness.policy.load import HUB_ID, model_directory


@dataclass(frozen=True)
class Size:
    """Numbers of a decoder, in its own units.

    Attributes:
        parameters: All of the model's, shared ones counted once, vision tower included.
        layers: Of the decoder.
        width: Of its hidden states.
        attention: Heads x head size, of the queries.
        keys: Key heads x head size; the values are as wide.
        mlp: Inner width.
        vocabulary: Rows of the embedding.
        tied: Whether the language-model head is the embedding.
    """

    parameters: int
    layers: int
    width: int
    attention: int
    keys: int
    mlp: int
    vocabulary: int
    tied: bool = True

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)


KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": Size(494_032_768, 24, 896, 896, 128, 4864, 151_936),
    "Qwen/Qwen2.5-1.5B-Instruct": Size(1_543_714_304, 28, 1536, 1536, 256, 8960, 151_936),
    "Qwen/Qwen2.5-3B-Instruct": Size(3_085_938_688, 36, 2048, 2048, 256, 11008, 151_936),
    "Qwen/Qwen2.5-7B-Instruct": Size(7_615_616_512, 28, 3584, 3584, 512, 18944, 152_064, tied=False),
    "Qwen/Qwen3-0.6B": Size(596_049_920, 28, 1024, 2048, 1024, 3072, 151_936),
    "Qwen/Qwen3-1.7B": Size(1_720_574_976, 28, 2048, 2048, 1024, 6144, 151_936),
    "Qwen/Qwen3-4B": Size(4_022_468_096, 36, 2560, 4096, 1024, 9728, 151_936),
    "Qwen/Qwen3-8B": Size(8_190_735_360, 36, 4096, 4096, 1024, 12288, 151_936, tied=False),
    "Qwen/Qwen2.5-VL-3B-Instruct": Size(3_754_622_976, 36, 2048, 2048, 256, 11008, 151_936),
    "Qwen/Qwen2.5-VL-7B-Instruct": Size(8_292_166_656, 28, 3584, 3584, 512, 18944, 152_064, tied=False),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Size(134_515_008, 30, 576, 576, 192, 1536, 49_152),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Size(361_821_120, 32, 960, 960, 320, 2560, 49_152),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Size(1_711_376_384, 24, 2048, 2048, 2048, 8192, 49_152),
    "meta-llama/Llama-3.2-1B-Instruct": Size(1_235_814_400, 16, 2048, 2048, 512, 8192, 128_256),
    "meta-llama/Llama-3.2-3B-Instruct": Size(3_212_749_824, 28, 3072, 3072, 1024, 8192, 128_256),
}
"""Published models: what their config.json says; parameters counted on the model that transformers builds from it."""


def size_of(spec: str) -> Size | None:
    """The size of a model by name, None where it is neither known nor on this machine. Downloads nothing.

    Raises HarnessError where the name is that of no model.
    """
    directory = directory_at_hand(spec)
    return KNOWN.get(spec) if directory is None else size_in(directory)


def directory_at_hand(spec: str) -> Path | None:
    """Where a model's files lie on this machine; None for a hub id that has not been downloaded.

    Raises HarnessError where the name is that of no model.
    """
    if Path(spec).expanduser().exists() or not HUB_ID.fullmatch(spec):
        return model_directory(spec)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{suffix}" for suffix in MODEL_FILES]
    try:
        directory = Path(snapshot_download(spec, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise HarnessError(f"{spec!r} is neither a directory nor a name of the hub") from error
    begun = (directory / WEIGHTS).is_file() or (directory / INDEX).is_file()
    return directory if begun else None


def size_in(directory: Path) -> Size:
    """The size of the model in a directory, from its config.json and the headers of its weights.

    Raises HarnessError where they do not tell.
    """
    config = read_json(directory, "config.json")
    text = {**config, **config.get("text_config", {})}
    shapes = {name: entry["shape"] for path in weight_files(directory) for name, entry in tensors_in(path).items()}
    try:
        heads, width = int(text["num_attention_heads"]), int(text["hidden_size"])
        head = int(text.get("head_dim") or width // heads)
        return Size(
            parameters=sum(map(math.prod, shapes.values())),
            layers=int(text["num_hidden_layers"]),
            width=width,
            attention=heads * head,
            keys=int(text.get("num_key_value_heads") or heads) * head,
            mlp=int(text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            tied=not any(name.endswith("lm_head.weight") for name in shapes),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HarnessError(f"{directory / 'config.json'} does not state the size of a decoder: {error}") from error
