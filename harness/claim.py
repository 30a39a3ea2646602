"""Who may write a directory: one process at a time, on one machine or on many that share it.

A process claims a directory by a lock on its file ``lock``, which dies with the process, and by writing a name of its
own to the file ``writer``. If a whole machine is lost, its file server may keep the lock, or the process may live on,
cut off from all others. So the name has the last word: a writer looks before each write whether it is still there,
and whoever deletes both files ends its claim.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from harness.contracts import HarnessError

LOCK, WRITER = "lock", "writer"


@dataclass(frozen=True)
class Claim:
    """The right to write a directory, as long as its file ``writer`` says this name; without a name, always."""

    directory: Path
    name: str = ""

    @property
    def holds(self) -> bool:
        try:
            return not self.name or (self.directory / WRITER).read_text(encoding="utf-8") == self.name
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Raise HarnessError where the claim has been ended."""
        if not self.holds:
            raise HarnessError(f"{self.directory} was taken from this process, which writes nothing more to it")


@contextmanager
def claim(directory: Path) -> Iterator[Claim]:
    """Hold a directory. Raises HarnessError where another process holds it, OSError where it cannot be held."""
    here, claimed = f"{os.getpid()} on {socket.gethostname()}", Claim(directory, uuid4().hex)
    # The lock file must not be opened anywhere else: to close it drops the lock, whichever handle it was.
    with (directory / LOCK).open("a+", encoding="utf-8") as handle:
        try:
            # A POSIX lock: unlike flock(2), forked environment workers do not inherit it, and NFS carries it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            handle.seek(0)
            raise HarnessError(_in_use(directory, handle.read().strip())) from error
        handle.truncate(0)
        handle.write(here)
        handle.flush()
        temporary = directory / f"{WRITER}.{claimed.name}.tmp"
        temporary.write_text(claimed.name, encoding="utf-8")
        temporary.replace(directory / WRITER)
        try:
            yield claimed
        finally:
            if claimed.holds:
                (directory / WRITER).unlink(missing_ok=True)


def _in_use(directory: Path, holder: str) -> str:
    """What to say about a directory that another process holds."""
    elsewhere = holder and not holder.endswith(f" on {socket.gethostname()}")
    hint = f"; if that machine is gone, delete {directory / LOCK} and {directory / WRITER}" if elsewhere else ""
    return f"{directory} is in use by another process (pid {holder or 'unknown'}){hint}"


def end_claim(directory: Path) -> None:
    """End whatever claim there is, because its holder is lost: its lock counts no more, and it can write no more."""
    for name in (WRITER, LOCK):
        (directory / name).unlink(missing_ok=True)
