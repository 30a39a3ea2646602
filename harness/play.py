"""``harness play ENV``: a person plays in the terminal and sees what a policy sees.

What the player types takes the way of a policy's answer: through the environment's parser, at the same cost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from rich.columns import Columns
from rich.console import Console
from rich.style import Style
from rich.text import Text

from harness.contracts import IMAGE_PLACEHOLDER, AgentEnv, Image, Prompt, Task, Turn, View
from harness.inert import readable
from harness.registry import make_env

KEYS = "Type an action or its number; 'oracle' lets the expert move, 'quit' ends."
PICTURES = ("half", "sixel", "files")
WIDTH = 56
"""Widest picture in half blocks, in characters; a square one takes half as many lines."""

Draw = Callable[[Image], None]


def main(
    env_id: str,
    options: Mapping[str, Any],
    panel: str,
    number: int,
    style: str | None,
    pictures: str | None,
    console: Console,
) -> int:
    """Play one task; returns the exit code.

    Args:
        number: 1-based place of the task in its panel.
        style: Show the prompt that a policy of this style gets; None shows the observation alone.
        pictures: One of `PICTURES`; None takes half blocks in a colour terminal and files elsewhere.

    Raises:
        HarnessError: There is no such environment, option, panel or task.
    """
    with closing(make_env(env_id, options)) as env:
        task = env.panel(panel, number).tasks[number - 1]
        console.print(Text(f"{env_id}  task {number} of {panel}: {task.id} ({task.kind})", style="bold"))
        console.print(Text(KEYS, style="dim"))
        try:
            play(env, task, style, drawer(pictures, console), console)
        except (EOFError, KeyboardInterrupt):
            console.print("\nstopped")
    return 0


def play(env: AgentEnv, task: Task, style: str | None, draw: Draw, console: Console) -> None:
    """One episode, to its end or until the player quits. Raises EOFError where the input ends."""
    observation, info = env.reset(options={"task": task})
    goal, total = env.task_text(observation), 0.0
    turns: list[Turn] = []
    console.print(Text(f"Task: {goal}"))
    for number in range(1, env.card.max_steps + 1):
        past = tuple(turns[-env.card.history :]) if env.card.history else ()
        view = View(goal, number, past, observation["text"], observation["images"], tuple(info["admissible"]))
        console.rule(f"step {number} of {env.card.max_steps}", align="left")
        show(env.prompt(view, style) if style else bare(view.observation, view.images), draw, console)
        list_actions(view, console)
        answer = ask(env, view, console)
        if answer is None:
            console.print(f"stopped: return {total:g}, score {info['score']:g}")
            return
        action, parsed = env.parse(answer)
        turns.append(Turn(number, observation["text"], action))
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        verdict = "" if parsed and info["valid"] else "  not valid"
        console.print(Text.assemble((action, "bold cyan"), f"  reward {float(reward):+g}", (verdict, "red")))
        if terminated or truncated:
            break
    console.rule(align="left")
    show(bare(observation["text"], observation["images"]), draw, console)
    outcome = ("success", "green") if info["success"] else ("failure" if terminated else "out of steps", "red")
    told = f" after {len(turns)} steps: return {total:g}, score {info['score']:g}"
    console.print(Text.assemble(outcome, told))


def ask(env: AgentEnv, view: View, console: Console) -> str | None:
    """What the player answers, in the form a policy would write it; None to quit."""
    while True:
        line = readable(console.input(Text("your move: ", "dim"))).strip()
        if line in view.admissible:  # also where an action is called "quit" or "2"
            picked = line
        elif line == "quit":
            return None
        elif line == "oracle":
            return env.respond(env.oracle())
        elif line.isdecimal() and numbered(view):
            if not 1 <= int(line) <= len(view.admissible):
                console.print(f"the actions are numbered 1 to {len(view.admissible)}")
                continue
            picked = view.admissible[int(line) - 1]
        elif line:
            return line if env.parse(line)[1] else env.respond(line)
        else:
            continue
        choices = env.choices(view)
        if picked in choices:
            return env.respond(picked)
        console.print(Text(f"{picked} is to be filled in, e.g. {choices[0]}" if choices else f"{picked}: fill it in"))


def numbered(view: View) -> bool:
    """Whether actions may be picked by number: where none is a number itself."""
    return not any(action.isdecimal() for action in view.admissible)


def list_actions(view: View, console: Console) -> None:
    """The admissible actions, with numbers where these are no actions."""
    width = len(str(len(view.admissible)))
    cells = [
        Text.assemble((f"{number:>{width}} " if numbered(view) else "", "dim"), action)
        for number, action in enumerate(view.admissible, start=1)
    ]
    console.print()
    console.print(Columns(cells, padding=(0, 3), column_first=True))


def bare(text: str, images: tuple[Image, ...]) -> Prompt:
    """An observation alone: its pictures, then its text."""
    return Prompt(IMAGE_PLACEHOLDER * len(images) + text, images)


def show(prompt: Prompt, draw: Draw, console: Console) -> None:
    """A prompt with its pictures in their places."""
    first, *others = prompt.text.split(IMAGE_PLACEHOLDER)
    for image, text in zip((None, *prompt.images), (first, *others), strict=True):
        if image is not None:
            draw(image)
        if text.strip():
            console.print(Text(text.strip("\n")))


# ------------------------------------------------------------------------------------------------------- pictures


def drawer(pictures: str | None, console: Console) -> Draw:
    """What puts a picture before the player."""
    if pictures is None:
        pictures = "half" if console.is_terminal and console.color_system else "files"
    if pictures == "half":
        return lambda image: console.print(half_blocks(image, min(WIDTH, console.width)))
    if pictures == "sixel":
        return lambda image: print(sixel(image), file=console.file)
    folder, numbers = cache(lambda: Path(tempfile.mkdtemp(prefix="harness-play-"))), count(1)

    def save(image: Image) -> None:
        path = folder() / f"{next(numbers):03d}.png"
        Pillow.fromarray(image).save(path)
        console.print(Text(f"picture: {path}"), soft_wrap=True)

    return save


def half_blocks(image: Image, width: int) -> Text:
    """A picture of at most ``width`` characters, two pixels in each: above in front, below behind."""
    width = min(width, image.shape[1])
    height = 2 * max(1, round(image.shape[0] * width / image.shape[1] / 2))
    pixels = np.asarray(Pillow.fromarray(image).resize((width, height), Pillow.Resampling.BOX))
    text = Text()
    for above, below in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for pair, same in groupby(zip(map(tuple, above), map(tuple, below), strict=True)):
            front, behind = (f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in pair)
            text.append("▀" * len(list(same)), Style(color=front, bgcolor=behind))
        text.append("\n")
    text.right_crop(1)
    return text


def sixel(image: Image) -> str:
    """A picture in 64 colours for terminals that know sixels: bands of six rows, one run-length-coded line a colour."""
    reduced = Pillow.fromarray(image).quantize(64)
    indices = np.asarray(reduced)
    palette = np.reshape(reduced.getpalette() or [], (-1, 3)) * 100 // 255
    parts = [f'\x1bPq"1;1;{indices.shape[1]};{indices.shape[0]}']
    parts += [f"#{number};2;{red};{green};{blue}" for number, (red, green, blue) in enumerate(palette)]
    for top in range(0, len(indices), 6):
        band = indices[top : top + 6]
        for colour in np.unique(band):
            bits = ((band == colour) << np.arange(len(band))[:, None]).sum(axis=0)
            runs = "".join(f"!{len(list(same))}{chr(63 + value)}" for value, same in groupby(bits.tolist()))
            parts.append(f"#{colour}{runs}$")
        parts.append("-")
    return "".join([*parts, "\x1b\\"])
