"""Fixtures: where the optional reference data lies. Tests that need it skip, with the reason, where it is absent."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of real environment data: ``HARNESS_TEST_DATA`` or ``../shared/data``."""
    path = Path(os.environ.get("HARNESS_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no reference data at {path} (set HARNESS_TEST_DATA)")
    return path


@pytest.fixture(scope="session")
def golden(shared_data: Path) -> Callable[[str], Any]:
    """Load golden values computed by the official code: ``golden("losses")``."""

    def read(name: str) -> Any:
        path = shared_data.parent / "golden" / f"{name}.json"
        if not path.is_file():
            pytest.skip(f"no golden values at {path}")
        return json.loads(path.read_text())

    return read


@pytest.fixture(scope="session")
def alfworld_data(shared_data: Path) -> Path:
    """Real ALFWorld games in the official layout (ALFWORLD_DATA), unpacked once and kept in the temporary directory."""
    archive = shared_data / "alfworld" / "alfworld_seen_train.tar.xz"
    if not archive.is_file():
        pytest.skip(f"no ALFWorld games at {archive}")
    cache = Path(tempfile.gettempdir()) / "seed-harness-data"
    target = cache / f"alfworld-{archive.stat().st_size}"
    if not target.is_dir():
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            unpacked = Path(scratch) / "games"
            with tarfile.open(archive) as files:
                files.extractall(unpacked, filter="data")
            try:
                unpacked.rename(target)
            except OSError:  # another process was faster
                if not target.is_dir():
                    raise
    return target
