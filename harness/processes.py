"""Child processes that do not outlive what they work for."""

from __future__ import annotations

import multiprocessing
import os
import threading


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
