"""The tables of a report, built from a :class:`Comparison`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pandas as pd

from harness.cards import Ledger
from harness.contracts import HarnessError
from harness.reporting import statistics as st
from harness.reporting.comparison import BUDGETS, EXTERNAL, UNTRAINED, Arm, Comparison, Setting
from harness.reporting.curves import area, at_budget, common_range, reached
from harness.reporting.differences import ALPHA, Paired, holm
from harness.reporting.frames import STAR
from harness.reporting.resolution import kinds_resolution, resolution
from harness.reporting.statistics import Estimate, Outcomes
from harness.reporting.tables import MISSING, Column, Table, Value, file_name

DETAILS = ("optimizer_steps", "wall_seconds", "flops")
"""Ledger fields that the terminal leaves out."""


def comparison_table(comparison: Comparison) -> Table:
    """Rows: methods; per setting: final success, score, n; over environments: average, IQM, chance to beat grpo."""
    main = [setting for setting in comparison.settings if setting.main]
    reference, macro = comparison.reference, "Macro over environments"
    scored = [setting.name for setting in comparison.settings if not _is_success(comparison, setting)]
    columns = [Column("Method")]
    for setting in comparison.settings:
        columns.append(Column("success", "plusminus", group=setting.name))
        columns += [Column("score", "percent", group=setting.name)] * (setting.name in scored)
        columns.append(Column("n", group=setting.name, detail=True))
    if len(main) > 1:
        columns += [Column("mean", "plusminus", group=macro), Column("IQM", "percent", group=macro, detail=True)]
        columns += [Column(f"P(> {reference})", "percent", ".0f", macro, True)] if reference else []
    rows = []
    for method in comparison.methods:
        row: list[Value] = [method]
        for setting in comparison.settings:
            arm = comparison.arms.get((setting.name, method))
            score = [st.micro(arm.scores) if arm else None] * (setting.name in scored)
            row += [arm.final if arm else None, *score, arm.n if arm else None]
        if len(main) > 1:
            row += _over_environments(comparison, main, method)
        rows.append(tuple(row))
    also = "; score: the environment's own measure, also a micro average" if scored else ""
    notes = [
        f"Success in %, micro average (every counted episode weighs the same), at the last evaluation{also}. ±: the"
        " longer side of the 95 % bootstrap interval over seeds and tasks (all outcomes alike: Wilson, over tasks).",
        _sizes(comparison),
        *resolution(comparison, comparison.settings),
        *_stars(comparison),
    ]
    if len(main) > 1:
        beat = f"; P(> {reference}), the chance in % that a run beats one of {reference}" if reference else ""
        notes.append(
            "Macro over environments: mean of the environments' micro averages. In the CSV file and on the page also:"
            f" IQM, the interquartile mean in % over environments and seeds{beat}."
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


def _stars(comparison: Comparison) -> list[str]:
    """What a star behind a method's name says, if there is one."""
    return ["* Skills are also in the prompt at evaluation."] * any(m.endswith(STAR) for m in comparison.methods)


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
        values.append(float(np.mean(chances)) if chances and method != reference else None)
    return values


# ---------------------------------------------------------------------------------------------- differences


def paired_table(comparison: Comparison) -> Table:
    """Differences on common tasks: every method against the untrained start and against the reference."""
    again, these = "Trained again", "These policies"
    columns = (
        Column("Environment"),
        Column("Comparison"),
        Column("difference", "range", "+.1f"),
        Column("p", "p", group=again, detail=True),
        Column("p (Holm)", "p", group=again),
        Column("verdict", group=again),
        Column("p", "p", group=these, detail=True),
        Column("p (Holm)", "p", group=these),
        Column("detectable", "percent", detail=True),
        Column("tasks", "number", ".0f", detail=True),
        Column("seeds", detail=True),
    )
    found = [(ours, theirs, comparison.contrast(ours, theirs)) for ours, theirs in _pairs(comparison)]
    of_methods = holm([result.p for *_, result in found])
    of_policies = holm([result.p_policies for *_, result in found])
    rows: list[tuple[Value, ...]] = [
        (
            ours.setting.name,
            f"{ours.method} − {theirs.method}",
            result.difference,
            result.p,
            adjusted,
            verdict(result, adjusted),
            result.p_policies,
            of_these,
            result.detectable,
            result.tasks,
            f"{len(ours.seeds)} / {len(theirs.seeds)}",
        )
        for (ours, theirs, result), adjusted, of_these in zip(found, of_methods, of_policies, strict=True)
    ]
    notes = [
        "Difference of final success (micro average) in points on the same tasks, with its 95 % interval: over seeds"
        " and tasks, or with one seed of a trained method over tasks alone.",
        f"Trained again: whether the methods differ, by a t-test over seeds and tasks; found where p (Holm) is at most"
        f" {ALPHA:.2f}. One seed cannot tell. These policies: whether the policies trained here differ, by the"
        " exact sign-flip test over tasks; it says nothing about training again. Holm: adjusted over this table.",
        *resolution(comparison, comparison.settings),
        _sizes(comparison),
        *_stars(comparison),
    ]
    return Table("differences", "Paired differences", columns, tuple(rows), tuple(notes), comparison.cards)


def verdict(result: Paired, adjusted: float) -> str:
    """What a comparison says about the methods, given its adjusted p."""
    if not result.tasks:
        return "no task in common"
    if not result.seeds:
        return "open: one seed"
    if adjusted > ALPHA:
        return "not resolved"
    return "higher" if result.difference.value > 0 else "lower"


def _pairs(comparison: Comparison) -> list[tuple[Arm, Arm]]:
    """(ours, theirs) of the table of differences."""
    found: list[tuple[Arm, Arm]] = []
    for setting in comparison.settings:
        arms = comparison.arms_of(setting)
        starts = [arm for arm in arms if arm.method == UNTRAINED or arm.method.startswith("base (")]
        methods = [arm for arm in arms if arm.config.method and arm not in starts]
        found += [(ours, theirs) for theirs in starts for ours in methods]
        found += [(a, b) for b in methods if b.method == comparison.reference for a in methods if a is not b]
    return found


# ------------------------------------------------------------------------------------------------- budgets


def efficiency_table(comparison: Comparison, budgets: Sequence[str], threshold: float | None = None) -> Table:
    """Area under the learning curves over the common budget, and budget until a success is reached.

    Args:
        budgets: Names in :data:`harness.reporting.comparison.BUDGETS`.
        threshold: Success to be reached, in [0, 1]; None: the reference's final success.
    """
    reference = comparison.reference
    aim = (
        f"{100 * threshold:g} % success"
        if threshold is not None
        else f"{reference}'s final success"
        if reference
        else ""
    )
    columns = [Column("Environment"), Column("Method")]
    columns += [Column(BUDGETS[b].short, "range", group="Area under the curve") for b in budgets]
    columns += [Column(BUDGETS[b].short, group=f"Budget until {aim}") for b in budgets if aim]
    rows = []
    for setting in comparison.settings:
        target = comparison.arms.get((setting.name, reference)) if reference else None
        goal = threshold if threshold is not None else st.micro(target.outcomes()) if target else None
        for arm in comparison.arms_of(setting, trained_only=True):
            row: list[Value] = [setting.name, arm.method, *(_area(comparison, arm, budget) for budget in budgets)]
            row += [_reach(arm, goal, budget) for budget in budgets if aim]
            rows.append(tuple(row))
    parts = [BUDGETS[b].label.removesuffix(")").split(" (") for b in budgets if " (" in BUDGETS[b].label]
    notes = [
        "Area: mean success in % (micro average) while the budget runs from the latest start to the earliest end of the"
        " curves compared; 95 % bootstrap interval over seeds and tasks."
        + "".join(f" {name}: {what}." for name, what in parts),
    ]
    if aim:
        notes.append(
            f"Budget until {aim} is first reached, on straight lines between evaluations: median over seeds. (k/n):"
            " only k of n seeds got there; the others needed more than they spent. >: these were half of them or more,"
            " so that the median is known to be larger only."
        )
    first = budgets[0]
    resolved = resolution(comparison, comparison.settings, lambda arm: _area_outcomes(comparison, arm, first))
    notes += [f"Area over {BUDGETS[first].short}. {text}" for text in resolved] + _stars(comparison)
    return Table("efficiency", "Sample efficiency", tuple(columns), tuple(rows), tuple(notes), comparison.cards)


def _area_outcomes(comparison: Comparison, arm: Arm, budget: str) -> Outcomes | None:
    """Area under each task's curve over what all curves of the setting cover; None where there is no such stretch."""
    curves = [other for other in comparison.arms_of(arm.setting, trained_only=True) if len(other.updates) > 1]
    within = common_range([other.spent(budget) for other in curves]) if arm in curves else None
    if within is None:
        return None
    return Outcomes(*area(arm.spent(budget), arm.success, arm.count, within), arm.setting.kinds)


def _area(comparison: Comparison, arm: Arm, budget: str) -> Estimate | None:
    outcomes = _area_outcomes(comparison, arm, budget)
    return st.interval(st.micro(outcomes), arm.replicates(outcomes)) if outcomes else None


def _reach(arm: Arm, goal: float | None, budget: str) -> str | None:
    if goal is None:
        return None
    curves = np.stack([arm.outcomes(u).per_seed for u in range(len(arm.updates))])
    found = reached(goal, arm.spent(budget), curves)
    text = f"{'' if found.known else '> '}{amount(found.median)}"
    return text if found.count == found.seeds else f"{text} ({found.count}/{found.seeds})"


def amount(value: float) -> str:
    """A budget in figures."""
    whole = value >= 10 or value == round(value)
    return f"{value:.2e}" if value >= 1e9 else f"{value:,.0f}" if whole else f"{value:.1f}"


def matched_budget_table(comparison: Comparison, budgets: Sequence[str]) -> Table:
    """Success of every method when the budget of the cheapest has been spent, and its difference to the reference."""
    reference = comparison.reference
    columns = [Column("Environment"), Column("Budget spent"), Column("Method"), Column("success", "plusminus")]
    columns += [Column(f"− {reference}", "range", "+.1f")] if reference else []
    rows, notes = [], []
    for budget in budgets:
        cheapest = {setting.name: _cheapest(comparison, setting, budget) for setting in comparison.settings}

        def measure(arm: Arm, budget: str = budget, cheapest: dict[str, float] = cheapest) -> Outcomes | None:
            found = at_budget(arm.spent(budget), arm.success, arm.count, cheapest[arm.setting.name])
            return Outcomes(*found, arm.setting.kinds) if found else None

        settings = [setting for setting in comparison.settings if cheapest[setting.name] > 0]
        for setting in settings:
            theirs = comparison.arms.get((setting.name, reference)) if reference else None
            for arm in comparison.arms_of(setting, trained_only=True):
                ours = measure(arm)
                spent = f"{amount(cheapest[setting.name])} {BUDGETS[budget].short}"
                row: list[Value] = [setting.name, spent, arm.method, _success(arm, ours) if ours else None]
                if reference:
                    pair = theirs if theirs and ours and arm is not theirs and measure(theirs) else None
                    row.append(comparison.contrast(arm, pair, measure).difference if pair else None)
                rows.append(tuple(row))
        notes += [f"Budget: {BUDGETS[budget].short}. {text}" for text in resolution(comparison, settings, measure)]
    what = (
        "Success in % (micro average) when as much has been spent as the cheapest run spends in all, on straight lines"
        f" between evaluations; {MISSING}: the preparation alone costs more. ± and [ ]: 95 % intervals over seeds and"
        " tasks, of a difference with one seed over tasks alone."
    )
    title = "Success at the same budget"
    notes = [what, *notes, *_stars(comparison)]
    return Table("matched-budget", title, tuple(columns), tuple(rows), tuple(notes), comparison.cards)


def _cheapest(comparison: Comparison, setting: Setting, budget: str) -> float:
    """What the cheapest run with a learning curve spends in all; 0 where nothing is spent."""
    curves = [arm for arm in comparison.arms_of(setting, trained_only=True) if len(arm.updates) > 1]
    return min((float(arm.spent(budget)[-1].min()) for arm in curves), default=0.0)


def _success(arm: Arm, outcomes: Outcomes) -> Estimate:
    return st.success_interval(st.micro(outcomes), arm.replicates(outcomes), outcomes.played)


# ------------------------------------------------------------------------------------------------- details


def kinds_table(comparison: Comparison, setting: Setting) -> Table:
    """Final success of every method by kind of task, with micro and macro averages."""
    masks = {kind: np.array(setting.kinds) == kind for kind in dict.fromkeys(setting.kinds)}
    sizes = [int(mask.sum()) for mask in masks.values()]
    columns = (
        Column("Method"),
        Column("micro", "plusminus", group="Average"),
        Column("macro over kinds", "plusminus", group="Average"),
        *(Column(kind, "percent", group=_size_of_kind(sizes, i)) for i, kind in enumerate(masks)),
    )
    rows: list[tuple[Value, ...]] = []
    for arm in comparison.arms_of(setting):
        outcomes = arm.outcomes()
        replicates = st.macro_replicates(outcomes, arm.seed_draws, setting.task_draws)
        macro = st.success_interval(st.macro(outcomes), replicates, outcomes.played)
        by_kind = [st.micro(outcomes.where(mask)) for mask in masks.values()]
        rows.append((arm.method, arm.final, macro, *by_kind))
    notes = [
        "Success in %. Micro: over all episodes; macro: mean over kinds; they are different averages, never to be"
        " compared with each other. ±: the longer side of the 95 % interval over seeds and tasks.",
        *resolution(comparison, [setting]),
        *kinds_resolution(comparison, setting, masks),
        *_stars(comparison),
    ]
    title = f"{setting.name}: success by kind of task"
    name = f"kinds-{file_name(setting.name)}"
    return Table(name, title, columns, tuple(rows), tuple(notes), ((setting.name, setting.card),))


def _size_of_kind(sizes: Sequence[int], index: int) -> str:
    """The heading over a kind of task; neighbours of one size share it."""
    size = sizes[index]
    shared = size in (*sizes[:index][-1:], *sizes[index + 1 :][:1])
    return f"{size} task{'s' * (size != 1)}{' each' * shared}"


def ledger_table(comparison: Comparison, prices: tuple[float, float] | None = None) -> Table:
    """What every trained method spent, mean over its seeds; columns of external annotators only where there was one.

    ``prices`` of a million prompt and a million answer tokens add what those cost; HarnessError if nobody was asked.
    """
    trained = [(setting, arm) for setting in comparison.settings for arm in comparison.arms_of(setting, True)]
    asked = any(float(arm.ledgers[name][-1].sum()) for _, arm in trained for name in EXTERNAL)
    if prices and not asked:
        raise HarnessError("--price-in and --price-out are prices of an external annotator, and none was asked here")
    names = [field.name for field in fields(Ledger) if asked or field.name not in EXTERNAL]
    columns = [Column("Environment"), Column("Method"), Column("seeds", "number", ".0f")]
    columns += [
        Column(n.replace("_", " "), "number", ".2e" if n == "flops" else ",.0f", detail=n in DETAILS) for n in names
    ]
    rows: list[tuple[Value, ...]] = [
        (setting.name, arm.method, len(arm.seeds), *(float(arm.ledgers[name][-1].mean()) for name in names))
        for setting, arm in trained
    ]
    if prices:
        columns.append(Column("external cost", "number", ",.2f"))
        per_token = dict(zip(EXTERNAL, (price / 1e6 for price in prices), strict=True))
        costs = [sum(p * float(arm.ledgers[n][-1].mean()) for n, p in per_token.items()) for _, arm in trained]
        rows = [(*row, cost) for row, cost in zip(rows, costs, strict=True)]
    notes = (
        "Training budget, mean over seeds; evaluation is not charged. Stage 1, analyses and re-scoring are. FLOPs are"
        " estimated.",
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
    notes = ("Success and score in %, micro averages, last evaluation; 95 % Wilson interval over this run's episodes.",)
    return Table("runs", "Every run", columns, tuple(rows), notes, comparison.cards)
