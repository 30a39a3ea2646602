"""Environments step in worker processes; a crash costs the one episode that caused it, never the run."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import math
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np

from harness.contracts import AgentEnv, Image, Observation, Task
from harness.processes import follow_parent, resident
from harness.registry import make_env

log = logging.getLogger(__name__)

NOTHING: Observation = {"text": "", "images": ()}
GIB = 2**30
PATIENCE = 5.0
"""Seconds that workers have to close their environments."""


@dataclass(frozen=True)
class State:
    """What an environment returned for one reset or step.

    Attributes:
        expert: The scripted expert's next action, where the pool was asked for it and the episode goes on.
        error: Not empty when the environment raised or its worker died: one line that says what happened.
        traceback: With an error: where the environment was, as far as that is known.
    """

    observation: Observation = field(default_factory=lambda: NOTHING)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    success: bool = False
    score: float = 0.0
    admissible: tuple[str, ...] = ()
    expert: str = ""
    error: str = ""
    traceback: str = ""


def _observe(env: AgentEnv, result: tuple[Any, ...], want_expert: bool) -> State:
    """Pack what ``reset`` (2 values) or ``step`` (5 values) returned."""
    observation, info = result[0], result[-1]
    reward, terminated, truncated = result[1:4] if len(result) == 5 else (0.0, False, False)
    over = terminated or truncated
    for name, value in (("reward", reward), ("score", info["score"])):
        if not math.isfinite(value):
            raise ValueError(f"the environment's {name} is {value}")
    return State(
        observation=observation,
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        valid=bool(info["valid"]),
        success=bool(info["success"]),
        score=float(info["score"]),
        admissible=tuple(info["admissible"]),
        expert=env.oracle() if want_expert and not over else "",
    )


class _ImageSender:
    """Replaces pictures that the other side has already seen by their digest: equal states travel once."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()

    def pack(self, state: State) -> tuple[State, list[tuple[bytes, Image | None]]]:
        packed: list[tuple[bytes, Image | None]] = []
        for image in state.observation["images"]:
            key = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() + bytes(
                str(image.shape), "ascii"
            )
            packed.append((key, None if key in self.sent else image))
            self.sent.add(key)
        return replace(state, observation={"text": state.observation["text"], "images": ()}), packed


def _worker(
    pipe: Connection, trail: Connection, busy: Any, env_id: str, options: Mapping[str, Any], want_expert: bool
) -> None:
    """Serve resets and steps until the pipe closes.

    ``busy`` names the slot being worked on, so that a crash can be blamed. Into ``trail`` goes the stack of a worker
    that a signal ends, and of one that hangs, where SIGUSR1 asks for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    follow_parent()
    faulthandler.enable(trail.fileno())
    faulthandler.register(signal.SIGUSR1, trail.fileno())
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    envs: dict[int, AgentEnv] = {}
    sender = _ImageSender()
    try:
        while True:
            command, jobs = pipe.recv()
            if command == "forget":
                sender = _ImageSender()
                continue
            if command == "step" and envs:
                next(iter(envs.values())).foresee([action for _, action in jobs])
            for slot, payload in jobs:
                busy.value = slot
                try:
                    if command == "reset":
                        if slot not in envs:
                            envs[slot] = make_env(env_id, options)
                        state = _observe(envs[slot], envs[slot].reset(options={"task": payload}), want_expert)
                    else:
                        state = _observe(envs[slot], envs[slot].step(payload), want_expert)
                except Exception as error:  # any third-party environment may fail in any way: the episode records it
                    envs.pop(slot, None)
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    text = " ".join(f"{type(error).__name__}: {error}".split())
                    state = State(error=f"{text} ({where.filename}:{where.lineno})", traceback=traceback.format_exc())
                busy.value = -1
                pipe.send((slot, *sender.pack(state)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    finally:
        for env in envs.values():
            env.close()


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    trail: Connection
    busy: Any
    size: int = 0
    """Resident bytes when it had first answered everything it was asked; 0 before that."""
    images: dict[bytes, Image] = field(default_factory=dict)


class EnvPool:
    """A pool of environment slots, spread over worker processes.

    Slot s lives in worker ``s % workers``; which worker that is changes no result. If a worker dies or does not
    answer within ``timeout`` seconds, the slot it was working on gets an error and every other slot of that worker is
    rebuilt by replaying its actions. A worker that has grown by more than ``memory`` bytes is replaced between two
    steps in the same way, at the cost of no episode.

    Attributes:
        recycled: Workers replaced because they had grown.
        restarted: Workers replaced because they had died or hung.
    """

    def __init__(
        self,
        env_id: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        want_expert: bool = False,
        timeout: float = 120.0,
        memory: int = 4 * GIB,
    ) -> None:
        self.recycled = self.restarted = 0
        self._args = (env_id, dict(options or {}), want_expert)
        self._timeout, self._memory = timeout, memory
        self._context = mp.get_context("spawn")
        self._log: dict[int, tuple[Task, list[str]]] = {}
        self._workers = [self._start() for _ in range(workers)]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        trail, written = self._context.Pipe(duplex=False)
        busy = self._context.Value("q", -1, lock=False)
        process = self._context.Process(target=_worker, args=(theirs, written, busy, *self._args), daemon=True)
        process.start()
        theirs.close()
        written.close()
        return _Worker(process, ours, trail, busy)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, State]:
        """Start a task in each given slot."""
        for slot, task in tasks.items():
            self._log[slot] = (task, [])
        return self._call("reset", tasks)

    def step(self, actions: Mapping[int, str]) -> dict[int, State]:
        """Take one action in each given slot."""
        for slot, action in actions.items():
            if slot in self._log:  # if not, it was lost in a replay, and its worker answers with an error
                self._log[slot][1].append(action)
        return self._call("step", actions)

    def forget_images(self) -> None:
        """Drop remembered pictures on both sides (between rollouts, so that memory stays flat)."""
        for worker in self._workers:
            worker.images.clear()
            with suppress(BrokenPipeError, ConnectionResetError):  # dead; the next call starts it again
                worker.pipe.send(("forget", []))

    def _call(self, command: str, payloads: Mapping[int, Any]) -> dict[int, State]:
        groups: dict[int, list[tuple[int, Any]]] = {}
        for slot in sorted(payloads):
            groups.setdefault(slot % len(self._workers), []).append((slot, payloads[slot]))
        lost: dict[int, list[tuple[int, Any]]] = {}
        for index, jobs in groups.items():
            try:
                self._workers[index].pipe.send((command, jobs))
            except (BrokenPipeError, ConnectionResetError):
                lost[index] = jobs
        states: dict[int, State] = {}
        for index, jobs in groups.items():
            if index not in lost:
                states |= self._receive(index, [slot for slot, _ in jobs])
            states |= self._recover(index, [slot for slot, _ in jobs if slot not in states])
            self._limit(index)
        return states

    def _receive(self, index: int, slots: Sequence[int]) -> dict[int, State]:
        """Answers of one worker; fewer than asked for when it dies or hangs."""
        worker, states = self._workers[index], {}
        for _ in slots:
            try:
                if not worker.pipe.poll(self._timeout):
                    break
                slot, state, images = worker.pipe.recv()
            except (EOFError, OSError):
                break
            for key, image in images:
                if image is not None:
                    worker.images[key] = image
            shown = tuple(worker.images[key] for key, _ in images)
            states[slot] = replace(state, observation={"text": state.observation["text"], "images": shown})
        return states

    def _recover(self, index: int, missing: Sequence[int]) -> dict[int, State]:
        """Restart a dead worker: the slot it was busy with gets an error, the others are replayed to where they were.

        A slot that kills the worker again in its replay gets an error too, and the replay begins anew without it.
        """
        states: dict[int, State] = {}
        culprit: int | None = int(self._workers[index].busy.value) if missing else None
        while culprit is not None:
            error, trail = self._post_mortem(index)
            self._restart(index)
            self.restarted += 1
            if self._log.pop(culprit, None):  # nobody is to blame for a worker that died idle
                states[culprit] = State(error=error, traceback=trail)
            culprit = None
            for slot in [s for s in sorted(self._log) if s % len(self._workers) == index]:
                state = self._replay(index, slot)
                if state is None:
                    culprit = slot
                    break
                states[slot] = state
        lost = State(error="environment worker died while another episode was replayed")
        return {slot: states.get(slot, lost) for slot in missing}

    def _post_mortem(self, index: int) -> tuple[str, str]:
        """What became of a worker that does not answer, in one line, and its stack where it left or leaves one."""
        worker = self._workers[index]
        worker.process.join(0.1)  # the end of its pipe is seen before the end of the process
        code = worker.process.exitcode
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
        stack = b""
        with suppress(EOFError, OSError):
            while worker.trail.poll(0.5) and (block := os.read(worker.trail.fileno(), 2**16)):
                stack += block
        how = f"hung for {self._timeout:g} s" if code is None else f"died ({_ending(code)})"
        return f"environment worker {how}", stack.decode(errors="replace")

    def _restart(self, index: int) -> None:
        """Replace a worker by a fresh one."""
        old = self._workers[index]
        old.process.kill()
        old.process.join(PATIENCE)
        old.pipe.close()
        old.trail.close()
        self._workers[index] = self._start()

    def _limit(self, index: int) -> None:
        """Replace a worker that has grown too much; its slots go on where they were."""
        worker = self._workers[index]
        size = resident(worker.process.pid)
        worker.size = worker.size or size
        if size - worker.size <= self._memory:
            return
        grown = (size - worker.size) / GIB
        log.warning("environment worker replaced: it had grown by %.1f GiB; its episodes go on", grown)
        self.recycled += 1
        self._restart(index)
        for slot in [s for s in sorted(self._log) if s % len(self._workers) == index]:
            if self._replay(index, slot) is None:
                return  # it died or hangs; the next call finds that out and deals with it
        self._workers[index].size = resident(self._workers[index].process.pid)

    def _replay(self, index: int, slot: int) -> State | None:
        """Bring a slot to where it was; None where its worker dies or hangs over it."""
        task, actions = self._log[slot]
        state = State()
        for command, payload in [("reset", task), *(("step", action) for action in actions)]:
            try:
                self._workers[index].pipe.send((command, [(slot, payload)]))
            except (BrokenPipeError, ConnectionResetError):
                return None
            answer = self._receive(index, [slot])
            if slot not in answer:
                return None
            state = answer[slot]
        return state

    def release(self, slot: int) -> None:
        """The slot's episode is over: nothing to replay any more."""
        self._log.pop(slot, None)

    def close(self) -> None:
        """End all workers: they see their pipes close. Those that still run after a few seconds are killed."""
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(PATIENCE)
            worker.trail.close()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ending(code: int) -> str:
    """How a process ended, from its exit code."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
