"""Levels by seed: carve a room, set boxes on their targets, and pull them away (so every level can be solved).

The procedure is that of the reference generator (a random walk carves the room; reverse play keeps the position with
the largest displacement of the boxes), the random numbers are our own: a level is a function of (seed, attempt) and of
the options alone, whatever the process, platform or PYTHONHASHSEED.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs_vision.sokoban.rules import DIRECTIONS, MAX_STATES, Room, neighbours, solve
from harness.contracts import HarnessError

VERSION = "levels-1"
ATTEMPTS = 200
TURN = 0.35
"""Chance that the random walk changes its direction."""
BRUSHES = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Shapes that the walk cuts out of the rock, as (row, column) offsets."""


def make_level(seed: int, dim: int, boxes: int, search_depth: int, max_steps: int) -> Room:
    """The level of a seed: unsolved, and solvable in at most ``max_steps`` moves.

    Raises HarnessError where none is found in ATTEMPTS attempts (too many boxes for the room, too few steps).
    """
    for attempt in range(ATTEMPTS):
        rng = np.random.default_rng([seed, attempt])
        room = _furnish(rng, dim, _carve(rng, dim), boxes)
        level = _reverse_play(rng, room, search_depth) if room else None
        solution = solve(level) if level else None
        if level and solution and len(solution) <= max_steps:
            return level
    raise HarnessError(
        f"no Sokoban level with dim={dim}, boxes={boxes}, search_depth={search_depth} that {max_steps} steps solve "
        f"in {ATTEMPTS} attempts (seed {seed}): use fewer boxes, a larger dim or more steps"
    )


def _carve(rng: np.random.Generator, dim: int) -> frozenset[int]:
    """Floor cells: a random walk of 3.4 x dim steps inside the outer wall, cutting a random brush at every step."""
    moves = list(DIRECTIONS.values())
    rows, columns = moves[rng.integers(4)]
    row, column = (int(x) for x in rng.integers(1, dim - 1, size=2))
    floor = set()
    for _ in range(int(3.4 * dim)):
        if rng.random() < TURN:
            rows, columns = moves[rng.integers(4)]
        row, column = min(max(row + rows, 1), dim - 2), min(max(column + columns, 1), dim - 2)
        for down, right in BRUSHES[rng.integers(len(BRUSHES))]:
            if 0 < row + down < dim - 1 and 0 < column + right < dim - 1:
                floor.add((row + down) * dim + column + right)
    return frozenset(floor)


def _furnish(rng: np.random.Generator, dim: int, floor: frozenset[int], boxes: int) -> Room | None:
    """The solved room: player and boxes on distinct floor cells, every box on a target; None where space is short."""
    if len(floor) < boxes + 2:
        return None
    player, *targets = (int(x) for x in rng.permutation(sorted(floor))[: boxes + 1])
    walls = frozenset(range(dim * dim)) - floor
    return Room(dim, dim, walls, frozenset(targets), frozenset(targets), player)


def _reverse_play(rng: np.random.Generator, solved: Room, depth: int) -> Room | None:
    """Walk and pull, depth first in random order, at most ``depth`` deep and MAX_STATES wide; return the position with
    the highest score: displacement of the boxes (rows + columns, summed) times the number of times another box was
    taken up. A position with a box on any target scores 0; None where all do."""
    homes = sorted(solved.targets)
    best, best_score = None, 0
    start = (solved.player, tuple(homes))
    # A stack entry: player, cell of each box, steps taken, box pulled last, changes of the box pulled.
    stack = [(*start, 0, -1, 0)]
    seen = {start}
    tables = [neighbours(solved.height, solved.width, name) for name in DIRECTIONS]
    backwards = {0: 1, 1: 0, 2: 3, 3: 2}
    while stack and len(seen) <= MAX_STATES:
        player, boxes, steps, last, changes = stack.pop()
        if solved.targets.isdisjoint(boxes):
            score = changes * sum(_distance(solved.width, box, home) for box, home in zip(boxes, homes, strict=True))
            if score > best_score:
                best, best_score = (player, boxes), score
        if steps == depth:
            continue
        for direction in rng.permutation(4).tolist():
            ahead, behind = tables[direction][player], tables[backwards[direction]][player]
            if ahead is None or ahead in solved.walls or ahead in boxes:
                continue
            successors = [((ahead, boxes), last, changes)]
            if behind in boxes:
                pulled = boxes.index(behind)
                moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                successors.append(((ahead, moved), pulled, changes + (pulled != last)))
            for position, box, count in successors:
                if position not in seen:
                    seen.add(position)
                    stack.append((*position, steps + 1, box, count))
    if best is None:
        return None
    player, boxes = best
    beside = [table[player] for table in tables]
    free = [cell for cell in beside if cell is not None and cell not in solved.walls and cell not in boxes]
    return replace(solved, player=free[rng.integers(len(free))] if free else player, boxes=frozenset(boxes))


def _distance(width: int, a: int, b: int) -> int:
    return abs(a // width - b // width) + abs(a % width - b % width)
