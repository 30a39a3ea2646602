"""Cells on a Ray cluster: one task each, placed where the CPUs and GPUs are that the recipe says a cell needs.

A cell whose node or process is lost goes on elsewhere from its last checkpoint. What is heard of the cells travels
through an actor beside the driver; results lie in the run's directory, which all nodes must see.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.claim import end_claim
from harness.config import CellConfig, Needs
from harness.contracts import HarnessError
from harness.nodes import Home, home, unfit
from harness.progress import Progress
from harness.provenance import cores
from harness.runner import Event, Failure, Note, Place, Play, attempt, first_line, notes_to
from harness.store import cell_dir
from harness.validation import require_extra

POLL = 0.5
"""Seconds between two looks at what the cells say."""
TRIES = 3
"""How often a cell is started whose node or process is lost."""
PATIENCE = 60.0
"""Seconds to wait for nodes: to answer at the start, or to come back when no node is left that has room."""
FAREWELL = 5.0
"""Seconds that cells have to close their environments when the run is ended, and to be gone when they did not."""
OBJECT_STORE = 80 * 2**20
"""Bytes of shared memory of a Ray started here. Almost nothing passes through it; Ray wants at least 75 MiB."""


def on_ray(needs: Needs, directory: Path, jobs: int | None, console: Console, load: Callable[[], Play]) -> Place:
    """The Ray cluster that RAY_ADDRESS names, or else one that is started on this machine and ends with the run."""
    return partial(_play_on_ray, needs, directory.resolve(), jobs, console, load)


def _play_on_ray(
    needs: Needs,
    directory: Path,
    jobs: int | None,
    console: Console,
    load: Callable[[], Play],
    cells: Sequence[CellConfig],
) -> Generator[tuple[CellConfig, Event]]:
    with _connected(console) as ray, home(directory, {cell.env.id for cell in cells}) as origin:
        nodes = _require_room(ray, needs)
        _require_fit(ray, nodes, origin)
        limit = f", at most {jobs} by --jobs" if jobs else ""
        console.print(f"Ray: room for {sum(nodes.values())} cells at once{limit}, on {_counted(len(nodes), 'node')}")
        yield from _Run(ray, needs, jobs, _Job(load, directory, origin, needs.gpus > 0)).play(cells)


# ------------------------------------------------------------------------------------------------- driver


@dataclass(frozen=True)
class _Try:
    """One start of a cell, the ``number``-th."""

    cell: CellConfig
    number: int = 1


class _Run:
    """Cells in progress on a cluster."""

    def __init__(self, ray: Any, needs: Needs, jobs: int | None, job: _Job) -> None:
        self.ray, self.needs, self.jobs, self.job = ray, needs, jobs, job
        self.task = ray.remote(num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=0)(_play)
        own_node = ray.get_runtime_context().get_node_id()
        self.mailbox = ray.remote(num_cpus=0, scheduling_strategy=_on(own_node))(Mailbox).remote()
        self.running: dict[Any, _Try] = {}
        self.had_room = time.monotonic()

    def play(self, cells: Sequence[CellConfig]) -> Generator[tuple[CellConfig, Event]]:
        waiting = [_Try(cell) for cell in cells]
        try:
            while waiting or self.running:
                room = self._room()
                while waiting and len(self.running) < room:
                    one = waiting.pop(0)
                    sender = (one.cell.hash, one.number)
                    task = self.task.remote(self.job, one.cell.model_dump_json(), one.number > 1, self.mailbox, sender)
                    self.running[task] = one
                ended = self._ended()
                yield from self._heard()  # all that the ended ones have said is there by now
                for task in ended:
                    one, (outcome, lost) = self.running.pop(task), self._outcome(task)
                    if lost and one.number < TRIES:
                        again = f"it goes on from its last checkpoint, try {one.number + 1} of {TRIES}"
                        yield one.cell, Note(f"{lost}; {again}")
                        waiting.insert(0, replace(one, number=one.number + 1))
                    elif lost:
                        yield one.cell, Failure(one.cell.title, f"{lost}, as in {TRIES - 1} tries before", False)
                    else:
                        yield one.cell, outcome
        finally:
            self._end()

    def _room(self) -> int:
        """How many cells may run at once, now. Raises HarnessError where no node has had room for long."""
        room = sum(capacity(self.ray.nodes(), self.needs).values())
        if room:
            self.had_room = time.monotonic()
        elif time.monotonic() - self.had_room > PATIENCE:
            wanted = _words(self.needs.cpus, self.needs.gpus)
            raise HarnessError(f"no node is left that has {wanted}; the same command goes on from here")
        return min(room, self.jobs or room)

    def _ended(self) -> list[Any]:
        if not self.running:
            time.sleep(POLL)
            return []
        ended: list[Any] = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=POLL)[0]
        return ended

    def _heard(self) -> Iterator[tuple[CellConfig, Event]]:
        """What running cells have said. Tries that were given up are not listened to, should they live on."""
        speaking = {(one.cell.hash, one.number): one.cell for one in self.running.values()}
        for sender, message in self.ray.get(self.mailbox.take.remote()):
            if sender in speaking:
                yield speaking[sender], message

    def _outcome(self, task: Any) -> tuple[Failure | None, str]:
        """How a task ended: the cell's failure if it has one, and what was lost if it could not end."""
        from ray import exceptions

        try:
            return self.ray.get(task), ""
        except exceptions.NodeDiedError:
            return None, "its node was lost"
        except exceptions.OutOfMemoryError:
            return None, "its node ran out of memory, and Ray ended it"
        except exceptions.WorkerCrashedError:
            return None, "its process died (out of memory?)"
        except exceptions.RayTaskError:
            raise  # a bug of this module
        except exceptions.RayError as error:
            return None, f"Ray lost it ({first_line(error)})"

    def _end(self) -> None:
        """End what still runs, politely, then not; what has ended holds its cell no more."""
        left = list(self.running)
        for force in (False, True):
            for task in left:
                self.ray.cancel(task, force=force)
            left = self.ray.wait(left, num_returns=len(left), timeout=FAREWELL)[1] if left else []


def capacity(nodes: Sequence[Mapping[str, Any]], needs: Needs) -> dict[str, int]:
    """How many cells fit at once on each node that has room for one, were it empty; ``nodes`` as Ray tells them."""
    found = {}
    for node in nodes:
        has = node["Resources"] if node["Alive"] else {}
        fit = int(has.get("CPU", 0) / needs.cpus + 1e-9)
        if needs.gpus:
            whole = max(1.0, needs.gpus)  # several cells share a GPU, or one cell has several: none has parts of two
            fit = min(fit, int(has.get("GPU", 0) / whole + 1e-9) * int(whole / needs.gpus + 1e-9))
        if fit:
            found[node["NodeID"]] = fit
    return found


def _require_room(ray: Any, needs: Needs) -> dict[str, int]:
    """The nodes with room for a cell, and for how many. Raises HarnessError where there is none."""
    nodes = ray.nodes()
    if found := capacity(nodes, needs):
        return found
    gpus, cpus = max((has.get("GPU", 0), has.get("CPU", 0)) for node in nodes if (has := node["Resources"]))
    wanted = _words(needs.cpus, needs.gpus)
    raise HarnessError(f"a cell needs {wanted} (needs.cpus, needs.gpus), but the largest node has {_words(cpus, gpus)}")


def _require_fit(ray: Any, nodes: Mapping[str, int], origin: Home) -> None:
    """Raise HarnessError where a node does not see the run's directory or has other code; all are asked at once."""
    ask = ray.remote(num_cpus=0, max_retries=0)(unfit)
    asked = [ask.options(scheduling_strategy=_on(node)).remote(origin) for node in nodes]
    answered, silent = ray.wait(asked, num_returns=len(asked), timeout=PATIENCE)
    reasons = [reason for answer in answered if (reason := ray.get(answer))]
    if silent:
        reasons.append(f"{_counted(len(silent), 'node')} did not answer within {PATIENCE:.0f} s")
    if reasons:
        raise HarnessError("; ".join(dict.fromkeys(reasons)))


@contextmanager
def _connected(console: Console) -> Iterator[Any]:
    """Ray, connected. Raises HarnessError where it is not installed or no cluster answers."""
    address = os.environ.get("RAY_ADDRESS", "")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address and "RAY_AUTH_MODE" not in os.environ:
        # Ray listens on every network interface and runs what it is sent: let it obey this run alone.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    require_extra("--cluster ray", "ray", "cluster")
    import ray

    if address:
        _require_answer(address)
        settings: dict[str, Any] = {"address": address}
    else:
        settings = {"address": "local", "num_cpus": cores(), "object_store_memory": OBJECT_STORE}
        settings["include_dashboard"] = False
    before = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(log_to_driver=False, logging_level="ERROR", **settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise HarnessError(f"cannot join Ray at {address or 'this machine'}: {first_line(error)}") from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put its own handler there
        where = context.address_info["gcs_address"]
        started = "" if address else ", started on this machine for this run, because RAY_ADDRESS names none"
        console.print(f"Ray: cluster {where}{started}", soft_wrap=True)
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise HarnessError unless something listens there: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise HarnessError(f"RAY_ADDRESS must be auto or HOST:PORT of a cluster's head, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise HarnessError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error.strerror or error}") from error


def _on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _words(cpus: float, gpus: float) -> str:
    return _counted(cpus, "CPU") + (f" and {_counted(gpus, 'GPU')}" if gpus else "")


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


# -------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True)
class _Job:
    """What all cells of a run share."""

    load: Callable[[], Play]
    directory: Path
    origin: Home
    gpu: bool


class Mailbox:
    """What the cells have said since it was last taken; an actor."""

    def __init__(self) -> None:
        self.messages: list[tuple[tuple[str, int], Progress | Note]] = []

    def put(self, sender: tuple[str, int], message: Progress | Note) -> None:
        self.messages.append((sender, message))

    def take(self) -> list[tuple[tuple[str, int], Progress | Note]]:
        taken, self.messages = self.messages, []
        return taken

    def flush(self) -> None:
        """Returns when everything that its caller put before has arrived."""


def _play(job: _Job, config: str, lost: bool, mailbox: Any, sender: tuple[str, int]) -> Failure | None:
    """Run one cell on a node; ``lost``: take it over from where it ran before."""
    import ray

    cell = CellConfig.model_validate_json(config)
    if reason := unfit(job.origin):
        return Failure(cell.title, reason, user_error=True)
    os.environ |= job.origin.settings
    if not job.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where a cell asks for GPUs, Ray shows it these and no other
    place = cell_dir(job.directory, cell)
    if lost:
        end_claim(place.path)

    def send(message: Progress | Note) -> None:
        mailbox.put.remote(sender, message)

    with notes_to(send):
        outcome = attempt(job.load, cell, place, send)
    ray.get(mailbox.flush.remote())
    return outcome
