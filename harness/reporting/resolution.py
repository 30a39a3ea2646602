"""What a comparison can resolve: the minimal detectable difference, in words, under every table that compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.reporting.comparison import Arm, Comparison, Measure, Setting
from harness.reporting.differences import POWER, detectable_difference
from harness.reporting.statistics import Outcomes


@dataclass(frozen=True)
class Resolved:
    """What a comparison resolves, in points, and how: seeds x tasks and the two methods."""

    points: float
    size: str
    methods: str


def resolution(comparison: Comparison, settings: Sequence[Setting], measure: Measure = Arm.outcomes) -> list[str]:
    """The minimal detectable difference of each setting in words, e.g. 3 seeds × 128 tasks resolve 6.1 points.

    One sentence; none where there is nothing to compare or no outcome differs from another.
    """
    found = {setting.name: _resolved(comparison, setting, measure) for setting in settings}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, resolved in found.items():
        if resolved and math.isfinite(resolved.points):
            where = f" in {name}" if len(settings) > 1 else ""
            groups.setdefault((resolved.size, resolved.methods), []).append(f"{resolved.points:.1f} points{where}")
    texts = [f"{size} resolve {', '.join(points)} ({methods})" for (size, methods), points in groups.items()]
    return (
        [f"Detectable (true difference found in {100 * POWER:.0f} % of repetitions): {'; '.join(texts)}."]
        if texts
        else []
    )


def _resolved(comparison: Comparison, setting: Setting, measure: Measure) -> Resolved | None:
    pair = reference_pair(comparison, setting, measure)
    if pair is None:
        return None
    ours, theirs = pair
    seeds = f"{len(ours.seeds)} / {len(theirs.seeds)}" if len(ours.seeds) != len(theirs.seeds) else f"{len(ours.seeds)}"
    size = f"{seeds} seed{'s' * (seeds != '1')} × {{}} tasks"
    if ours is theirs:
        outcomes = measure(ours)
        assert outcomes is not None  # reference_pair chooses among measured arms
        error = math.sqrt(2) * float(np.nanstd(ours.replicates(outcomes)))
        points = 100 * detectable_difference(error) if error else math.nan
        return Resolved(points, size.format(outcomes.played), f"of two methods like {ours.method}")
    found = comparison.contrast(ours, theirs, measure)
    covers = "" if found.seeds else "; these policies, not training again"
    return Resolved(100 * found.detectable, size.format(found.tasks), f"{ours.method} − {theirs.method}{covers}")


def reference_pair(comparison: Comparison, setting: Setting, measure: Measure) -> tuple[Arm, Arm] | None:
    """The two methods by which a setting's resolution is told: seed and the reference, else the first there are."""
    arms = [arm for arm in comparison.arms_of(setting) if measure(arm)]
    candidates = [arm for arm in arms if arm.trained] or arms
    if not candidates:
        return None
    theirs = next((arm for arm in candidates if arm.method == comparison.reference), candidates[0])
    others = [arm for arm in candidates if arm is not theirs] or [arm for arm in arms if arm is not theirs]
    ours = next((arm for arm in others if arm.method == "seed"), others[0] if others else theirs)
    return ours, theirs


def kinds_resolution(comparison: Comparison, setting: Setting, masks: dict[str, NDArray[np.bool_]]) -> list[str]:
    """What the same comparison resolves within single kinds of task."""
    ours, theirs = reference_pair(comparison, setting, Arm.outcomes) or (None, None)
    if ours is None or theirs is None or ours is theirs:
        return []
    found: dict[str, float] = {}
    for kind, mask in masks.items():

        def within(arm: Arm, mask: NDArray[np.bool_] = mask) -> Outcomes:
            return arm.outcomes().where(mask)

        if mask.sum() > 1:
            found[kind] = comparison.contrast(ours, theirs, within).detectable
    known = sorted((points, kind) for kind, points in found.items() if math.isfinite(points))
    if len(known) < 2:
        return []
    (least, easy), (most, hard) = known[0], known[-1]
    size = {kind: int(mask.sum()) for kind, mask in masks.items()}
    return [
        f"Within a kind, from {100 * least:.0f} ({easy}, {size[easy]} tasks) to {100 * most:.0f} points ({hard},"
        f" {size[hard]} tasks)."
    ]
