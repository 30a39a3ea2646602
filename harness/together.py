"""Running cells in all processes that a launcher started: ``accelerate launch -m harness run RECIPE``.

The processes share one cell after another (:mod:`harness.world`). The first one shows the progress and writes. A cell
that fails ends the run, because the other processes cannot know: the same command goes on where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from harness.config import CellConfig
from harness.progress import Board, Progress
from harness.runner import Failure, Play, attempt, cost, notes_to
from harness.store import cell_dir
from harness.world import World


def run_together(
    cells: Sequence[CellConfig],
    directory: Path,
    load: Callable[[], Play],
    finished: int,
    console: Console,
    world: World,
) -> Failure | None:
    """Run cells one after another, the costliest first, every process its share; returns this process's failure."""
    with Board({cell.hash: cell.title for cell in cells}, finished, console) as board:
        for cell in sorted(cells, key=cost, reverse=True):

            def show(progress: Progress, name: str = cell.hash) -> None:
                if world.main:
                    board.show(name, progress)

            with notes_to(lambda note, name=cell.hash: board.note(name, note.text)):  # type: ignore[misc]
                failure = attempt(load, cell, cell_dir(directory, cell), show)
            board.end(cell.hash, *([failure.cause] if failure else []))
            if failure:
                who = f"process {world.rank} of {world.size}"
                print(f"failed ({who}): {failure.title}: {failure.cause}", file=sys.stderr, flush=True)
                return failure
    return None
