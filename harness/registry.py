"""Environments, methods and commands register themselves through entry points, ours as a third party's package does.

In ``pyproject.toml``::

    [project.entry-points."seed_harness.envs"]
    "MyEnv-v1" = "my_package:MyEnv"

    [project.entry-points."seed_harness.methods"]
    my-method = "my_package:METHOD"

    [project.entry-points."seed_harness.commands"]
    my-command = "my_package:command"

A command is a function that gets the sub-command's ``argparse`` parser, adds its arguments and sets ``run`` (options ->
exit code) as a default; the first line of its docstring is what ``harness --help`` says of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from harness.contracts import AgentEnv, HarnessError, unknown

ENVS = "seed_harness.envs"
METHODS = "seed_harness.methods"
COMMANDS = "seed_harness.commands"


@cache  # reading what is installed takes 10 ms, and expanding a recipe asks a hundred times
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group by name. Raises HarnessError when two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        if point.name in found and found[point.name].value != point.value:
            raise HarnessError(f"{point.name!r} is registered twice: {found[point.name].value} and {point.value}")
        found[point.name] = point
    return found


def env_class(env_id: str) -> type[AgentEnv]:
    """The class registered under an environment id, or named as ``"package.module:Class"``."""
    if ":" in env_id:
        return load(EntryPoint(env_id, env_id, ENVS))  # type: ignore[no-any-return]
    points = registered(ENVS)
    if env_id not in points:
        raise unknown("environment", env_id, points)
    return load(points[env_id])  # type: ignore[no-any-return]


def make_env(env_id: str, options: Mapping[str, Any] | None = None) -> AgentEnv:
    """Build an environment from its id and constructor options; unknown options raise before anything is built."""
    cls = env_class(env_id)
    for name in options or {}:
        if name not in cls.option_names:
            raise unknown(f"option of {env_id}", name, cls.option_names)
    return cls(**(options or {}))


def load(point: EntryPoint) -> Any:
    """Import what an entry point names; a broken registration is the user's error, in one line."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"cannot load {point.name!r} from {point.value!r}: {error}") from error


def packaged_files(folder: str, ending: str) -> dict[str, Path]:
    """The files below a folder of the package, by path within it without ending, e.g. ``paper/table1``."""
    found = Path(str(files("harness"))) / folder
    paths = sorted(found.rglob(f"*{ending}"), key=lambda path: (len(path.relative_to(found).parts), path))
    return {path.relative_to(found).as_posix().removesuffix(ending): path for path in paths}


def find_file(what: str, name: str, known: Mapping[str, Path]) -> Path:
    """The file that a packaged name or a path means; HarnessError with the nearest name if there is none."""
    path = known.get(name, Path(name))
    if os.path.isdir(path):
        raise HarnessError(f"{path} is a directory; name a {what} file in it")
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        raise HarnessError(f"no such {what} file: {name}") if path.suffix else unknown(what, name, known)
    return path
