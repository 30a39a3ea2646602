"""Processes: children do not outlive what they work for, their size is known, and signals end work in good order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def follow_parent() -> None:
    """End this process as soon as its parent has ended, however that came: call it first in every child.

    Without it a killed run would leave workers behind that go on writing and hold the cells' locks.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def resident(pid: int) -> int:
    """Bytes of memory that a process occupies; 0 where the system does not tell, or the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM ends work as Ctrl-C does, with :class:`Terminated`: what is open is closed on the way out."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    def end(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
