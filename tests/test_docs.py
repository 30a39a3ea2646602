"""The documentation works as it stands: its code runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import audit, cli, epilogs, skill_commands, verify
from harness.policy import load
from harness.recipes import expand, load_recipe, packaged
from harness.registry import ENVS, registered
from harness.reporting import compare

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".venv", ".git", ".pytest_cache", "build", "dist"}
COMMITTED = ("README.md", "published", "studies")
"""What of `results/` is ours and not the output of a run."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|toml|yaml))\n")
needs_tiny = pytest.mark.skipif(not (load.MODELS / "tiny").is_dir(), reason="the policy tiny has not been built")


def files(*patterns: str) -> list[Path]:
    """Our own files, in order: not what was installed, and of results only what is committed."""
    found = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.rglob(pattern)}
    ours = (path for path in found if SKIPPED.isdisjoint(path.parts))
    return sorted(ROOT / path for path in ours if path.parts[0] != "results" or path.parts[1] in COMMITTED)


PAGES = files("*.md")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------- pages that build


@needs_tiny
@pytest.mark.slow
@pytest.mark.parametrize("page", ["adding-an-environment", "adding-a-method"])
def test_what_a_page_builds_works(page: str, tmp_path: Path) -> None:
    """Write the page's files and carry out its commands, in order, in an empty directory."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(["site", *sys.path]),
    }
    for language, text in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text()):
        if named := FILE_NAME.match(text):
            (tmp_path / named[1]).write_text(text)
        elif language == "sh":
            for line in text.splitlines():
                # The same, without a network and without touching the environment that the tests run in.
                command = line.replace("--editable", "--quiet --no-index --no-build-isolation --target site")
                command = command.replace("PYTHONPATH=.", "PYTHONPATH=.:$PYTHONPATH")
                done = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=name)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python" and not FILE_NAME.match(text):
            exec(compile(text, str(page), "exec"), {})


# --------------------------------------------------------------------------------------------------------- commands


def documented_commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(where, arguments) of every command line in a block of a page, and of the examples in the command's own help."""
    texts = {name(page): page.read_text().replace("\\\n", " ") for page in PAGES}
    texts["--help"] = "\n".join(
        (
            *(epilogs.TOP, epilogs.RUN, epilogs.EVAL, epilogs.CHECK, epilogs.PLAY, epilogs.NEW_ENV),
            *(compare.EPILOG, audit.EPILOG, skill_commands.EPILOG, skill_commands.EXPORT_EPILOG, verify.EPILOG),
        )
    )
    for where, text in texts.items():
        for line in re.findall(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )?(harness [a-z][^`\n]*)$", text, re.MULTILINE):
            yield where, tuple(shlex.split(re.split(r" {2,}| #", line)[0])[1:])


COMMANDS = sorted(set(documented_commands()))


@pytest.mark.parametrize(
    ("where", "arguments"), COMMANDS, ids=[f"{where}: {' '.join(arguments)}" for where, arguments in COMMANDS]
)
def test_command(
    where: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Cheap commands are carried out; of the others the arguments and, for packaged recipes, the cells are checked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "check_policy_spec", lambda spec: spec)  # no model is needed here
    options, rest = cli.parser().parse_known_args(arguments)
    if hasattr(options, "overrides"):
        if options.recipe in packaged():
            recipe = load_recipe(options.recipe, [*options.overrides, *rest, "train.panel_size=32"])  # quick to build
            assert options.recipe.startswith("paper/") or expand(recipe)  # those at the paper's size need its data
        return
    assert not rest
    known = getattr(options, "env", None) in (None, *registered(ENVS))
    scripted = getattr(options, "policy", None) in (None, "random", "oracle")
    if arguments[0] in ("list", "eval") and known and scripted and not getattr(options, "env_option", None):
        assert cli.main(arguments) == 0


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 20


# ---------------------------------------------------------------------------------------------------- links and names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    """Every relative link leads to a file, and every link into a page to one of its headings."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target} leads nowhere"
        if heading:
            assert heading in {anchor(line) for line in goal.read_text().splitlines()}, f"{target}: no such heading"


def anchor(line: str) -> str:
    """The name that a heading is linked by."""
    title = line.lstrip("#").strip().lower() if line.startswith("#") else ""
    return re.sub(r"[^\w -]", "", title).replace(" ", "-")


def test_no_package_registry_is_named() -> None:
    """Where packages come from is the user's choice: pip's own configuration says it, nothing of ours."""
    hosts = re.compile(r"pypi\.|pythonhosted\.|index-url|npmjs\.|anaconda\.org")
    this = Path(__file__).resolve()
    texts = files("*.md", "*.py", "*.toml", "*.txt", "*.yaml", "*.yml", "Makefile", "run")
    naming = [name(path) for path in texts if path != this and hosts.search(path.read_text(errors="replace"))]
    assert not naming
