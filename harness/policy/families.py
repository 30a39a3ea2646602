"""Families of vision-language models: what stands for a picture in the text, and what the vision tower makes of it.

Text models need nothing from here. A family is one class and one line in ``FAMILIES``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import AddedToken
from torch import Tensor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from harness.contracts import HarnessError, Image

Ints = NDArray[np.int64]
Grid = tuple[int, ...]
"""What a picture's size decides: patches along time (always 1), height and width; or rows and columns of frames."""


AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"
FRAME = re.compile(rf"{AROUND}|{WHOLE}|<row_\d+_col_\d+>")
"""Marks of Idefics3: around frames, before the whole picture, and before the frame in a row and column."""


class Vision(ABC):
    """How one model sees.

    Attributes:
        processor: The model's image processor, the PIL one of transformers.
        token_id: Id of the token whose places a picture's feature vectors fill.
        token: That token.
        axes: Axes of its rotary positions.
    """

    axes = 1

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        self.processor = processor
        self.token_id = int(model.config.image_token_id)
        self.token = str(tokenizer.convert_ids_to_tokens(self.token_id))

    @abstractmethod
    def grid(self, image: Image) -> Grid:
        """The grid of a picture after the processor's resizing; raises HarnessError for pictures it refuses."""

    @abstractmethod
    def text(self, grid: Grid) -> str:
        """What takes the place of a template's image token: ``token`` once per feature vector, and marks between."""

    def positions(self, pictured: NDArray[np.bool_], grids: Sequence[Grid]) -> Ints:
        """Rotary positions, shape (axes, n), of tokens of which some are filled by pictures."""
        return np.arange(len(pictured))[None]

    @abstractmethod
    def cut(self, images: Sequence[Image], grids: Sequence[Grid]) -> list[Tensor]:
        """What the image processor makes of each picture."""

    @abstractmethod
    def tower(self, model: Any) -> list[torch.nn.Module]:
        """The modules that features come from."""

    @abstractmethod
    def features(self, model: Any, cuts: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Feature vectors of each picture, shape (tokens, width), or (tokens, (1 + k) width) where a further vector
        is added behind each of the first k decoder layers."""


class QwenVision(Vision):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one feature vector per square of patches, positions on three axes.

    Qwen3-VL also feeds features of inner tower layers into the first decoder layers (DeepStack, arXiv 2406.04334).
    """

    axes = 3

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        super().__init__(model, processor, tokenizer)
        self.merge = int(processor.merge_size)
        embed = model.model.visual.patch_embed
        embed.forward = MethodType(_by_matrix, embed)

    def grid(self, image: Image) -> Grid:
        patch, size = self.processor.patch_size, self.processor.size
        try:
            height, width = smart_resize(
                *image.shape[:2], patch * self.merge, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:  # an aspect ratio over 200
            raise HarnessError(f"image of {image.shape[1]}x{image.shape[0]} pixels: {error}") from error
        return 1, height // patch, width // patch

    def text(self, grid: Grid) -> str:
        return self.token * (math.prod(grid) // self.merge**2)

    def positions(self, pictured: NDArray[np.bool_], grids: Sequence[Grid]) -> Ints:
        """Text counts up on all axes; a picture's tokens share one time and are laid out on a grid of height and
        width, and the text after it goes on behind the picture's larger side (M-RoPE, arXiv 2409.12191, section 2.1).
        """
        positions = np.empty((3, len(pictured)), dtype=np.int64)
        place = shift = 0  # text at index i has position i + shift: a picture takes fewer positions than tokens
        for _, rows, columns in grids:
            height, width = rows // self.merge, columns // self.merge
            start = place + int(pictured[place:].argmax())
            positions[:, place:start] = np.arange(place, start) + shift
            place = start + height * width
            positions[0, start:place] = start + shift
            positions[1, start:place] = start + shift + np.repeat(np.arange(height), width)
            positions[2, start:place] = start + shift + np.tile(np.arange(width), height)
            shift += max(height, width) - height * width
        positions[:, place:] = np.arange(place, len(pictured)) + shift
        return positions

    def cut(self, images: Sequence[Image], grids: Sequence[Grid]) -> list[Tensor]:
        made = self.processor(images=list(images), return_tensors="pt", input_data_format="channels_last")
        return list(made["pixel_values"].split([math.prod(grid) for grid in grids]))

    def tower(self, model: Any) -> list[torch.nn.Module]:
        return [model.model.visual]

    def features(self, model: Any, cuts: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        patches = torch.cat(list(cuts))
        output = model.get_image_features(patches, torch.tensor(grids, device=patches.device), return_dict=True)
        deeper = getattr(output, "deepstack_features", None)
        if not deeper:
            return list(output.pooler_output)
        return [torch.cat(layers, dim=-1) for layers in zip(output.pooler_output, *deeper, strict=True)]


class FrameVision(Vision):
    """Idefics3 and SmolVLM: a picture is cut into square frames, and all of it scaled to one more; every frame has as
    many feature vectors, and marks tell its row and column. Positions count on as in text."""

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        super().__init__(model, processor, tokenizer)
        vision = model.config.vision_config
        self.tokens = int((vision.image_size // vision.patch_size) ** 2 / model.config.scale_factor**2)
        self.edge = int(processor.max_image_size["longest_edge"])
        if self.edge != vision.image_size:
            raise HarnessError(f"the image processor cuts frames of {self.edge} pixels, the model {vision.image_size}")
        marks = [mark for mark in tokenizer.get_added_vocab() if FRAME.fullmatch(mark)]
        # Where the tokenizer does not mark them special: they must never come out of a prompt's text.
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks], special_tokens=True)

    def grid(self, image: Image) -> Grid:
        if not self.processor.do_image_splitting:
            return 0, 0
        height, width = image.shape[:2]
        if self.processor.do_resize:
            height, width = _within(height, width, int(self.processor.size["longest_edge"]))
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.edge)
            rows = math.ceil(int(columns * self.edge / aspect) / self.edge)
        else:
            rows = math.ceil(height / self.edge)
            columns = math.ceil(int(rows * self.edge * aspect) / self.edge)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def text(self, grid: Grid) -> str:
        rows, columns = grid
        frame = self.token * self.tokens
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{frame}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        split = "".join(lines) + "\n" if lines else ""
        return f"{split}{AROUND}{WHOLE}{frame}{AROUND}"

    def cut(self, images: Sequence[Image], grids: Sequence[Grid]) -> list[Tensor]:
        """Frames (frames, 4, height, width) of each picture: the processor's pixels, and its mask behind them."""
        cuts = []
        for image in images:
            made = self.processor(images=[[image]], return_tensors="pt", input_data_format="channels_last")
            mask = made["pixel_attention_mask"][0].unsqueeze(1).to(made["pixel_values"].dtype)
            cuts.append(torch.cat([made["pixel_values"][0], mask], dim=1))
        return cuts

    def tower(self, model: Any) -> list[torch.nn.Module]:
        return [model.model.vision_model, model.model.connector]

    def features(self, model: Any, cuts: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        frames = torch.cat(list(cuts))[None]
        pixels, mask = frames[:, :, :3], frames[:, :, 3] > 0
        (joined,) = model.get_image_features(pixels, mask, return_dict=True).pooler_output
        return list(joined.split([self.tokens * len(cut) for cut in cuts]))


FAMILIES: dict[str, tuple[type[Vision], type[Any]]] = {
    "qwen2_vl": (QwenVision, Qwen2VLImageProcessorPil),
    "qwen2_5_vl": (QwenVision, Qwen2VLImageProcessorPil),
    "qwen3_vl": (QwenVision, Qwen2VLImageProcessorPil),
    "idefics3": (FrameVision, Idefics3ImageProcessorPil),
    "smolvlm": (FrameVision, SmolVLMImageProcessorPil),
}
"""By ``model_type``: how it sees, and its image processor."""


def vision_family(kind: str) -> tuple[type[Vision], type[Any]]:
    """The entry of a model type; raises HarnessError for one that is not known."""
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise HarnessError(f"vision-language models of type {kind!r} are not supported; supported types: {known}")
    return FAMILIES[kind]


def vision_of(model: Any, processor: Any | None, tokenizer: Any) -> Vision | None:
    """How a model sees; None for text models, which have no image processor."""
    return vision_family(model.config.model_type)[0](model, processor, tokenizer) if processor else None


def _within(height: int, width: int, edge: int) -> tuple[int, int]:
    """Size after scaling the longer side to ``edge``: the other keeps the aspect ratio and is made even."""
    aspect = width / height
    if width >= height:
        height, width = int(edge / aspect), edge
        height += height % 2
    else:
        height, width = edge, int(edge * aspect)
        width += width % 2
    return max(height, 1), max(width, 1)


def _by_matrix(embed: Any, patches: Tensor) -> Tensor:
    """Embed patches with one matrix product: the same as a convolution whose stride is its kernel, and much faster."""
    kernel = embed.proj.weight.flatten(1)
    return F.linear(patches.view(-1, kernel.shape[1]).to(kernel.dtype), kernel, embed.proj.bias)
