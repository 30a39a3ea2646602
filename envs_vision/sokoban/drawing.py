"""Pictures of a Sokoban room: square tiles, one for each cell."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from envs_vision.sokoban.rules import Room
from harness.contracts import Image

GRID = 64
"""Tiles are drawn on a square of this side and then scaled to the size asked for."""
FLOOR, GROOVE = "#ded2b8", "#cdbf9f"
WALL, MORTAR = "#8a5a44", "#5f3d2e"
TARGET, RED = "#141414", "#e02020"
CRATE, PLANK = "#f2c230", "#8f6a10"
ALIEN, DARK = "#2fae3c", "#10501a"


def draw_room(room: Room, tile: int) -> Image:
    """The room, shape (height x tile, width x tile, 3)."""
    rows = []
    for row in range(room.height):
        cells = range(row * room.width, (row + 1) * room.width)
        rows.append(np.concatenate([_tile(_look(room, cell), tile) for cell in cells], axis=1))
    return np.concatenate(rows, axis=0)


def _look(room: Room, cell: int) -> tuple[str, bool]:
    """What stands on a cell, and whether the cell is a target."""
    if cell in room.walls:
        return "wall", False
    thing = "box" if cell in room.boxes else "player" if cell == room.player else "floor"
    return thing, cell in room.targets


@lru_cache(maxsize=64)
def _tile(look: tuple[str, bool], size: int) -> Image:
    thing, on_target = look
    picture = Pillow.new("RGB", (GRID, GRID), FLOOR)
    pen = ImageDraw.Draw(picture)
    if thing == "wall":
        _wall(pen)
    elif on_target:
        pen.rectangle((0, 0, GRID - 1, GRID - 1), fill=TARGET, outline=RED, width=7)
    else:
        pen.rectangle((0, 0, GRID - 1, GRID - 1), outline=GROOVE, width=2)
    if thing == "box":
        _box(pen)
    if thing == "player":
        _player(pen)
    return np.asarray(picture.resize((size, size), Pillow.Resampling.BOX))


def _wall(pen: ImageDraw.ImageDraw) -> None:
    pen.rectangle((0, 0, GRID, GRID), fill=MORTAR)
    for row in range(4):
        for brick in range(-1, 2):
            left, top = brick * 32 + 16 * (row % 2), row * 16
            pen.rectangle((left + 2, top + 2, left + 29, top + 13), fill=WALL)


def _box(pen: ImageDraw.ImageDraw) -> None:
    """A crate that leaves the edge of its tile free, so that a target's red outline stays visible around it."""
    pen.rectangle((10, 10, 53, 53), fill=CRATE, outline=PLANK, width=5)
    pen.line((14, 14, 49, 49), fill=PLANK, width=5)
    pen.line((49, 14, 14, 49), fill=PLANK, width=5)


def _player(pen: ImageDraw.ImageDraw) -> None:
    for left, right in ((22, 18), (42, 46)):
        pen.line((left, 20, right, 6), fill=ALIEN, width=4)
        pen.ellipse((right - 4, 3, right + 4, 11), fill=ALIEN)
    pen.ellipse((12, 14, 52, 58), fill=ALIEN, outline=DARK, width=3)
    for eye in (24, 40):
        pen.ellipse((eye - 7, 24, eye + 7, 38), fill="white")
        pen.ellipse((eye - 3, 28, eye + 3, 35), fill="black")
    pen.arc((22, 36, 42, 52), 20, 160, fill=DARK, width=4)
