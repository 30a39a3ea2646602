"""The page of one cell: what was run, what it cost, how training went, and how healthy the distillation was."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup
from pydantic import BaseModel

from harness.cards import Ledger
from harness.methods import Frozen, Method
from harness.records import read_credit, read_outcomes
from harness.reporting import charts
from harness.reporting import statistics as st
from harness.reporting.comparison import EXTERNAL
from harness.reporting.frames import Cell, in_words, updates_of
from harness.reporting.site import write_page
from harness.reporting.site_distillation import outcome_table, token_charts, token_frame
from harness.reporting.tables import Column, Table, Value

ABSENT = {
    "advantage": "no policy gradient",
    "teacher": "nobody re-scores the answers",
    "signal": "no distillation",
    "rehearsal": "stage 1 is not trained on again",
}
"""What it means that a method has no such part."""

TOKENS = {
    "sampled_tokens": "sampled while acting",
    "analyzer_tokens": "sampled while analysing",
    "external_answer_tokens": "written by an external annotator",
    "rescored_tokens": "re-scored by a teacher",
    "trained_tokens": "trained on",
}
"""Ledger fields of the bar: they count tokens and add up."""

TRAINING = {
    "success": "Success (%)",
    "score": "Score (%)",
    "reward": "Return of an episode",
    "valid_rate": "Valid answers (%)",
    "episode_steps": "Steps of an episode",
    "response_tokens": "Tokens of an answer",
    "distinct_actions": "Distinct actions (%)",
    "degenerate_groups": "Groups with one outcome (%)",
    "entropy": "Entropy (nats)",
    "grad_norm": "Gradient norm",
    "rows": "Step rows trained on",
}
LOSSES = {
    "loss/policy": "Policy-gradient loss",
    "loss/distill": "Distillation loss",
    "loss/kl": "KL to the reference",
    "loss/rehearsal": "Rehearsal loss",
    "approx_kl": "KL to the update's start",
    "clip_fraction": "Clipped tokens (%)",
    "dual_clip_fraction": "Dual-clipped tokens (%)",
    "sampler/gap": "Gap between engine and trainer (nats)",
    "sampler/gap_max": "Largest gap of a token (nats)",
    "sampler/kl": "KL of engine and trainer (nats)",
    "sampler/weight": "Mean weight of a token",
}
DISTILLATION = {
    "skill/parse_rate": "Usable skills (%)",
    "skill/active_ratio": "Active tokens (%)",
    "skill/gate": "Mean gate",
    "skill/gate_open": "Tokens whose gate is above 1/2 (%)",
    "skill/gap": "Teacher gap (nats)",
    "skill/instances": "Skills naming an instance (%)",
    "skill/words": "Words of a skill",
    "skill/duplicates": "Duplicate skills (%)",
    "skill/asked_again": "Answers asked for again (%)",
}
"""Metrics of metrics.jsonl by section of the page, and the heading of each chart; (%) marks shares."""


@dataclass(frozen=True)
class Section:
    """A part of the page. ``bar`` is one wide bar with its legend."""

    id: str
    title: str
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    bar: str = ""
    charts: tuple[charts.Chart, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.tables or self.bar or self.charts)


def cell_page(cell: Cell) -> str:
    """Where a cell's page lies within its run's directory."""
    return f"report/cells/{cell.id}.html"


def write_cell_page(cell: Cell, run: Path, evaluations: pd.DataFrame, links: Sequence[tuple[str, str]]) -> None:
    """Write the page of a cell.

    Args:
        evaluations: The cell's rows of :func:`harness.reporting.frames.evaluations_of`.
        links: (label, path within the run's directory) of the cell's other pages.
    """
    manifest, method = cell.manifest, cell.config.method
    write_page(
        run,
        cell_page(cell),
        "cell.html.j2",
        cell.title,
        summary=method.summary if method else f"Policy {cell.config.policy}, evaluated without training.",
        links=links,
        warnings=manifest.get("warnings", []),
        sections=[section for section in sections(cell, evaluations) if not section.empty],
        protocol=cell.protocol,
        provenance=_provenance(cell),
        config=json.dumps(cell.config.model_dump(mode="json"), indent=2, ensure_ascii=False),
    )


def sections(cell: Cell, evaluations: pd.DataFrame) -> Iterator[Section]:
    """All parts of a cell's page, some of them empty."""
    updates = updates_of([cell])
    yield _result(evaluations)
    yield Section("method", "Method", tables=(method_table(cell.config.method),) if cell.config.method else ())
    if not updates.empty:
        yield Section("training", "Training", charts=(*curves(updates, TRAINING), *_endings(updates)))
        yield Section("losses", "Losses", charts=tuple(curves(updates, LOSSES)))
        yield _distillation(cell, updates)
        known = {*TRAINING, *LOSSES, *DISTILLATION}
        others = {name: name for name in metric_names(updates) if name not in known}
        yield Section("metrics", "Other metrics", charts=tuple(curves(updates, others)))
    yield _ledger(cell, evaluations, len(updates))


# -------------------------------------------------------------------------------------------------- result


def _result(evaluations: pd.DataFrame) -> Section:
    """Success by kind at the last evaluation, and the learning curve where there are several."""
    rates = [
        charts.Series(str(method), [int(u) for u in rate.index], rate.tolist())
        for method, rows in evaluations[evaluations["counted"]].groupby("method")
        for rate in [rows.groupby("update")["success"].mean()]
    ]
    names = [line.name for line in rates]
    curve = charts.lines("Success on the evaluation panel", rates, percent=True)
    several = evaluations["update"].nunique() > 1
    legend = charts.legend(names) if len(names) > 1 else Markup()
    drawn = (charts.Chart("Success on the evaluation panel (%)", curve, legend),) if several else ()
    return Section("result", "Result", tables=(kinds_table(evaluations),), charts=drawn)


def kinds_table(evaluations: pd.DataFrame) -> Table:
    """A cell's last evaluation by kind of task, for each kind of prompt that was measured."""
    last = evaluations[evaluations["update"] == evaluations["update"].max()]
    rows: list[tuple[Value, ...]] = []
    for method, played in last.groupby("method"):
        by_kind = [(str(kind), part) for kind, part in played.groupby("kind", sort=False)]
        rows += [_outcome_row(str(method), kind, part) for kind, part in by_kind if len(by_kind) > 1]
        rows.append(_outcome_row(str(method), "all (micro)", played))
        if len(by_kind) > 1:
            counted = played[played["counted"]].groupby("kind")
            macro = [float(counted[name].mean().mean()) for name in ("success", "score")]
            rows.append((str(method), "all (macro over kinds)", None, *macro, None, None, None, ""))
    columns = (
        Column("Measured"),
        Column("Kind"),
        Column("episodes", "number", ".0f"),
        Column("success", "range"),
        Column("score", "percent"),
        Column("steps", "number"),
        Column("return", "number", ".2f"),
        Column("excluded", "number", ".0f"),
        Column("ended by"),
    )
    update = int(last["update"].iloc[0])
    notes = [
        "Success and score in %; 95 % Wilson interval over this run's episodes."
        " Micro: every episode weighs the same; macro: every kind does."
    ]
    if any(str(method).endswith("*") for method in last["method"].unique()):
        notes.append("* Skills are also in the prompt at evaluation.")
    return Table("kinds", f"Evaluation after update {update}, by kind of task", columns, tuple(rows), tuple(notes))


def _outcome_row(method: str, kind: str, played: pd.DataFrame) -> tuple[Value, ...]:
    """One row of the table of kinds."""
    counted = played[played["counted"]]
    rate = st.wilson(float(counted["success"].sum()), len(counted))
    means = [float(counted[name].mean()) for name in ("score", "steps", "reward")]
    ended = ", ".join(f"{why} {n}" for why, n in played["stop_reason"].value_counts().items())
    return (method, kind, len(counted), rate, *means, len(played) - len(counted), ended)


# -------------------------------------------------------------------------------------------------- method


def method_table(method: Method) -> Table:
    """The method as a point: every axis that means something to it, its value and what it decides."""
    silent = {"name", "summary"}
    if method.advantage and method.advantage.estimator != "gigpo":
        silent |= {"advantage.gamma", "advantage.step_weight"}
    rows = tuple((axis, value, meaning) for axis, value, meaning in _axes(method) if axis not in silent)
    columns = (Column("Axis"), Column("Value"), Column("Meaning"))
    return Table("method", f"{method.name} along the axes of a method", columns, rows)


def _axes(point: Frozen, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, info in type(point).model_fields.items():
        value = getattr(point, name)
        if isinstance(value, BaseModel):
            yield from _axes(value, f"{prefix}{name}.")  # type: ignore[arg-type]  # all of them are Frozen
        else:
            meaning = inspect.getdoc(type(point)) if name == "kind" else info.description
            yield prefix + name, _shown(value), meaning or ABSENT.get(name, "")


def _shown(value: object) -> str:
    """A setting as a recipe spells it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ training


def metric_names(updates: pd.DataFrame) -> list[str]:
    """The numeric metrics of training, without the ledger and the counts of endings."""
    skipped = {"cell", "env", "method", "seed", "card", "update"}
    return [
        name
        for name in map(str, updates.select_dtypes("number"))
        if name not in skipped and not name.startswith(("ledger/", "stop_reasons/"))
    ]


def curves(updates: pd.DataFrame, titles: Mapping[str, str]) -> list[charts.Chart]:
    """A chart of each metric that was logged; shares are printed in percent."""
    drawn = []
    if {"score", "success"} <= set(updates) and updates["score"].equals(updates["success"]):
        updates = updates.drop(columns="score")  # says nothing that success does not
    for name, title in titles.items():
        if name in updates and updates[name].notna().any():
            factor = 100.0 if title.endswith("(%)") else 1.0
            values = [None if pd.isna(value) else factor * float(value) for value in updates[name]]
            line = charts.Series(title, updates["update"].tolist(), values)
            drawn.append(charts.Chart(title, charts.lines(title, [line])))
    return drawn


def _endings(updates: pd.DataFrame) -> Iterator[charts.Chart]:
    """How the training episodes ended."""
    columns = [name for name in updates if str(name).startswith("stop_reasons/")]
    if columns:
        counts = updates[columns].fillna(0).to_numpy(float)
        shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)).T.tolist()
        names = [str(name).removeprefix("stop_reasons/") for name in columns]
        title = "How episodes ended (%)"
        yield charts.Chart(
            title, charts.stacked(title, names, updates["update"].tolist(), shares), charts.legend(names)
        )


# -------------------------------------------------------------------------------------------- distillation


def _distillation(cell: Cell, updates: pd.DataFrame) -> Section:
    """Health of the teacher's signal: metrics of every update, and gate and gap of the tokens that were kept."""
    drawn = curves(updates, DISTILLATION)
    method = cell.config.method
    if method is None or method.teacher is None:
        return Section("distillation", "Distillation", charts=tuple(drawn))
    tokens = token_frame(read_credit(cell.store), read_outcomes(cell.store))
    if tokens.empty:
        note = "No credit of single tokens was kept, so there is neither a histogram of the gate nor a gap by outcome."
        return Section("distillation", "Distillation", (note,), charts=tuple(drawn))
    note = (
        f"Histogram, gap by outcome and the table: {len(tokens):,} distilled tokens of the episodes that were kept with"
        " their credit. D is the teacher's log-probability of a token minus the policy's."
    )
    drawn += token_charts(tokens)
    return Section("distillation", "Distillation", (note,), (outcome_table(tokens),), charts=tuple(drawn))


# -------------------------------------------------------------------------------------------------- ledger


def _ledger(cell: Cell, evaluations: pd.DataFrame, updates: int) -> Section:
    """What the cell spent: altogether, before the first update, and per update."""
    ledger = Ledger(**cell.manifest["ledger"])
    title, spent, before = "Training", ledger.as_dict(), _before(evaluations)
    if not any(spent.values()):
        title, spent, before = "Evaluation", cell.manifest.get("played") or {}, {}
    columns = [Column("Spent"), Column("total", "number", ",.0f")]
    columns += [Column("preparation", "number", ",.0f")] if any(before.values()) else []
    columns += [Column("per update", "number", ",.1f")] if updates else []
    rows: list[tuple[Value, ...]] = []
    for name, value in ((n, v) for n, v in spent.items() if v or n not in EXTERNAL):
        unit, prepared = 1e9 if name == "flops" else 1, before.get(name, 0)
        row: list[Value] = ["GFLOP, estimated" if name == "flops" else name.replace("_", " "), value / unit]
        row += [prepared / unit] if any(before.values()) else []
        row += [(value - prepared) / unit / updates] if updates else []
        rows.append(tuple(row))
    table = Table("ledger", title, tuple(columns), tuple(rows))
    shown = {column: float(getattr(ledger, column)) for column in TOKENS}
    parts = [(name, shown[column]) for column, name in TOKENS.items() if shown[column] or column not in EXTERNAL]
    bar = charts.bar("Tokens of training", parts)
    notes = ("Evaluation is not charged. The bar shows the tokens that training took, by what they were for.",)
    legend = charts.legend([f"{name}: {value:,.0f}" for name, value in parts]) if bar else Markup()
    return Section("ledger", "What it cost", notes if bar else (), (table,) if rows else (), bar + legend)


def _before(evaluations: pd.DataFrame) -> dict[str, float]:
    """The ledger at the first evaluation, which is before the first update."""
    first = evaluations[evaluations["update"] == evaluations["update"].min()].iloc[0]
    return {
        name.removeprefix("ledger/"): float(first[name]) for name in map(str, first.index) if name.startswith("ledger/")
    }


def _provenance(cell: Cell) -> list[tuple[str, str]]:
    """Revision, versions, machine, panels, policy and times."""
    names = (
        "harness",
        "git",
        "versions",
        "machine",
        "policy",
        "library",
        "panel",
        "train_panel",
        "started",
        "finished",
    )
    shown = [("cell", cell.id)]
    for name in names:
        value = cell.manifest.get(name)
        if value is not None:
            shown.append((name.replace("_", " "), in_words(value)))
    return shown
