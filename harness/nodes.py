"""What the machines of a cluster must have in common with the one that starts a run: directory, code and libraries."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from harness.provenance import versions
from harness.registry import ENVS, METHODS, registered
from harness.store import check_writable, writing

SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Environment variables that cells take from the machine that starts the run: they decide how sums are rounded."""


@dataclass(frozen=True)
class Home:
    """The machine that starts a run, as every node must find it.

    Attributes:
        token: A file in the run's directory, and ``word`` what it says.
        work: Where relative paths of the recipe start.
        packages: Where the code of the cells lies: modules to import.
        code: Digest of these packages' source text.
        versions: Libraries that can change a number.
        settings: Environment variables of the cells.
    """

    token: Path
    word: str
    packages: tuple[str, ...]
    work: Path = field(default_factory=Path.cwd)
    code: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    settings: dict[str, str] = field(default_factory=lambda: {k: os.environ[k] for k in SETTINGS if k in os.environ})


@contextmanager
def home(directory: Path, env_ids: Iterable[str]) -> Iterator[Home]:
    """This machine as the home of a run; its token lies in the run's directory meanwhile."""
    directory = directory.resolve()
    check_writable(directory)
    word = secrets.token_hex(8)
    token = directory / f".token-{word}"
    with writing(token):
        token.write_text(word)
    try:
        packages = code_packages(env_ids)
        yield Home(token, word, packages, code=code_digest(packages))
    finally:
        token.unlink(missing_ok=True)


def unfit(home: Home) -> str:
    """Why this machine may not play the cells of a run; empty where it may."""
    node = f"node {socket.gethostname()}"
    if not home.work.is_dir():
        return f"{node} has no {home.work}; start the harness in a directory that all nodes share"
    if not home.token.is_file() or home.token.read_text() != home.word:
        return f"{node} does not see {home.token.parent}; --out must be on a file system that all nodes share"
    os.chdir(home.work)
    if code_digest(home.packages) != home.code:
        return f"{node} has other code of {', '.join(home.packages)}, or it was changed since the run began"
    mine = versions()
    for name in sorted({*mine, *home.versions}):
        here, there = home.versions.get(name, "none"), mine.get(name, "none")
        if here != there:
            return f"{node} has {name} {there} and this machine has {here}; install the same on all nodes"
    return ""


def code_packages(env_ids: Iterable[str]) -> tuple[str, ...]:
    """Top-level modules whose code decides what cells do: the harness, what is registered, environments by path."""
    points = [point.value for group in (ENVS, METHODS) for point in registered(group).values()]
    modules = ["harness", *points, *(env_id for env_id in env_ids if ":" in env_id)]
    return tuple(sorted({module.partition(":")[0].partition(".")[0] for module in modules}))


def code_digest(packages: Iterable[str]) -> str:
    """Digest of the Python sources of modules and packages, wherever they are installed."""
    found = hashlib.sha256()
    for package in packages:
        for name, file in _sources(package):
            found.update(f"{package} {name} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _sources(package: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(package)
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).rglob("*.py")):
            yield str(file.relative_to(folder)), file
    if not spec.submodule_search_locations and spec.origin:
        yield Path(spec.origin).name, Path(spec.origin)
