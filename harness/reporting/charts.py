"""Small charts as inline SVG, in the page's own colours: they follow a dark page and print like the text around them.

Every mark has a title, so that a pointer reads off the number; the chart itself has a label for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

COLOURS = ("blue", "orange", "green", "pink", "grey")
"""CSS variables of the pages' style sheet, in the order series take them."""

WIDTH, HEIGHT = 300, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 32
"""Margins of the plot in units of the view box."""


@dataclass(frozen=True)
class Series:
    """A line: its name and its points; a point whose y is None or not finite breaks the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Chart:
    """A chart with its heading."""

    title: str
    svg: Markup
    legend: str = ""


def lines(label: str, series: Sequence[Series], x_label: str = "update", percent: bool = False) -> Markup:
    """Lines over a common axis; ``percent`` prints shares times 100 on an axis from 0 to 1. Empty without points."""
    points = [point for line in series for point in line.points]
    if not points:
        return Markup()
    factor = 100 if percent else 1
    low, high = (0.0, 1.0) if percent else _padded([y for _, y in points])
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    x_ticks, y_ticks = ticks(left, right, 5, whole=True), ticks(low, high, 4)
    place = _Place(left, right, low, high)
    parts = [_axes(place, x_ticks, y_ticks, x_label, factor)]
    for number, line in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for run in _runs(line):
            path = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in run)
            parts.append(Markup('<polyline class="line {}" points="{}"/>').format(colour, path))
        for x, y in line.points:
            title = f"{line.name}, {x_label} {number_text(x)}: {number_text(factor * y)}{' %' if percent else ''}"
            mark = '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>'
            radius = 2.5 if len(line.points) <= 30 else 1.2
            parts.append(Markup(mark).format(colour, place.x(x), place.y(y), radius, title))
    return _svg(label, parts)


def histogram(label: str, edges: Sequence[float], counts: Sequence[int], x_label: str) -> Markup:
    """Bars between neighbouring edges; empty where nothing was counted."""
    total = sum(counts)
    if not total:
        return Markup()
    shares = [count / total for count in counts]
    y_ticks = ticks(0.0, max(shares), 4)
    place = _Place(edges[0], edges[-1], 0.0, max(max(shares), y_ticks[-1]))
    parts = [_axes(place, ticks(edges[0], edges[-1], 5), y_ticks, x_label, 100)]
    for low, high, share, count in zip(edges, edges[1:], shares, counts, strict=False):
        bar = '<rect class="area blue" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        title = f"{number_text(low)} to {number_text(high)}: {count:,} ({100 * share:.1f} %)"
        width, height = place.x(high) - place.x(low) - 0.6, place.y(0) - place.y(share)
        parts.append(Markup(bar).format(place.x(low), place.y(share), width, height, title))
    return _svg(label, parts)


def stacked(label: str, names: Sequence[str], x: Sequence[float], shares: Sequence[Sequence[float]]) -> Markup:
    """One column per x, of parts that add up to 1 (``shares``: a row per name); empty without columns."""
    if not x:
        return Markup()
    step = (max(x) - min(x)) / (len(x) - 1) if len(x) > 1 else 1.0
    place = _Place(min(x) - step / 2, max(x) + step / 2, 0.0, 1.0)
    parts = [_axes(place, ticks(min(x), max(x), 5, whole=True), [0.0, 0.5, 1.0], "update", 100)]
    for column, where in enumerate(x):
        below = 0.0
        for number, name in enumerate(names):
            share = shares[number][column]
            if share <= 0:
                continue
            bar = '<rect class="area {}" x="{:.1f}" y="{:.1f}" width="{:.2f}" height="{:.1f}"><title>{}</title></rect>'
            left, right = place.x(where - step / 2), place.x(where + step / 2)
            top, bottom = place.y(below + share), place.y(below)
            title = f"{name}, update {number_text(where)}: {100 * share:.1f} %"
            colour = COLOURS[number % len(COLOURS)]
            parts.append(Markup(bar).format(colour, left, top, right - left + 0.1, bottom - top, title))
            below += share
    return _svg(label, parts)


def bar(label: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """One horizontal bar of labelled parts; empty where all are zero."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup()
    drawn, at = [], 0.0
    for number, (name, value) in enumerate(parts):
        rect = '<rect class="area {}" x="{:.2f}" y="0" width="{:.2f}" height="24"><title>{}</title></rect>'
        width = 600 * value / total
        title = f"{name}: {value:,.0f} ({100 * value / total:.1f} %)"
        drawn.append(Markup(rect).format(COLOURS[number % len(COLOURS)], at, width, title))
        at += width
    return _svg(label, drawn, width=600, height=24, wide=" wide")


def legend(names: Sequence[str]) -> Markup:
    """Names with the colours that series of this order have."""
    entry = '<span class="key {}">{}</span>'
    keys = [Markup(entry).format(COLOURS[n % len(COLOURS)], name) for n, name in enumerate(names)]
    return Markup('<p class="legend">{}</p>').format(Markup(" ").join(keys)) if keys else Markup()


# ---------------------------------------------------------------------------------------------------- axes


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``, both included where they are round; at least one."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def number_text(value: float) -> str:
    """A number with three significant digits, thousands and small powers spelled short."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.3g}".replace("-", "−")


@dataclass(frozen=True)
class _Place:
    """Where data lie in the view box."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """The values' range, widened where it is empty; from zero where that costs little room."""
    low, high = min(values), max(values)
    if low > 0 and low < 0.5 * high:
        low = 0.0
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - margin), high + margin


def _runs(line: Series) -> list[list[tuple[float, float]]]:
    """The stretches of a line between the points that have no value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is not None and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _axes(place: _Place, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, factor: float) -> Markup:
    parts = []
    for value in y_ticks:
        y = place.y(value)
        text = number_text(factor * value)
        parts.append(Markup('<path class="grid" d="M{},{:.1f}H{}"/>').format(LEFT, y, WIDTH - RIGHT))
        parts.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 5, y + 3.5, text))
    base = HEIGHT - BOTTOM
    parts.append(Markup('<path class="axis" d="M{},{}H{}"/>').format(LEFT, base, WIDTH - RIGHT))
    for value in x_ticks:
        where = '<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>'
        parts.append(Markup(where).format(place.x(value), base + 13, number_text(value)))
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(centre, HEIGHT - 5, x_label))
    return Markup().join(parts)


def _svg(label: str, parts: Sequence[Markup], width: int = WIDTH, height: int = HEIGHT, wide: str = "") -> Markup:
    opening = Markup('<svg class="chart{}" role="img" aria-label="{}" viewBox="0 0 {} {}">')
    return opening.format(wide, label, width, height) + Markup().join(parts) + Markup("</svg>")
