"""``harness perf``: how fast and how frugal the harness is, as ratios to straightforward references.

Every ratio comes from one run: ours and the reference take turns on the same work, and the medians are divided. Times
are CPU seconds of this process and of its environment workers, so that other programs on the machine hardly matter.
The settings are those of the recipe ``quick`` unless a part says otherwise; docs/performance.md tells the rest.
"""

from __future__ import annotations

PARTS = {
    "rollout": "harness.perf.rollout:rollout_speed",
    "update": "harness.perf.update:update_cost",
    "memory": "harness.perf.memory:memory_use",
    "engine": "harness.perf.engine:engine_speed",
    "trl": "harness.perf.trl:trl_speed",
    "report": "harness.perf.report:report_cost",
}
"""What can be measured. Named, not imported: most parts need torch."""

USUAL = ("rollout", "update", "memory", "engine")
"""Measured where no part is named; the others need another package or several minutes."""
