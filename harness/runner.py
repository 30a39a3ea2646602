"""Runs the missing cells of a recipe in worker processes.

Workers live for many cells, because importing torch costs seconds, and speak through one pipe each, so that a worker
that is killed takes down its cell and nothing else. A cell that fails leaves the others running.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import yaml
from rich.console import Console

from harness.config import CellConfig, Recipe
from harness.contracts import HarnessError
from harness.processes import follow_parent
from harness.progress import Board, Progress
from harness.provenance import cores
from harness.recipes import expand
from harness.store import CellDir, cell_dir, check_writable, write_bytes

Play = Callable[[CellConfig, CellDir, Callable[[Progress], None]], None]


@dataclass(frozen=True)
class Note:
    """A warning that a cell logged."""

    text: str


@dataclass(frozen=True)
class Failure:
    """A cell that did not finish: its one-line cause, and whether the user can mend it."""

    title: str
    cause: str
    user_error: bool


def run(recipe: Recipe, directory: Path, jobs: int | None, console: Console) -> int:
    """Run what is missing of a recipe, then write the report and print the comparison table.

    Returns the exit code: 0 if every cell is finished, 2 if all that failed are the user's to mend, else 1.
    """
    cells = expand(recipe)
    missing = [cell for cell in cells if not cell_dir(directory, cell).finished]
    if missing:
        check_writable(directory)
        write_bytes(directory / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).encode())
    console.print(f"recipe {recipe.name}: {len(cells)} cells, {len(cells) - len(missing)} finished, in {directory}")
    failures = run_cells(missing, directory, jobs or cores(), len(cells) - len(missing), console)
    if len(failures) < len(cells):
        _report(directory, console, fresh=bool(missing))
    for failure in failures:
        console.print(f"failed: {failure.title}: {failure.cause}", style="red", markup=False, soft_wrap=True)
    if not failures:
        return 0
    return 2 if all(failure.user_error for failure in failures) else 1


def _report(directory: Path, console: Console, fresh: bool) -> None:
    from harness.reporting.report import comparison_text, write_report

    page = directory / "report.html"
    if fresh or not page.is_file():
        page = write_report(directory)
    console.print(comparison_text(directory))
    console.print(f"report: {page}", soft_wrap=True)


def run_cells(
    cells: Sequence[CellConfig], directory: Path, jobs: int, finished: int, console: Console
) -> list[Failure]:
    """Run cells, the costliest first, ``jobs`` at a time; returns those that failed.

    On Ctrl-C the workers are ended; what they had checkpointed is where the next run goes on.
    """
    if not cells:
        return []
    waiting = sorted(cells, key=cost, reverse=True)
    failures: list[Failure] = []
    workers: dict[Connection, _Worker] = {}
    with Board({cell.hash: cell.title for cell in cells}, finished, console) as board:
        try:
            while waiting or workers:
                while waiting and len(workers) < jobs:
                    worker = _Worker(directory)
                    workers[worker.pipe] = worker
                    worker.start(waiting.pop(0))
                for pipe in wait(list(workers)):
                    worker = workers[pipe]  # type: ignore[index]
                    match worker.receive():
                        case Progress() as progress:
                            board.show(worker.cell.hash, progress)
                            continue
                        case Note(text):
                            board.note(worker.cell.hash, text)
                            continue
                        case Failure() as failure:
                            board.end(worker.cell.hash, failure.cause)
                            failures.append(failure)
                        case None:
                            board.end(worker.cell.hash)
                    if worker.alive and waiting:
                        worker.start(waiting.pop(0))
                    else:
                        worker.stop()
                        del workers[worker.pipe]
        finally:
            for worker in workers.values():
                worker.process.terminate()
            for worker in workers.values():
                worker.kill()
    return failures


def cost(cell: CellConfig) -> float:
    """Rough number of environment steps a cell plays: what decides the order, nothing else."""
    steps = cell.env.max_steps or 1
    if cell.train is None:
        return float(steps)
    episodes = cell.train.updates * cell.train.tasks * cell.train.group
    if cell.stage1:
        episodes += cell.stage1.tasks * cell.stage1.attempts
    writes_skills = cell.method is not None and cell.method.writes_skills
    return float(episodes * steps * (1.5 if writes_skills else 1.0))


# ------------------------------------------------------------------------------------------------- workers


class _Worker:
    """A process that runs one cell after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        # Not a daemon: it has environment workers of its own.
        self.process: SpawnProcess = context.Process(target=_serve, args=(other, load_play), daemon=False)
        self.process.start()
        other.close()
        self.cell: CellConfig
        self.alive = True

    def start(self, cell: CellConfig) -> None:
        self.cell = cell
        self.pipe.send((cell.model_dump_json(), str(cell_dir(self.directory, cell).path)))

    def receive(self) -> Progress | Note | Failure | None:
        """The next message: progress, a warning, a failure, or None when the cell is finished."""
        try:
            message: Progress | Note | Failure | None = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.alive = False
            code = self.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Failure(self.cell.title, f"its process ended with {how} (out of memory?)", user_error=False)
        return message

    def stop(self) -> None:
        """Let an idle worker end."""
        if self.alive:
            self.pipe.send(None)
        self.process.join()
        self.pipe.close()

    def kill(self) -> None:
        """End a worker that was told to terminate: it may close its environments first, but not for long."""
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, load: Callable[[], Play]) -> None:
    """Main function of a worker: run the cells that arrive until None does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    follow_parent()
    logging.getLogger("harness").addHandler(_Notes(pipe))
    while (job := pipe.recv()) is not None:
        cell = CellConfig.model_validate_json(job[0])
        pipe.send(attempt(load, cell, CellDir(Path(job[1])), pipe.send))


class _Notes(logging.Handler):
    """Sends warnings to the parent, which owns the terminal."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send(Note(record.getMessage()))


def attempt(
    load: Callable[[], Play], cell: CellConfig, place: CellDir, report: Callable[[Progress], None]
) -> Failure | None:
    """Run one cell; a failure is returned, not raised. The traceback of a crash goes to the cell's ``error.txt``."""
    details = place.path / "error.txt"
    try:
        load()(cell, place, report)
        details.unlink(missing_ok=True)
    except HarnessError as error:
        return Failure(cell.title, str(error), user_error=True)
    except Exception as error:  # whatever a cell does, the other cells go on
        with suppress(HarnessError):
            write_bytes(details, traceback.format_exc().encode())
        return Failure(cell.title, f"{type(error).__name__}: {first_line(error)} (see {details})", user_error=False)
    return None


def load_play() -> Play:
    """The function that plays and trains a cell; loading it loads torch."""
    from harness.cell import run_cell

    return run_cell


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(error).splitlines() or [""])[0]
