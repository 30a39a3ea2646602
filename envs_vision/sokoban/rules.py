"""Sokoban's rules as pure functions: moving, rewards (PAPER 4.4), text form of a room, shortest solutions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Row and column change of each move, in the order in which the parser looks for them."""
STILL = "still"
MAX_STATES = 20_000
"""Searches stop here, so that no room takes unbounded time; a 6x6 room with one box has fewer than 256 states."""


@dataclass(frozen=True)
class Room:
    """Everything that is visible; cells are numbered row by row from the upper left corner."""

    height: int
    width: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def covered(self) -> int:
        """Number of boxes that stand on a target."""
        return len(self.boxes & self.targets)

    @property
    def solved(self) -> bool:
        return self.targets <= self.boxes


@dataclass(frozen=True)
class State:
    """A room in play. ``counted`` is the number of boxes on targets as far as rewards have taken note of it: it starts
    at 0, so a box that stands on a target from the start pays at the first move. ``moves`` counts moves, blocked ones
    included, but not standing still."""

    room: Room
    counted: int = 0
    moves: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one action led to. ``effective``: the player has moved. ``won``: a move was made and all is covered."""

    state: State
    reward: float
    effective: bool
    won: bool


# ------------------------------------------------------------------------------------------------------ text


def parse_room(text: str) -> Room:
    """Read the usual notation, rows joined by "/": # wall, blank floor, . target, $ box, * box on target, @ player,
    + player on target."""
    rows = text.split("/")
    cells = "".join(rows)

    def where(symbols: str) -> frozenset[int]:
        return frozenset(i for i, cell in enumerate(cells) if cell in symbols)

    (player,) = where("@+")
    return Room(len(rows), len(rows[0]), where("#"), where(".*+"), where("$*"), player)


def format_room(room: Room) -> str:
    """Inverse of :func:`parse_room`."""

    def symbol(cell: int) -> str:
        on_target = cell in room.targets
        if cell in room.walls:
            return "#"
        if cell in room.boxes:
            return "*" if on_target else "$"
        if cell == room.player:
            return "+" if on_target else "@"
        return "." if on_target else " "

    rows = (range(row * room.width, (row + 1) * room.width) for row in range(room.height))
    return "/".join("".join(map(symbol, row)) for row in rows)


# ----------------------------------------------------------------------------------------------------- moves


@lru_cache
def neighbours(height: int, width: int, direction: str) -> tuple[int | None, ...]:
    """The cell next to each cell. Beyond the last row or column there is None; before the first one wraps to the last,
    as in the reference implementation's array indexing (rooms with walls all around never show it)."""
    rows, columns = DIRECTIONS[direction]

    def ahead(cell: int) -> int | None:
        row, column = cell // width + rows, cell % width + columns
        return None if row >= height or column >= width else (row % height) * width + column % width

    return tuple(ahead(cell) for cell in range(height * width))


def move(room: Room, direction: str) -> Room:
    """Walk, or push the one box ahead; the same room where that is blocked."""
    beside = neighbours(room.height, room.width, direction)
    ahead = beside[room.player]
    behind = None if ahead is None else beside[ahead]
    if ahead is None or behind is None or ahead in room.walls:
        return room
    if ahead not in room.boxes:
        return replace(room, player=ahead)
    if behind in room.walls or behind in room.boxes:
        return room
    return replace(room, player=ahead, boxes=room.boxes - {ahead} | {behind})


def step(state: State, action: str) -> Outcome:
    """One action: -0.1, +1 for a box pushed onto a target, -1 for one pushed off, +10 when all targets are covered.

    Anything but the four directions stands still: -0.1 and nothing else, not even a count.
    """
    if action not in DIRECTIONS:
        return Outcome(state, -0.1, effective=False, won=False)
    room = move(state.room, action)
    change = (room.covered > state.counted) - (room.covered < state.counted)
    after = State(room, counted=room.covered, moves=state.moves + 1)
    reward = -0.1 + change + (10.0 if room.solved else 0.0)
    return Outcome(after, reward, effective=room != state.room, won=room.solved)


# --------------------------------------------------------------------------------------------------- solving


@lru_cache(maxsize=65536)
def solve(room: Room) -> tuple[str, ...] | None:
    """A shortest list of moves that covers all targets; None where there is none (or none among MAX_STATES states).

    Breadth first; of several shortest solutions the one that comes first in the order of DIRECTIONS.
    """
    start = (room.player, room.boxes)
    came_from: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], str] | None] = {start: None}
    queue = deque([start])
    tables = [(name, neighbours(room.height, room.width, name)) for name in DIRECTIONS]
    while queue and len(came_from) <= MAX_STATES:
        here = queue.popleft()
        player, boxes = here
        if room.targets <= boxes:
            return _path(came_from, here)
        for name, beside in tables:
            ahead = beside[player]
            behind = None if ahead is None else beside[ahead]
            if ahead is None or behind is None or ahead in room.walls:
                continue
            there = (ahead, boxes)
            if ahead in boxes:
                if behind in room.walls or behind in boxes:
                    continue
                there = (ahead, boxes - {ahead} | {behind})
            if there not in came_from:
                came_from[there] = (here, name)
                queue.append(there)
    return None


def _path(
    came_from: dict[tuple[int, frozenset[int]], tuple[tuple[int, frozenset[int]], str] | None],
    end: tuple[int, frozenset[int]],
) -> tuple[str, ...]:
    names: list[str] = []
    link = came_from[end]
    while link is not None:
        end, name = link
        names.append(name)
        link = came_from[end]
    return tuple(reversed(names))


def pushes(room: Room, actions: tuple[str, ...]) -> list[tuple[int, str]]:
    """The pushes among some actions: (cell of the box before the push, direction)."""
    found = []
    for action in actions:
        after = move(room, action) if action in DIRECTIONS else room
        if after.boxes != room.boxes:
            found.append((after.player, action))
        room = after
    return found
