"""The tables of a report, built from a :class:`Comparison`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pandas as pd

from harness import statistics as st
from harness.comparison import BUDGETS, Arm, Comparison, Setting
from harness.contracts import Ledger
from harness.statistics import Estimate, Outcomes
from harness.tables import Column, Table, Value

DETAILS = ("optimizer_steps", "wall_seconds", "flops")
"""Ledger fields that the terminal leaves out."""


def comparison_table(comparison: Comparison) -> Table:
    """Rows: methods; per setting: final success, score, n; over environments: average, IQM, chance to beat grpo."""
    main = [setting for setting in comparison.settings if setting.main]
    reference = comparison.reference
    columns = [Column("Method")]
    for setting in comparison.settings:
        columns += [
            Column("success", "plusminus", group=setting.name),
            Column("score", "percent", group=setting.name, detail=_is_success(comparison, setting)),
            Column("n", group=setting.name, detail=True),
        ]
    if len(main) > 1:
        columns += [
            Column("average", "plusminus", group="All environments"),
            Column("IQM", "percent", group="All environments", detail=True),
        ]
        columns += [Column(f"P(> {reference})", "percent", ".0f", "All environments", True)] if reference else []
    rows = []
    for method in comparison.methods:
        row: list[Value] = [method]
        for setting in comparison.settings:
            arm = comparison.arms.get((setting.name, method))
            row += [arm.final, st.micro(arm.scores), arm.n] if arm else [None, None, None]
        if len(main) > 1:
            row += _over_environments(comparison, main, method)
        rows.append(tuple(row))
    notes = [
        "Success and score in %, at the last evaluation; ± the longer side of the 95 % bootstrap interval over seeds"
        " and tasks (all outcomes alike: Wilson interval over tasks).",
        _sizes(comparison),
    ]
    if len(main) > 1:
        beat = f"; P(> {reference}), the chance that a run beats one of {reference}" if reference else ""
        notes.append(
            "Average: every environment weighs the same. In the CSV file and on the page also: IQM, the interquartile"
            f" mean over environments and seeds{beat}."
        )
    title = "Final success by method and environment"
    return Table("comparison", title, tuple(columns), tuple(rows), (*notes, *comparison.card_notes), comparison.cards)


def _is_success(comparison: Comparison, setting: Setting) -> bool:
    """Whether an environment's score says nothing that its success does not say."""
    return all(st.micro(arm.scores) == arm.final.value for arm in comparison.arms_of(setting))


def _sizes(comparison: Comparison) -> str:
    """The n of all arms, one sentence."""
    found = [(s.name, ", ".join(dict.fromkeys(arm.n for arm in comparison.arms_of(s)))) for s in comparison.settings]
    return f"Seeds × tasks: {'; '.join(f'{name} {sizes}' for name, sizes in found)}."


def _over_environments(comparison: Comparison, main: Sequence[Setting], method: str) -> list[Value]:
    """Average, IQM and chance to beat the reference; nothing unless the method was run in every environment."""
    reference = comparison.reference
    arms = [comparison.arms.get((setting.name, method)) for setting in main]
    played = [arm for arm in arms if arm]
    if len(played) < len(main):
        return [None, None, None] if reference else [None, None]
    outcomes = [arm.outcomes() for arm in played]
    replicates = np.mean([arm.replicates(o) for arm, o in zip(played, outcomes, strict=True)], axis=0)
    mean = float(np.mean([st.micro(o) for o in outcomes]))
    values: list[Value] = [
        st.success_interval(mean, replicates, sum(o.played for o in outcomes)),
        st.iqm(np.concatenate([o.per_seed for o in outcomes]).tolist()),
    ]
    if reference:
        theirs = [comparison.arms.get((setting.name, reference)) for setting in main]
        chances = [
            st.probability_of_improvement(ours.per_seed.tolist(), arm.outcomes().per_seed.tolist())
            for ours, arm in zip(outcomes, theirs, strict=True)
            if arm
        ]
        values.append(float(np.mean(chances)) if method != reference else None)
    return values


def paired_table(comparison: Comparison) -> Table:
    """Differences on common tasks: every trained method against the untrained base and against the reference."""
    columns = (
        Column("Environment"),
        Column("Comparison"),
        Column("difference", "range", "+.1f"),
        Column("p", "p"),
        Column("p (Holm)", "p"),
        Column("detectable", "percent"),
        Column("tasks", "number", ".0f", detail=True),
        Column("seeds", detail=True),
    )
    found: list[tuple[Setting, Arm, Arm, st.Paired]] = []
    for setting in comparison.settings:
        arms = comparison.arms_of(setting)
        references = [arm for arm in arms if arm.method.startswith("base (") or arm.method == comparison.reference]
        for theirs in references:
            for ours in arms:
                if ours.trained and ours is not theirs:
                    draws = (ours.seed_draws, theirs.seed_draws, setting.task_draws)
                    found.append((setting, ours, theirs, st.paired(ours.outcomes(), theirs.outcomes(), draws)))
    adjusted = st.holm([result.p for *_, result in found])
    rows: list[tuple[Value, ...]] = [
        (
            setting.name,
            f"{ours.method} − {theirs.method}",
            result.difference,
            result.p,
            holm,
            result.detectable,
            result.tasks,
            f"{len(ours.seeds)} / {len(theirs.seeds)}",
        )
        for (setting, ours, theirs, result), holm in zip(found, adjusted, strict=True)
    ]
    notes = (
        "Difference of final success in points on the same tasks; 95 % bootstrap interval over seeds and tasks.",
        "p: two-sided exact sign-flip test over tasks. It speaks of the policies trained here, the interval also of"
        " training again with other seeds.",
        "Detectable: true difference that a comparison of this size finds in 80 % of repetitions.",
        _sizes(comparison),
    )
    return Table("differences", "Paired differences", columns, tuple(rows), notes, comparison.cards)


def efficiency_table(comparison: Comparison, budgets: Sequence[str]) -> Table:
    """Area under the learning curves over the common budget, and budget until the reference's final success."""
    reference = comparison.reference
    columns = [Column("Environment"), Column("Method")]
    columns += [Column(BUDGETS[b].short, "range", group="Area under the curve") for b in budgets]
    if reference:
        group = f"Budget until {reference}'s final success"
        columns += [Column(BUDGETS[b].short, group=group) for b in budgets]
    rows = []
    for setting in comparison.settings:
        arms = [arm for arm in comparison.arms_of(setting, trained_only=True) if len(arm.updates) > 1]
        target = comparison.arms.get((setting.name, reference)) if reference else None
        for arm in arms:
            row: list[Value] = [setting.name, arm.method, *(_area(arm, arms, budget) for budget in budgets)]
            if reference:
                row += [_reach(arm, target, budget) if target else None for budget in budgets]
            rows.append(tuple(row))
    notes = [
        "Area: mean success in % while the budget runs from the latest start to the earliest end of the methods"
        " compared; 95 % bootstrap interval over seeds and tasks. Sampled tokens: acting and analysis."
    ]
    if reference:
        notes.append(
            f"Budget until the mean success of {reference}'s last evaluation is first reached: median over seeds;"
            " > marks a budget that ran out before, (k/n) the seeds that got there."
        )
    title = "Sample efficiency"
    return Table("efficiency", title, tuple(columns), tuple(rows), tuple(notes), comparison.cards)


def _area(arm: Arm, arms: Sequence[Arm], budget: str) -> Estimate | None:
    within = st.common_range([other.spent(budget) for other in arms])
    if within is None:
        return None
    outcomes = Outcomes(*st.area(arm.spent(budget), arm.success, arm.count, within), arm.setting.kinds)
    return st.interval(st.micro(outcomes), arm.replicates(outcomes))


def _reach(arm: Arm, target: Arm, budget: str) -> str:
    threshold, spent = st.micro(target.outcomes()), arm.spent(budget)
    curves = np.stack([arm.outcomes(u).per_seed for u in range(len(arm.updates))])
    reached = [st.budget_to_reach(threshold, spent[:, s], curves[:, s]) for s in range(len(arm.seeds))]
    median, count = float(np.median(reached)), int(np.isfinite(reached).sum())
    text = f"{median:,.0f}" if math.isfinite(median) else f"> {spent[-1].min():,.0f}"
    return text if count == len(reached) else f"{text} ({count}/{len(reached)})"


def kinds_table(comparison: Comparison, setting: Setting) -> Table:
    """Final success of every method by kind of task, with micro and macro averages."""
    masks = {kind: np.array(setting.kinds) == kind for kind in dict.fromkeys(setting.kinds)}
    columns = (
        Column("Method"),
        Column("micro", "plusminus", group="Average"),
        Column("macro", "plusminus", group="Average"),
        *(Column(kind, "percent", group=f"{int(mask.sum())} tasks") for kind, mask in masks.items()),
    )
    rows: list[tuple[Value, ...]] = []
    for arm in comparison.arms_of(setting):
        outcomes = arm.outcomes()
        replicates = st.macro_replicates(outcomes, arm.seed_draws, setting.task_draws)
        macro = st.success_interval(st.macro(outcomes), replicates, outcomes.played)
        by_kind = [st.micro(outcomes.where(mask)) for mask in masks.values()]
        rows.append((arm.method, arm.final, macro, *by_kind))
    notes = ("Success in %. Micro: over all episodes; macro: mean over kinds; ± the longer side of the 95 % interval.",)
    title = f"{setting.name}: success by kind of task"
    name = f"kinds-{setting.name.replace(' ', '-').replace('(', '').replace(')', '').lower()}"
    return Table(name, title, columns, tuple(rows), notes, ((setting.name, setting.card),))


def ledger_table(comparison: Comparison) -> Table:
    """What every trained method spent, mean over its seeds."""
    names = [field.name for field in fields(Ledger)]
    columns = [Column("Environment"), Column("Method"), Column("seeds", "number", ".0f")]
    columns += [
        Column(n.replace("_", " "), "number", ".2e" if n == "flops" else ",.0f", detail=n in DETAILS) for n in names
    ]
    rows: list[tuple[Value, ...]] = [
        (setting.name, arm.method, len(arm.seeds), *(float(arm.ledgers[name][-1].mean()) for name in names))
        for setting in comparison.settings
        for arm in comparison.arms_of(setting, trained_only=True)
    ]
    notes = (
        "Training budget, mean over seeds; evaluation is not charged. SEED's includes stage 1, analysis, re-scoring.",
    )
    return Table("ledger", "Ledger", tuple(columns), tuple(rows), notes, comparison.cards)


def seeds_table(comparison: Comparison, evaluations: pd.DataFrame) -> Table:
    """Every run by itself: success with its Wilson interval, score, length, how episodes ended, and the cell."""
    columns = (
        Column("Environment"),
        Column("Method"),
        Column("seed", "number", ".0f"),
        Column("success", "range"),
        Column("score", "percent"),
        Column("episodes", "number", ".0f"),
        Column("excluded", "number", ".0f"),
        Column("steps", "number"),
        Column("ended by"),
        Column("cell"),
    )
    rows: list[tuple[Value, ...]] = []
    for setting in comparison.settings:
        for arm in comparison.arms_of(setting):
            for seed in arm.seeds:
                of_run = (evaluations["method"] == arm.method) & (evaluations["seed"] == seed)
                of_run &= (evaluations["env"] == setting.env) & (evaluations["card"] == setting.card_id)
                played = evaluations[of_run & (evaluations["update"] == arm.updates[-1])]
                counted = played[played["counted"]]
                rate = st.wilson(float(counted["success"].sum()), len(counted))
                row: list[Value] = [setting.name, arm.method, seed, rate, float(counted["score"].mean())]
                row += [len(counted), len(played) - len(counted), float(counted["steps"].mean())]
                row.append(", ".join(f"{reason} {n}" for reason, n in played["stop_reason"].value_counts().items()))
                rows.append((*row, str(played["cell"].iloc[0])))
    notes = ("Success and score in %, last evaluation; 95 % Wilson interval over this run's episodes.",)
    return Table("runs", "Every run", columns, tuple(rows), notes, comparison.cards)
