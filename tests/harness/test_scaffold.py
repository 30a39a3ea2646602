"""What `harness new-env` writes works at once, and it writes all or nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from harness import check, scaffold
from harness.cli import main
from harness.contracts import HarnessError
from harness.policy import load
from harness.scaffold import Names, names, new_env

needs_tiny = pytest.mark.skipif(not (load.MODELS / "tiny").is_dir(), reason="the policy tiny has not been built")


@pytest.mark.parametrize("name", ["TrafficLights", "traffic-lights", "traffic_lights", "traffic lights"])
def test_a_name_is_read_in_any_form(name: str) -> None:
    assert names(name) == Names("traffic-lights", "traffic_lights", "TrafficLights", "TrafficLights-v1")


def test_other_names() -> None:
    assert names("EZGame2-v1") == Names("ez-game2", "ez_game2", "EZGame2", "EZGame2-v1")
    assert names("grid") == Names("grid", "grid", "Grid", "Grid-v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' makes no Python name: use letters"),
        ("2048", "'2048' makes no Python name"),
        ("class", "'class' makes no Python name"),
        ("../evil", "'../evil' makes no Python name"),
        ("mein Spaß", "'mein Spaß' makes no Python name"),
        ("json", "a Python module 'json' exists already"),
        ("Harness", "a Python module 'harness' exists already"),
        ("sokoban-v1", "an environment 'Sokoban-v1' is registered already"),
    ],
)
def test_bad_names_get_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-env", name]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-game").mkdir()
    with pytest.raises(HarnessError, match=r"my-game exists already: remove it or name another directory with --out"):
        new_env("my-game")
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match=r"cannot write .*file/there"):
        new_env("my-game", tmp_path / "file" / "there")
    monkeypatch.setitem(scaffold.FILES, "{module}.py/late", "module.py")  # no file can be made inside a file
    with pytest.raises(HarnessError, match=r"cannot write .*new: File exists"):
        new_env("my-game", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "my-game"]


@pytest.mark.parametrize("vision", [False, True])
def test_the_written_environment_keeps_the_contract(
    vision: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"lamps_{vision}".lower()
    new_env(module, tmp_path / "new", vision)
    monkeypatch.syspath_prepend(tmp_path / "new")
    results = check.check(f"{module}:{''.join(part.title() for part in module.split('_'))}", size=8)
    assert not [result for result in results if not result.passed]


# ------------------------------------------------------------------------------------------------ from the README


def fresh_venv(directory: Path) -> dict[str, str]:
    """A new virtual environment with the harness in it; returns the variables of a shell that has activated it.

    There may be no network, so the packages of the running interpreter are lent to it instead of installed.
    """
    venv.create(directory, symlinks=True)
    inside = {"base": str(directory), "platbase": str(directory)}
    packages = Path(sysconfig.get_path("purelib", "venv", inside))
    lent = sysconfig.get_path("purelib")
    (packages / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")
    scripts = Path(sysconfig.get_path("scripts", "venv", inside))
    command = scripts / "harness"
    command.write_text(
        f"#!{scripts / 'python'}\nfrom harness.cli import main\nif __name__ == '__main__':\n    exit(main())\n"
    )
    command.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}


@needs_tiny
@pytest.mark.slow
def test_every_command_of_the_readme_works_in_a_fresh_virtual_environment(tmp_path: Path) -> None:
    """Install, test, check, list, play, eval with two policies, train two updates."""
    assert main(["new-env", "--vision", "NightLights", "--out", str(tmp_path / "package")]) == 0
    shell = fresh_venv(tmp_path / "venv")
    blocks = re.findall(r"```sh\n(.*?)```", (tmp_path / "package" / "README.md").read_text(), re.DOTALL)
    lines = "".join(blocks).splitlines()
    assert {line.split()[1] for line in lines if line.startswith("harness ")} == {
        "check",
        "list",
        "play",
        "eval",
        "run",
    }
    printed = {}
    for line in lines:
        done = subprocess.run(
            # The same, without a network.
            ["bash", "-c", line.replace("pip install", "pip install --quiet --no-deps --no-build-isolation")],
            cwd=tmp_path / "package",
            env=shell,
            input="oracle\n1\nquit\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed[line] = done.stdout
    assert "stopped: return 0" in printed["harness play NightLights-v1"]
    assert "✗" not in printed["harness check NightLights-v1"]
    assert re.search(r"oracle +100\.0 ", printed["harness run night_lights.yaml --jobs 1"])
    assert (tmp_path / "package" / "results" / "night_lights" / "report.html").is_file()
