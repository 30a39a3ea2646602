"""Runs the missing cells of a recipe in worker processes, here or (:mod:`harness.cluster`) on a Ray cluster.

Workers live for many cells, because importing torch costs seconds, and speak through one pipe each, so that a worker
that is killed takes down its cell and nothing else. A cell that fails leaves the others running.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import yaml
from rich.console import Console

from harness.config import CellConfig, Recipe
from harness.contracts import HarnessError
from harness.inert import visible
from harness.policy.api import USUAL, Calls
from harness.processes import follow_parent
from harness.progress import Board, Progress
from harness.provenance import cores
from harness.recipes import expand
from harness.store import CellDir, cell_dir, check_writable, write_bytes
from harness.world import World, current_world

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


Event = Progress | Note | Failure | None
"""What is heard of a cell. Its last event is a failure, or None where it is finished."""

Place = Callable[[Sequence[CellConfig]], Generator[tuple[CellConfig, Event]]]
"""Somewhere cells run: takes them, starts them in this order and yields what is heard of them until all have ended.

To close the generator is to end what still runs; it has been checkpointed, and the next run goes on from there.
"""


def run(
    recipe: Recipe,
    directory: Path,
    jobs: int | None,
    console: Console,
    calls: Calls = USUAL,
    cluster: bool = False,
) -> int:
    """Run what is missing of a recipe, then write the report and print the comparison table.

    Args:
        jobs: Cells run at once; None: as many as there are cores here, or as fit into the cluster.
        calls: How endpoints that annotate are called.
        cluster: Whether cells run on a Ray cluster instead of this machine.

    Returns the exit code: 0 if every cell is finished, 2 if all that failed are the user's to mend, else 1.
    """
    world, load = current_world(), partial(load_play, calls)
    if recipe.engine.kind != "local":
        from harness.policy.engines import check_engine

        check_engine(world.size)
    console.quiet = console.quiet or not world.main
    cells = expand(recipe)
    missing = world.once(lambda: [cell for cell in cells if not cell_dir(directory, cell).finished])
    if world.main:
        for cell in cells:
            cell_dir(directory, cell).tidy()
    if missing and world.main:
        check_writable(directory)
        write_bytes(directory / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).encode())
    console.print(f"recipe {recipe.name}: {len(cells)} cells, {len(cells) - len(missing)} finished, in {directory}")
    if world.size > 1:
        return _run_together(missing, directory, load, len(cells) - len(missing), console, world)
    if cluster:
        from harness.cluster import on_ray  # what it imports is an extra

        place = on_ray(recipe.needs, directory, jobs, console, load)
    else:
        place = here(directory, jobs or cores(), load)
    failures = run_cells(missing, place, len(cells) - len(missing), console)
    if len(failures) < len(cells):
        _report(directory, console, fresh=bool(missing))
    for failure in failures:
        console.print(f"failed: {failure.title}: {failure.cause}", style="red", markup=False, soft_wrap=True)
    if not failures:
        return 0
    return 2 if all(failure.user_error for failure in failures) else 1


def require_one_way(recipe: Recipe, jobs: int | None, cluster: bool) -> None:
    """Raise HarnessError where cells cannot be spread as they are asked to be."""
    if current_world().size > 1 and (cluster or jobs):
        option = "--cluster" if cluster else "--jobs"
        raise HarnessError(f"{option} spreads whole cells and accelerate launch shares one: use either, not both")
    if cluster and recipe.needs.gpus > 1 and recipe.engine.kind == "local":
        one = "one process trains a cell under --cluster, and uses one GPU"
        raise HarnessError(f"needs.gpus={recipe.needs.gpus:g}: {one}; say needs.gpus=1, or use accelerate launch")


def _run_together(
    missing: Sequence[CellConfig],
    directory: Path,
    load: Callable[[], Play],
    finished: int,
    console: Console,
    world: World,
) -> int:
    from harness.together import run_together

    failure = run_together(missing, directory, load, finished, console, world)
    if failure:
        return 2 if failure.user_error else 1
    if world.main:
        _report(directory, console, fresh=bool(missing))
    world.leave()
    return 0


def _report(directory: Path, console: Console, fresh: bool) -> None:
    from harness.reporting.report import comparison_text, write_report

    page = directory / "report.html"
    if fresh or not _is_current(page):
        page = write_report(directory)
    console.print(comparison_text(directory))
    console.print(f"report: {page}", soft_wrap=True)


def _is_current(page: Path) -> bool:
    """Whether a report is there and no cell was finished after it was written."""
    written = page.stat().st_mtime_ns if page.is_file() else 0
    return all(path.stat().st_mtime_ns <= written for path in page.parent.glob("cells/*/manifest.json"))


def run_cells(cells: Sequence[CellConfig], place: Place, finished: int, console: Console) -> list[Failure]:
    """Run cells, the costliest first; returns those that failed. On Ctrl-C what still runs is ended."""
    if not cells:
        return []
    failures: list[Failure] = []
    with (
        Board({cell.hash: cell.title for cell in cells}, finished, console) as board,
        closing(place(sorted(cells, key=cost, reverse=True))) as events,
    ):
        for cell, event in events:
            match event:
                case Progress():
                    board.show(cell.hash, event)
                case Note(text):
                    board.note(cell.hash, text)
                case Failure():
                    board.end(cell.hash, event.cause)
                    failures.append(event)
                case None:
                    board.end(cell.hash)
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


def here(directory: Path, jobs: int, load: Callable[[], Play]) -> Place:
    """This machine: ``jobs`` worker processes."""
    return partial(_play_here, directory, jobs, load)


def _play_here(
    directory: Path, jobs: int, load: Callable[[], Play], cells: Sequence[CellConfig]
) -> Generator[tuple[CellConfig, Event]]:
    waiting = list(cells)
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = _Worker(directory, load)
                workers[worker.pipe] = worker
                worker.start(waiting.pop(0))
            for pipe in wait(list(workers)):
                worker = workers[pipe]  # type: ignore[index]
                event = worker.receive()
                yield worker.cell, event
                if isinstance(event, Progress | Note):
                    continue
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


class _Worker:
    """A process that runs one cell after another."""

    def __init__(self, directory: Path, load: Callable[[], Play]) -> None:
        self.directory = directory
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        # Not a daemon: it has environment workers of its own.
        self.process: SpawnProcess = context.Process(target=_serve, args=(other, load), daemon=False)
        self.process.start()
        other.close()
        self.cell: CellConfig
        self.alive = True

    def start(self, cell: CellConfig) -> None:
        self.cell = cell
        self.pipe.send((cell.model_dump_json(), str(cell_dir(self.directory, cell).path)))

    def receive(self) -> Event:
        """What the worker says next."""
        try:
            message: Event = self.pipe.recv()
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
    with notes_to(pipe.send):
        while (job := pipe.recv()) is not None:
            cell = CellConfig.model_validate_json(job[0])
            pipe.send(attempt(load, cell, CellDir(Path(job[1])), pipe.send))


class _Notes(logging.Handler):
    """Sends warnings to whoever owns the terminal."""

    def __init__(self, send: Callable[[Note], None]) -> None:
        super().__init__(logging.WARNING)
        self.send = send

    def emit(self, record: logging.LogRecord) -> None:
        self.send(Note(record.getMessage()))


@contextmanager
def notes_to(send: Callable[[Note], None]) -> Iterator[None]:
    """Send what the harness logs as a warning."""
    handler, logger = _Notes(send), logging.getLogger("harness")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def attempt(
    load: Callable[[], Play], cell: CellConfig, place: CellDir, report: Callable[[Progress], None]
) -> Failure | None:
    """Run one cell; a failure is returned, not raised. The traceback of a crash goes to the cell's ``error.txt``."""
    details = place.path / "error.txt"
    try:
        load()(cell, place, report)
        details.unlink(missing_ok=True)
    except HarnessError as error:
        if notes := getattr(error, "__notes__", []):
            with suppress(HarnessError):
                write_bytes(details, visible("\n".join(notes)).encode())
        return Failure(cell.title, f"{error} (see {details})" if notes else str(error), user_error=True)
    except Exception as error:  # whatever a cell does, the other cells go on
        with suppress(HarnessError):
            write_bytes(details, visible(traceback.format_exc()).encode())
        return Failure(cell.title, f"{type(error).__name__}: {first_line(error)} (see {details})", user_error=False)
    return None


def load_play(calls: Calls = USUAL) -> Play:
    """The function that plays and trains a cell; loading it loads torch."""
    from harness.cell import run_cell

    return partial(run_cell, calls=calls)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(error).splitlines() or [""])[0]
