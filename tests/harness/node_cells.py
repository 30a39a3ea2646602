"""What the nodes of a test cluster play: real cells and stand-ins. Nodes import it, so no torch here."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.config import CellConfig
from harness.progress import Progress
from harness.runner import Play
from harness.store import CellDir


def load_cells(doomed: str) -> Play:
    """Cells as they are, except that on a doomed node they stop for good when their first update is done."""
    return partial(play_until, doomed)


def play_until(doomed: str, config: CellConfig, cell: CellDir, report: Callable[[Progress], None]) -> None:
    import ray

    from harness.cell import run_cell

    def tell(progress: Progress) -> None:
        report(progress)
        if ray.get_runtime_context().get_node_id() == doomed and (progress.phase, progress.done) == ("train", 1):
            time.sleep(600)

    run_cell(config, cell, tell)


def hold(place: Path) -> None:
    """Hold a cell for good."""
    with CellDir(place).lock():
        time.sleep(600)


def load_stub(trouble: str = "") -> Play:
    return partial(stub, trouble)


def stub(trouble: str, config: CellConfig, cell: CellDir, report: Callable[[Progress], None]) -> None:
    with cell.lock():
        report(Progress(config.title, "train", 0, 1))
        logging.getLogger("harness.stub").warning("something odd")
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble in ("hang", "deaf"):
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                if trouble == "hang":
                    raise
                time.sleep(600)
        time.sleep(1)
        cell.write_json("seen.json", {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "pid": os.getpid()})
