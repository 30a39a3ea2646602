"""From a prompt to token ids, the role of every token, positions and pictures.

A chat template's own pieces may contain special tokens, a prompt's text never does: a page that shows ``<|im_end|>``
is spelled out in ordinary tokens.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.contracts import IMAGE_PLACEHOLDER, HarnessError, Image, Prompt
from harness.policy.chat import Chat, plain_tokenizer, special_ids, template_ids
from harness.policy.families import Grid, Ints, Vision

CACHED_PROMPTS = 8192


class Role(IntEnum):
    """Where a token comes from."""

    CHAT = 0
    """The chat template, including the tokens around and within a picture that mark it."""
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


class Encoder:
    """Encodes prompts for one tokenizer; results are cached by content. ``vision`` is None for text models."""

    def __init__(self, tokenizer: Any, vision: Vision | None, chat: Chat) -> None:
        self.tokenizer = tokenizer
        self.vision = vision
        self.chat = chat
        self.special_ids = special_ids(tokenizer)
        self._plain = plain_tokenizer(tokenizer)
        self._layouts: OrderedDict[tuple[str, tuple[Grid, ...]], Encoded] = OrderedDict()
        self._pictures: dict[int, tuple[weakref.ref[Image], Picture]] = {}
        self._picture_ids: dict[Grid, tuple[int, ...]] = {}

    def text_ids(self, text: str) -> list[int]:
        """Ordinary tokens of a text; what looks like a special token in it is spelled out."""
        # What the tokenizer's own call does, without the offsets and objects that nobody reads: half the time.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def __call__(self, prompt: Prompt) -> Encoded:
        """Encode a prompt. Raises HarnessError for images where the model has no vision tower."""
        if prompt.images and self.vision is None:
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
        vision, chat = self.vision, self.chat
        pieces = text.split(IMAGE_PLACEHOLDER)
        if chat.strips:
            pieces = [piece.strip() for piece in pieces]
        opening = chat.opening if pieces[0] or not grids else chat.pictured
        ids, roles = list(opening.ids), [Role.CHAT] * len(opening.ids)
        for number, piece in enumerate(pieces):
            if number:
                assert vision is not None
                picture = self._ids_of(grids[number - 1])
                ids += picture
                roles += [Role.IMAGE if token == vision.token_id else Role.CHAT for token in picture]
            before = opening.text if not number else ""
            after = chat.closing_text if number == len(grids) else ""
            if before or piece or after:
                piece_ids = self.text_ids(before + piece + after)
                ids += piece_ids
                roles += self._roles(piece_ids, before, after)
        ids += chat.closing
        roles += [Role.CHAT] * len(chat.closing)
        role_array = np.array(roles, dtype=np.int8)
        positions = np.arange(len(ids))[None] if vision is None else vision.positions(role_array == Role.IMAGE, grids)
        layout = Encoded((text, ()), np.array(ids), role_array, positions, int(positions.max()) + 1)
        self._layouts[key] = layout
        if len(self._layouts) > CACHED_PROMPTS:
            self._layouts.popitem(last=False)
        return layout

    def _ids_of(self, grid: Grid) -> tuple[int, ...]:
        """Ids of all that stands for a picture, its marks included."""
        assert self.vision is not None
        if grid not in self._picture_ids:
            text = self.chat.picture.replace(self.vision.token, self.vision.text(grid))
            self._picture_ids[grid] = template_ids(self.tokenizer, text)
        return self._picture_ids[grid]

    def _roles(self, ids: list[int], before: str, after: str) -> list[Role]:
        """Roles of a text between pieces of the template; a token that is part of both counts as text."""
        first = _alike(ids, self.text_ids(before)) if before else 0
        last = _alike(ids[first:][::-1], self.text_ids(after)[::-1]) if after else 0
        return [Role.CHAT] * first + [Role.TEXT] * (len(ids) - first - last) + [Role.CHAT] * last

    def _picture(self, image: Image) -> Picture:
        """The picture of an array, remembered for as long as the array lives."""
        assert self.vision is not None
        known = self._pictures.get(id(image))
        if known is not None and known[0]() is image:
            return known[1]
        grid = self.vision.grid(image)
        content = hashlib.sha1(repr(image.shape).encode(), usedforsecurity=False)
        content.update(np.ascontiguousarray(image).data)
        picture = Picture(content.digest(), image.copy(), grid)
        image.setflags(write=False)  # the array stands for its content from now on
        self._pictures[id(image)] = (weakref.ref(image, partial(_forget, self._pictures, id(image))), picture)
        return picture


def _forget(pictures: dict[int, tuple[weakref.ref[Image], Picture]], name: int, _: weakref.ref[Image]) -> None:
    pictures.pop(name, None)


def _alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids at the beginning are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
