"""Where a number came from: code revision, library versions and machine, for every cell's manifest."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness import __version__

LIBRARIES = (
    "accelerate",
    "alfworld",
    "gymnasium",
    "numpy",
    "pillow",
    "safetensors",
    "textworld",
    "tokenizers",
    "torch",
    "transformers",
)


def provenance() -> dict[str, Any]:
    """The manifest's ``harness``, ``git``, ``versions`` and ``machine``."""
    return {"harness": __version__, "git": git_revision(), "versions": versions(), "machine": machine()}


def git_revision() -> str | None:
    """Commit of the harness's own checkout, ``+`` appended if it was changed; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed below another project's repository, our files are not tracked there.
    if not git("ls-files", "__init__.py"):
        return None
    revision = git("rev-parse", "HEAD")
    return f"{revision}+" if revision and git("status", "--porcelain", "--untracked-files=no") else revision


def versions() -> dict[str, str]:
    """Python and the installed libraries that can change a number."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # optional extras
    return found


def machine() -> dict[str, Any]:
    """Processor, cores usable by this process, memory in GiB, accelerators."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(pages / 2**30, 1),
        "accelerators": accelerators(),
    }


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def accelerators() -> list[str]:
    """Names of the CUDA devices; none unless torch is loaded, which this function never does."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
