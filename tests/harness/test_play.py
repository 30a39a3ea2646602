"""A person plays through standard input and reads what is printed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from rich.console import Console

from harness.cli import main
from harness.play import half_blocks, sixel

Play = Callable[..., str]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """Play with these lines typed; returns what the player saw."""
    monkeypatch.setenv("COLUMNS", "120")

    def go(*arguments: str, typed: tuple[str, ...]) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        assert main(["play", *arguments]) == 0
        printed = capsys.readouterr()
        assert not printed.err
        return printed.out

    return go


def test_a_game_is_won_by_words_numbers_and_the_expert(play: Play) -> None:
    seen = play("ALFWorld-v1", typed=("go to shelf 1", "12", "oracle", "oracle"))
    assert "task 1 of eval: eval/small/000000" in seen
    assert "Task: put a vase in desk." in seen
    assert "7 go to shelf 1" in seen
    assert "12 take vase 2 from shelf 1" in seen
    assert "take vase 2 from shelf 1  reward +0\n" in seen
    assert seen.endswith("success after 4 steps: return 10, score 1\n")


def test_answers_cost_what_a_policy_s_answers_cost(play: Play) -> None:
    seen = play("Sokoban-v1", "--task", "2", "--env-option", "max_steps=2", typed=("99", "", "dance", "sing"))
    assert "the actions are numbered 1 to 4" in seen
    assert seen.count("none  reward -0.1  not valid") == 2
    assert seen.endswith("out of steps after 2 steps: return -0.2, score 0\n")


def test_a_whole_answer_is_read_as_it_stands(play: Play) -> None:
    assert "up  reward" in play("Sokoban-v1", typed=("<think>so</think><action>up</action>", "quit"))


def test_where_actions_are_numbers_there_are_no_others(play: Play) -> None:
    seen = play("EZPoints-v1", typed=("10", "quit"))
    assert "your move: 10  reward +0\n" in seen
    assert "stopped: return 0" in seen


@pytest.mark.parametrize("typed", [(), ("look",)])
def test_the_end_of_the_input_ends_the_game(play: Play, typed: tuple[str, ...]) -> None:
    assert play("ALFWorld-v1", typed=typed).endswith("\nstopped\n")


def test_ctrl_c_ends_the_game(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert main(["play", "Sokoban-v1"]) == 0
    assert capsys.readouterr().out.endswith("\nstopped\n")


def test_a_style_shows_the_policy_s_prompt(play: Play) -> None:
    seen = play("ALFWorld-v1", "--style", "paper", typed=("oracle", "quit"))
    assert "'go to shelf 1'" in seen
    assert "You have taken 1 step(s). The last 1, oldest first:" in seen
    assert "First think" not in play("ALFWorld-v1", "--style", "compact", typed=("quit",))


def test_pictures_are_saved_where_no_terminal_can_show_them(play: Play) -> None:
    seen = play("Sokoban-v1", typed=("oracle", "quit"))
    paths = [Path(path) for path in re.findall(r"^picture: (.*)$", seen, re.MULTILINE)]
    assert [path.name for path in paths] == ["001.png", "002.png"]
    assert Pillow.open(paths[0]).size == (168, 168)


def test_sixels_are_written_raw(play: Play) -> None:
    seen = play("Sokoban-v1", "--images", "sixel", typed=("quit",))
    assert seen.count('\x1bPq"1;1;168;168#0;2;') == seen.count("\x1b\\") == 1


FLAG = np.zeros((4, 2, 3), np.uint8)
FLAG[:2, :, 0] = 255
FLAG[2:, :, 2] = 255


def test_half_blocks_hold_two_pixels_each() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(half_blocks(FLAG, 56))
    red, blue = "255;0;0", "0;0;255"
    line = "\x1b[38;2;{0};48;2;{0}m▀▀\x1b[0m\n"
    assert console.file.getvalue() == line.format(red) + line.format(blue)  # type: ignore[attr-defined]
    shrunk = half_blocks(np.zeros((300, 200, 3), np.uint8), 50)
    assert [len(row) for row in shrunk.plain.splitlines()] == [50] * 38


def test_sixel_bands() -> None:
    encoded = sixel(FLAG)
    number = {rgb: n for n, rgb in re.findall(r"#(\d+);2;(\d+;\d+;\d+)", encoded)}
    red, blue = number["100;0;0"], number["0;0;100"]
    # Rows 1 and 2 are bits 1 and 2, rows 3 and 4 bits 4 and 8; 63 is added to make a character.
    assert f"#{red}!2{chr(63 + 3)}$" in encoded
    assert f"#{blue}!2{chr(63 + 12)}$" in encoded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Sokobn-v1"], "did you mean 'Sokoban-v1'?"),
        (["Sokoban-v1", "--panel", "evil"], "did you mean 'eval'?"),
        (["ALFWorld-v1", "--task", "2000"], "1 to 1024 tasks, not 2000"),
        (["ALFWorld-v1", "--env-option", "sise=small"], "did you mean 'size'?"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
