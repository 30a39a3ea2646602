"""The command line and the runner around a stand-in for playing and training, so that nothing here loads a model."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from harness import cli, runner
from harness.cli import main
from harness.config import CellConfig
from harness.policy import load
from harness.progress import Board, Progress
from harness.recipes import expand, load_recipe
from harness.registry import COMMANDS
from harness.store import CellDir, cell_dir

RECIPE: dict[str, Any] = {
    "name": "stub",
    "policy": "tiny",
    "methods": ["grpo"],
    "baselines": [],
    "seeds": [0, 1],
    "train": {"updates": 2, "tasks": 1},
    "eval": {"panel_size": 2},
    "envs": [{"env": {"id": "EZPoints-v1"}}],
}


def stub(config: CellConfig, cell: CellDir, report: Callable[[Progress], None]) -> None:
    """Finish at once; what the environment variable STUB says happens to trained cells of seed 1."""
    with cell.lock():
        trouble = os.environ.get("STUB", "") if config.method and config.seed == 1 else ""
        (cell.path / f"started-{os.getpid()}-{time.monotonic_ns()}").touch()
        logging.getLogger("harness.stub").warning("a warning")
        report(Progress(config.title, "train", 1, 2, success=0.5, tokens_per_second=1000.0))
        if trouble == "crash":
            raise ZeroDivisionError("a bug\nin two lines")
        if trouble == "user error":
            cell.path.joinpath("file").touch()
            cell.path = cell.path / "file"
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang":
            time.sleep(60)
        cell.write_json("config.json", config.model_dump(mode="json"))
        cell.finish({"status": "complete"})


def load_stub(*settings: object) -> runner.Play:
    return stub


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "stub.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(autouse=True)
def embedded_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded policies count as built."""
    monkeypatch.setattr(load, "check_policy_spec", fingerprint)


def fingerprint(spec: str, check: Callable[[str], str] = load.check_policy_spec) -> str:
    return spec if spec in load.PACKAGED else check(spec)


@pytest.fixture
def run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr(runner, "load_play", load_stub)
    monkeypatch.setattr(runner, "_report", lambda directory, console, fresh: None)

    def go(*overrides: str, trouble: str = "") -> tuple[int, str]:
        monkeypatch.setenv("STUB", trouble)
        console = Console(file=io.StringIO(), width=200)
        code = runner.run(load_recipe(str(recipe), overrides), tmp_path / "out", 2, console)
        return code, console.file.getvalue()  # type: ignore[attr-defined]

    return go


def starts(directory: Path) -> int:
    return len(list(directory.glob("cells/*/started-*")))


def test_a_second_run_does_nothing_and_more_seeds_run_only_what_is_missing(
    run: Callable[..., tuple[int, str]], recipe: Path, tmp_path: Path
) -> None:
    code, text = run()
    assert code == 0
    assert "EZPoints-v1 grpo seed 1: a warning" in text
    cells = expand(load_recipe(str(recipe)))
    assert all(cell_dir(tmp_path / "out", cell).finished for cell in cells)
    assert starts(tmp_path / "out") == len(cells) == 4
    code, text = run()
    assert code == 0
    assert "4 cells, 4 finished" in text
    assert starts(tmp_path / "out") == 4
    assert run("seeds=[0,1,2]")[0] == 0
    assert starts(tmp_path / "out") == 6


@pytest.mark.parametrize(
    ("trouble", "expected", "message"),
    [
        ("crash", 1, "grpo seed 1: ZeroDivisionError: a bug (see "),
        ("kill", 1, "grpo seed 1: its process ended with signal SIGKILL"),
        ("user error", 2, "grpo seed 1: cannot write "),
    ],
)
def test_a_failing_cell_stops_no_other(
    run: Callable[..., tuple[int, str]], recipe: Path, tmp_path: Path, trouble: str, expected: int, message: str
) -> None:
    code, text = run(trouble=trouble)
    assert code == expected
    assert f"failed: EZPoints-v1 {message}" in text
    finished = [cell_dir(tmp_path / "out", cell).finished for cell in expand(load_recipe(str(recipe)))]
    assert sorted(finished) == [False, True, True, True]
    assert run()[0] == 0
    assert not list((tmp_path / "out").glob("cells/*/error.txt"))


@pytest.fixture
def hanging(recipe: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own in which one cell hangs and the others are finished."""
    code = (
        # A background job of a shell ignores SIGINT, and so would all its children.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys, test_cli; from harness import cli, runner; from harness.policy import load;"
        "runner.load_play, load.check_policy_spec = test_cli.load_stub, test_cli.fingerprint;"
        f"sys.exit(cli.main(['run', {str(recipe)!r}, '--out', {str(tmp_path / 'out')!r}, '--jobs', '2']))"
    )
    environment = {**os.environ, "STUB": "hang", "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: starts(tmp_path / "out") == 4 and len(list(tmp_path.glob("out/cells/*/manifest.json"))) == 3)
        yield process
        process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


def holder(directory: Path) -> int:
    (unfinished,) = [path for path in directory.glob("cells/*") if not (path / "manifest.json").exists()]
    return int((unfinished / "lock").read_text().split()[0])


def running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_kill_end_all_processes(
    hanging: subprocess.Popen[str], tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    worker = holder(tmp_path / "out")
    hanging.send_signal(sent)
    _, errors = hanging.communicate(timeout=20)
    assert hanging.returncode == code
    assert errors.strip() == "harness: interrupted; the same command continues where this one stopped"
    assert not running(worker)


def test_workers_do_not_outlive_a_killed_run(hanging: subprocess.Popen[str], tmp_path: Path) -> None:
    worker = holder(tmp_path / "out")
    assert running(worker)
    hanging.kill()
    wait_for(lambda: not running(worker))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quik"], "unknown recipe 'quik'; did you mean 'quick'?"),
        (["run", "quick", "train.updatez=3"], "unknown setting 'updatez'; did you mean 'updates'?"),
        (["check", "Sokobahn-v1"], "unknown environment 'Sokobahn-v1'; did you mean 'Sokoban-v1'?"),
        (["check", "nowhere.at:All"], "cannot load 'nowhere.at:All'"),
        (["list", "panels", "EZPoint-v1"], "did you mean 'EZPoints-v1'?"),
        (["list", "recipes", "EZPoints-v1"], "list recipes takes no environment"),
        (["eval", "--policy", "randm", "--env", "EZPoints-v1"], "unknown policy 'randm'; did you mean 'random'?"),
        (["eval", "--policy", "random", "--env", "EZPoints-v1", "--panel", "evil"], "did you mean 'eval'?"),
        (["eval", "--policy", "random", "--env", "EZPoints-v1", "--temperature", "-1"], "greater than or equal to 0"),
        (["eval", "--policy", "random", "--env", "EZPoints-v1", "--env-option", "max_step=3"], "'max_steps'?"),
        (["report", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("harness: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_follow_options(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "seeds=[5]", "--dry-run", "methods=[]"]) == 0
    assert "tiny (evaluation)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", str(recipe), "--dry-run", "--sedes=[5]"])


def test_dry_run_prints_the_cells_and_writes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", str(recipe), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(cell.hash in printed for cell in expand(load_recipe(str(recipe))))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["envs", "methods", "recipes", "panels"])
def test_list(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    assert {"recipes": "quick", "methods": "seed"}.get(what, "Sokoban-v1") in capsys.readouterr().out


def test_help_needs_no_heavy_library() -> None:
    code = "import sys; from harness.cli import parser; parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pandas", "matplotlib"} & set(done.stdout.split())


def greet(command: argparse.ArgumentParser) -> None:
    """Say hello.

    And nothing else.
    """
    command.add_argument("name")
    command.set_defaults(run=lambda options: print("hello", options.name) or 3)


def test_packages_add_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    points = {"greet": EntryPoint("greet", f"{__name__}:greet", COMMANDS)}
    monkeypatch.setattr(cli, "registered", lambda group: points)
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert "Say hello." in cli.parser().format_help()
    points["broken"] = EntryPoint("broken", "no_such_module:command", COMMANDS)
    assert main(["list", "envs"]) == 2
    assert capsys.readouterr().err.startswith("harness: cannot load 'broken' from 'no_such_module:command'")


def test_plain_progress_is_rate_limited() -> None:
    console = Console(file=io.StringIO(), width=200)
    with Board({"a": "cell [a]"}, 1, console, interval=1000) as board:
        for done in range(50):
            board.show("a", Progress("cell [a]", "train", done, 50, success=0.25, tokens_per_second=1234.0))
        board.show("a", Progress("cell [a]", "eval", 0, 8))
        board.end("a")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["cell [a]: train 0/50  success 25.0%  1,234 tok/s", "cell [a]: eval 0/8", "✓ cell [a]  (2/2)"]
