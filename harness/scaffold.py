"""``harness new-env NAME``: a working third-party package around a small game, to be replaced by one's own."""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from harness.contracts import HarnessError
from harness.registry import ENVS, registered

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{module}.py": "module.py",
    "{module}.yaml": "module.yaml",
    "tests/test_{module}.py": "test_module.py",
}
"""File of the package -> its template."""

WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True)
class Names:
    """One name in the four forms it is needed in, e.g. of "traffic lights"."""

    project: str
    """``traffic-lights``: the distribution and its directory."""
    module: str
    """``traffic_lights``"""
    class_name: str
    """``TrafficLights``"""
    env_id: str
    """``TrafficLights-v1``"""


def names(name: str) -> Names:
    """Read a name in any usual form: ``TrafficLights``, ``traffic-lights``, ``traffic_lights``, ``TrafficLights-v1``.

    Raises HarnessError where it makes no Python name, or one that is taken.
    """
    stem = name.removesuffix("-v1")
    words = WORD.findall(stem)
    module = "_".join(words).lower()
    if re.sub(r"[\s_-]", "", stem) != "".join(words) or not module.isidentifier() or keyword.iskeyword(module):
        raise HarnessError(f"{name!r} makes no Python name: use letters, digits, '-' and '_', e.g. TrafficLights")
    class_name = "".join(word[0].upper() + word[1:] for word in words)
    found = Names("-".join(words).lower(), module, class_name, f"{class_name}-v1")
    if found.env_id in registered(ENVS):
        raise HarnessError(f"an environment {found.env_id!r} is registered already: choose another name")
    if module in sys.stdlib_module_names or find_spec(module):
        raise HarnessError(f"a Python module {module!r} exists already: choose another name")
    return found


def new_env(name: str, out: Path | None = None, vision: bool = False) -> tuple[Names, Path]:
    """Write the package for a name, all of it or nothing; returns the name's forms and the new directory.

    Args:
        out: The directory to create; by default the project's name in the current one.
        vision: Whether observations are pictures instead of text.

    Raises:
        HarnessError: The name cannot be used, or the directory exists or cannot be written.
    """
    forms = names(name)
    target = (out or Path(forms.project)).expanduser().absolute()
    if target.exists():
        raise HarnessError(f"{target} exists already: remove it or name another directory with --out")
    templates = Environment(
        loader=PackageLoader("harness", "templates/new_env"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-env-", dir=target.parent) as scratch:
            draft = Path(scratch) / target.name
            for place, template in FILES.items():
                path = draft / place.format(module=forms.module)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(templates.get_template(f"{template}.j2").render(vars(forms), vision=vision))
            draft.rename(target)
    except OSError as error:
        raise HarnessError(f"cannot write {target}: {error.strerror}") from error
    return forms, target
