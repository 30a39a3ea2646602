"""The console every command prints on: what is shown is text, and nothing in it reaches the terminal as a command."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.inert import visible


class Terminal(Console):
    """A rich console on which only rich's own styles and movements take effect.

    Strings are text: ``[red]`` and ``:smile:`` in them mean nothing. Control characters are shown by their symbols
    (:func:`harness.inert.visible`), so that a task, an answer or a skill cannot clear the screen, set the clipboard
    or hide what stands before it. Where we want a style we say so with :class:`rich.text.Text`.
    """

    def __init__(self, *, stderr: bool = False, highlight: bool = True) -> None:
        super().__init__(stderr=stderr, highlight=highlight, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable, those that are text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
