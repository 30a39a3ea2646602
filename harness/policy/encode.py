"""From a prompt to token ids, the role of every token, positions and pictures.

The chat template is rendered once, around a marker; its own pieces may contain special tokens, a prompt's text never
does: a page that shows ``<|im_end|>`` is spelled out in ordinary tokens.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from harness.contracts import IMAGE_PLACEHOLDER, HarnessError, Image, Prompt

Ints = NDArray[np.int64]
Grid = tuple[int, int, int]
"""Patches of a picture along time (always 1), height and width."""

MARKER = "\N{OBJECT REPLACEMENT CHARACTER}text\N{OBJECT REPLACEMENT CHARACTER}"
CACHED_PROMPTS = 8192


class Role(IntEnum):
    """Where a token comes from."""

    CHAT = 0
    """The chat template, including the tokens that open and close a picture."""
    TEXT = 1
    """The prompt's text."""
    IMAGE = 2
    """A place that a picture's feature vector fills."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One image of a prompt, named by its content."""

    digest: bytes
    image: Image = field(repr=False)
    grid: Grid
    tokens: int


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt as the model reads it.

    Attributes:
        key: Two prompts with equal keys are the same model input.
        ids: Token ids, shape (n,).
        roles: A ``Role`` for every token, shape (n,), int8.
        positions: Rotary positions, shape (axes, n): one axis for text models, three (time, height, width) for Qwen-VL.
        next_position: Rotary position of the first response token, on every axis.
        pictures: The images, in the order of their tokens.
    """

    key: tuple[str, tuple[bytes, ...]]
    ids: Ints
    roles: NDArray[np.int8]
    positions: Ints
    next_position: int
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ImageFormat:
    """How a model sees pictures: ids of the tokens that stand for one and the patch arithmetic of its processor."""

    processor: Any
    token_id: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def grid(self, image: Image) -> Grid:
        """Patches after the processor's resizing; raises HarnessError for images it refuses (aspect ratio over 200)."""
        patch, size = self.processor.patch_size, self.processor.size
        try:
            height, width = smart_resize(
                *image.shape[:2], patch * self.processor.merge_size, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:
            raise HarnessError(f"image of {image.shape[1]}x{image.shape[0]} pixels: {error}") from error
        return 1, height // patch, width // patch

    def tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // int(self.processor.merge_size) ** 2


class Encoder:
    """Encodes prompts for one tokenizer; results are cached by content."""

    def __init__(
        self, tokenizer: Any, images: ImageFormat | None, prefix: Sequence[int], suffix: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images
        self.prefix = list(prefix)
        self.suffix = list(suffix)
        self.special_ids = special_ids(tokenizer)
        self._layouts: OrderedDict[tuple[str, tuple[Grid, ...]], Encoded] = OrderedDict()
        self._pictures: dict[int, tuple[weakref.ref[Image], Picture]] = {}

    def text_ids(self, text: str) -> list[int]:
        """Ordinary tokens of a text; what looks like a special token in it is spelled out."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        # What the tokenizer's own call does, without the offsets and objects that nobody reads: half the time.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self.special_ids.isdisjoint(ids):
            raise HarnessError(f"this tokenizer reads special tokens in plain text, e.g. in {text[:60]!r}")
        return ids

    def __call__(self, prompt: Prompt) -> Encoded:
        """Encode a prompt. Raises HarnessError for images where the model has no vision tower."""
        if prompt.images and self.images is None:
            raise HarnessError("this policy reads text only, but the prompt carries images; choose a vision policy")
        pictures = tuple(self._picture(image) for image in prompt.images)
        layout = self._layout(prompt.text, tuple(picture.grid for picture in pictures))
        if not pictures:
            return layout
        key = (prompt.text, tuple(picture.digest for picture in pictures))
        return Encoded(key, layout.ids, layout.roles, layout.positions, layout.next_position, pictures)

    def _layout(self, text: str, grids: tuple[Grid, ...]) -> Encoded:
        """Everything but the pixels; prompts that differ in pixels only share it."""
        key = (text, grids)
        if key in self._layouts:
            self._layouts.move_to_end(key)
            return self._layouts[key]
        ids, roles = list(self.prefix), [Role.CHAT] * len(self.prefix)
        for number, piece in enumerate(text.split(IMAGE_PLACEHOLDER)):
            if number:
                assert self.images is not None
                tokens = self.images.tokens(grids[number - 1])
                ids += [*self.images.before, *[self.images.token_id] * tokens, *self.images.after]
                roles += [Role.CHAT] * len(self.images.before) + [Role.IMAGE] * tokens
                roles += [Role.CHAT] * len(self.images.after)
            piece_ids = self.text_ids(piece) if piece else []
            ids += piece_ids
            roles += [Role.TEXT] * len(piece_ids)
        ids += self.suffix
        roles += [Role.CHAT] * len(self.suffix)
        role_array = np.array(roles, dtype=np.int8)
        merge = int(self.images.processor.merge_size) if self.images else 1
        positions = rotary_positions(role_array, grids, merge, axes=3 if self.images else 1)
        layout = Encoded((text, ()), np.array(ids), role_array, positions, int(positions.max()) + 1)
        self._layouts[key] = layout
        if len(self._layouts) > CACHED_PROMPTS:
            self._layouts.popitem(last=False)
        return layout

    def _picture(self, image: Image) -> Picture:
        """The picture of an array, remembered for as long as the array lives."""
        assert self.images is not None
        known = self._pictures.get(id(image))
        if known is not None and known[0]() is image:
            return known[1]
        grid = self.images.grid(image)
        content = hashlib.sha1(repr(image.shape).encode(), usedforsecurity=False)
        content.update(np.ascontiguousarray(image).data)
        picture = Picture(content.digest(), image.copy(), grid, self.images.tokens(grid))
        image.setflags(write=False)  # the array stands for its content from now on
        self._pictures[id(image)] = (weakref.ref(image, partial(_forget, self._pictures, id(image))), picture)
        return picture


def _forget(pictures: dict[int, tuple[weakref.ref[Image], Picture]], name: int, _: weakref.ref[Image]) -> None:
    pictures.pop(name, None)


def rotary_positions(roles: NDArray[np.int8], grids: Sequence[Grid], merge: int, axes: int) -> Ints:
    """Positions of every token, shape (axes, n).

    Text counts up on all axes; a picture's tokens share one time and are laid out on a grid of height and width, and
    the text after it goes on behind the picture's larger side (M-RoPE of Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    if axes == 1:
        return np.arange(len(roles))[None]
    positions = np.empty((axes, len(roles)), dtype=np.int64)
    place = shift = 0  # text at index i has position i + shift: a picture takes fewer positions than tokens
    pictured = roles == Role.IMAGE
    for _, rows, columns in grids:
        height, width = rows // merge, columns // merge
        start = place + int(pictured[place:].argmax())
        positions[:, place:start] = np.arange(place, start) + shift
        place = start + height * width
        positions[0, start:place] = start + shift
        positions[1, start:place] = start + shift + np.repeat(np.arange(height), width)
        positions[2, start:place] = start + shift + np.tile(np.arange(width), height)
        shift += max(height, width) - height * width
    positions[:, place:] = np.arange(place, len(roles)) + shift
    return positions


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of every token marked special, whether or not it has a name such as eos."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def chat_pieces(tokenizer: Any, vision: bool) -> tuple[list[int], list[int]]:
    """Ids before and after the text of one user message, the generation prompt included."""
    content: Any = [{"type": "text", "text": MARKER}] if vision else MARKER
    before, after = _render(tokenizer, content).split(MARKER)
    return _template_ids(tokenizer, before), _template_ids(tokenizer, after)


def image_pieces(tokenizer: Any, image_token_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after the tokens of a picture, e.g. its start and end marks."""
    text = {"type": "text", "text": MARKER}
    ids = _template_ids(tokenizer, _render(tokenizer, [text, {"type": "image"}, text]).split(MARKER)[1])
    if ids.count(image_token_id) != 1:
        raise HarnessError("the chat template does not place exactly one image token for a picture")
    place = ids.index(image_token_id)
    return tuple(ids[:place]), tuple(ids[place + 1 :])


def _render(tokenizer: Any, content: Any) -> str:
    if not tokenizer.chat_template:
        raise HarnessError("the model's tokenizer has no chat template; choose an instruct model")
    message = [{"role": "user", "content": content}]
    rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return rendered


def _template_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    return ids
