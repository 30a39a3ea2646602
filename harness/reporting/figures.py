"""Figures for a paper: matplotlib, PNG and SVG, the same bytes for the same results.

A method keeps its colour and marker in every figure. Colours are Okabe and Ito's, which colour-blind readers can tell
apart; markers repeat the distinction in grey print.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from harness.inert import visible
from harness.reporting.comparison import BUDGETS, Arm, Comparison
from harness.reporting.frames import STAR

OWN = {"seed": ("#0072B2", "o"), "grpo": ("#D55E00", "s"), "opd-teacher": ("#009E73", "^")}
COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31", "#444444")
MARKERS = ("D", "v", "P", "X", "<", ">", "p")
"""Of all other methods, taken in turn: 42 pairs before one repeats."""
BASELINE_STYLES = ((0, (1, 1.5)), (0, (4, 2)), (0, (6, 2, 1, 2)), (0, (8, 3)))

COLUMN, ROW = 2.35, 3
"""Width of one panel in inches, and how many stand side by side: three panels fill a page of text."""
NARROW, WIDE = 3.3, 5.2
"""Inches that a figure takes at least, and with a crowd of curves, whose legend is long."""

CROWD = 6
"""More curves than this in a panel get more room and fainter bands, twice as many none: they would hide each other."""

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8.5,
    "font.size": 8,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "seed-harness",
    "text.parse_math": False,
    "xtick.color": "#444444",
    "xtick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.color": "#444444",
    "ytick.labelsize": 7,
    "ytick.major.width": 0.6,
}

DYNAMICS = {
    "learning": {
        "success": "Train success (%)",
        "episode_steps": "Steps per episode",
        "valid_rate": "Valid answers (%)",
        "entropy": "Entropy (nats)",
    },
    "optimisation": {
        "grad_norm": "Gradient norm",
        "clip_fraction": "Clipped tokens (%)",
        "loss/kl": "KL to reference",
        "loss/distill": "Distillation loss",
    },
    "skills": {
        "skill/parse_rate": "Usable skills (%)",
        "skill/active_ratio": "Active tokens (%)",
        "skill/gate": "Mean gate",
        "skill/gap": "Teacher gap (nats)",
    },
    "sampling": {
        "sampler/gap": "Sampler gap (nats)",
        "sampler/kl": "Sampler KL (nats)",
        "sampler/weight": "Mean weight",
    },
}
"""Figures of the training dynamics: title of each metric; (%) marks shares."""


LABEL = 18
"""Characters of an axis label in one line: the width of a panel."""


@contextmanager
def style() -> Iterator[None]:
    """Our settings on top of matplotlib's defaults, whatever the user's own configuration says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as ``svg`` and ``png`` (200 dpi), without a date in them."""
    rendered = {}
    with style():
        for text in figure.findobj(Text):
            text.set_text(visible(text.get_text()))  # XML has no place for control characters
        if layout := figure.get_layout_engine():
            layout.execute(figure)
            figure.set_layout_engine("none")  # laid out once, not again for each form
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            out = io.BytesIO()
            # On a page the figure has the page's own background; a bitmap goes into slides and documents.
            figure.savefig(out, format=kind, dpi=200, metadata=metadata, transparent=kind == "svg")
            rendered[kind] = out.getvalue()
    return rendered


@dataclass(frozen=True)
class Look:
    """How a method is drawn; hollow and dashed where it is measured with skills in its prompts."""

    colour: str
    marker: str
    hollow: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Of a curve."""
        return {"color": self.colour, "linestyle": (0, (4, 1.5)) if self.hollow else "-", **self.point}

    @property
    def point(self) -> dict[str, Any]:
        """Of a mark."""
        return {"marker": self.marker, "markerfacecolor": "none" if self.hollow else self.colour}


def looks(comparison: Comparison) -> dict[str, Look]:
    """How each method is drawn, the same in every figure of a report; policies that are not trained are grey."""
    trained = {method for (_, method), arm in comparison.arms.items() if arm.trained}
    free = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    plain: dict[str, tuple[str, str]] = {}
    for method in comparison.methods:
        name = method.removesuffix(STAR)
        if name not in plain:
            plain[name] = OWN.get(name) or (next(free) if method in trained else ("#666666", "o"))
    return {
        name: Look(*look, hollow)
        for known, look in plain.items()
        for name, hollow in ((known, False), (f"{known}{STAR}", True))
    }


def sample_efficiency(comparison: Comparison, budget: str) -> Figure:
    """Success against a budget, one panel per setting; bands are 95 % intervals, dashed lines untrained policies.

    A curve's point stands at the mean budget of the seeds.
    """
    looked = looks(comparison)
    with style():
        most, bands = _curves(comparison), banded(comparison)
        height, least = (1.95, NARROW) if most <= CROWD else (2.6, WIDE)
        figure, axes = _wrapped([setting.name for setting in comparison.settings], height, least)
        for axis, setting in zip(axes, comparison.settings, strict=True):
            right = 0.0
            for arm in comparison.arms_of(setting, trained_only=True):
                look = looked[arm.method]
                x = arm.spent(budget).mean(axis=1)
                points = arm.curve
                low, high = [p.low for p in points], [p.high for p in points]
                axis.plot(x, [p.value for p in points], **look.line, label=arm.method, zorder=3)
                if bands:
                    axis.fill_between(x, low, high, color=look.colour, alpha=0.15 * min(1, CROWD / most), lw=0)
                right = max(right, float(x[-1]))
            _baselines(axis, [arm for arm in comparison.arms_of(setting) if not arm.trained])
            axis.set(ylim=(0, 1.02), xlim=(0, right * 1.03 or 1), xlabel=textwrap.fill(BUDGETS[budget].label, LABEL))
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        for axis in axes[::ROW]:
            axis.set_ylabel("Success (%)")
        _legend(figure)
    return figure


def _curves(comparison: Comparison) -> int:
    """Curves in the fullest panel."""
    return max(len(comparison.arms_of(setting, trained_only=True)) for setting in comparison.settings)


def banded(comparison: Comparison) -> bool:
    """Whether there are few enough curves for bands of their intervals."""
    return _curves(comparison) <= 2 * CROWD


def _baselines(axis: Any, arms: Sequence[Arm]) -> None:
    """Horizontal lines for policies that are not trained."""
    for arm, dashes in zip(arms, BASELINE_STYLES * len(arms), strict=False):
        axis.axhline(arm.final.value, color="#666666", lw=0.9, ls=dashes, label=arm.method, zorder=2)


def final_success(comparison: Comparison) -> Figure:
    """Final success with 95 % intervals, one panel per setting; small dots are single seeds."""
    methods = comparison.methods
    looked = looks(comparison)
    with style():
        figure, axes = _wrapped([s.name for s in comparison.settings], 0.65 + 0.19 * len(methods), NARROW, True)
        for axis, setting in zip(axes, comparison.settings, strict=True):
            for arm in comparison.arms_of(setting):
                look = looked[arm.method]
                place, found = -methods.index(arm.method), arm.final
                axis.plot([found.low, found.high], [place, place], color=look.colour, lw=1.6, solid_capstyle="butt")
                axis.plot(found.value, place, **look.point, color=look.colour, ms=5, zorder=3)
                seeds = arm.outcomes().per_seed
                axis.plot(seeds, np.full(len(seeds), place - 0.28), ".", color=look.colour, ms=2.5, alpha=0.7)
            axis.set(xlim=(-0.03, 1.03), xlabel="Final success (%)", ylim=(-len(methods) + 0.4, 0.6))
            axis.set_yticks([-i for i in range(len(methods))], methods)
            axis.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
            axis.grid(axis="y", visible=False)
    return figure


def dynamics(comparison: Comparison, updates: pd.DataFrame, metrics: dict[str, str]) -> Figure | None:
    """Training metrics against updates, one row per metric and one column per setting; None where none was logged.

    Thick lines are means over seeds, thin ones single seeds.
    """
    present = {name: title for name, title in metrics.items() if name in updates and updates[name].notna().any()}
    if not present:
        return None
    trained = [
        m for m in dict.fromkeys(m.removesuffix(STAR) for m in comparison.methods) if m in set(updates["method"])
    ]
    looked = looks(comparison)
    with style():
        least = NARROW if len(trained) <= CROWD else WIDE
        figure, axes = _panels([setting.name for setting in comparison.settings], len(present), 1.2, least)
        for row, (name, title) in zip(axes, present.items(), strict=True):
            for axis, setting in zip(row, comparison.settings, strict=True):
                here = updates[(updates["env"] == setting.env) & (updates["card"] == setting.card_id)]
                for method in trained:
                    curve = here[here["method"] == method].pivot_table(name, "update", "seed")
                    if curve.empty:
                        continue
                    look, every = looked[method], max(1, len(curve) // 6)
                    axis.plot(curve.index, curve.to_numpy(), color=look.colour, lw=0.5, alpha=0.35)
                    axis.plot(curve.index, curve.mean(axis=1), **look.line, markevery=every, ms=2.5, label=method)
                axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
                axis.yaxis.set_major_locator(MaxNLocator(4))
                if title.endswith("(%)"):
                    axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
            row[0].set_ylabel(title)
        for axis in axes[-1]:
            axis.set_xlabel("Update")
        _legend(figure)
    return figure


def _panels(titles: Sequence[str], rows: int, height: float, least: float) -> tuple[Figure, Any]:
    """A grid with one titled column per setting; ``height`` is a row's in inches, ``least`` the smallest width."""
    width = max(COLUMN * len(titles), least)
    figure = Figure(figsize=(width, height * rows + 0.35), layout="constrained")
    axes = figure.subplots(rows, len(titles), squeeze=False, sharex="col" if rows > 1 else False)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontweight="bold")
    return figure, axes


def _wrapped(titles: Sequence[str], height: float, least: float, share_y: bool = False) -> tuple[Figure, list[Any]]:
    """One titled panel per setting, at most ``ROW`` in a row; ``height`` is a panel's, ``least`` the smallest width."""
    columns = min(len(titles), ROW)
    rows = -(-len(titles) // ROW)
    figure = Figure(figsize=(max(COLUMN * columns, least), height * rows + 0.35), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for axis in axes[len(titles) :]:
        axis.remove()
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontweight="bold")
    return figure, axes[: len(titles)]


def _legend(figure: Figure) -> None:
    """One legend above all panels: every method once, in the order drawn."""
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        widths = [0.45 + 0.065 * len(label) for label in entries]  # inches, handle and text
        room = figure.get_figwidth()
        columns = len(entries) if sum(widths) <= room else max(1, int(room / max(widths)))
        rows = -(-len(entries) // columns)
        figure.set_figheight(figure.get_figheight() + 0.16 * (rows - 1))  # the panels keep their height
        figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns)
