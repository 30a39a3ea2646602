"""Health of a distillation signal, from the credit of single tokens: what the gate does, and to which episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from harness.reporting import charts
from harness.reporting.tables import Column, Table, Value

BINS = 20
"""Of the gate's histogram."""


def token_charts(tokens: pd.DataFrame) -> list[charts.Chart]:
    """Histogram of the gate and gap by outcome, of :func:`token_frame`."""
    return [*_gates(tokens), *_gaps(tokens)]


def token_frame(credit: pd.DataFrame, episodes: pd.DataFrame) -> pd.DataFrame:
    """Distilled tokens, one row each: ``update``, ``success``, ``shift`` (D), ``gate`` (NaN without one)."""
    if credit.empty or episodes.empty:
        return pd.DataFrame(columns=["update", "success", "shift", "gate"])
    name = ["update", "task", "attempt"]
    played = episodes[episodes["phase"] == "train"].drop_duplicates(name)[[*name, "success"]]
    rows = credit[credit["teacher"].notna()].merge(played, on=name)
    lengths = rows["logp"].map(len).to_numpy(int)
    gates = [
        np.full(n, np.nan) if gate is None else np.asarray(gate, float)
        for gate, n in zip(rows["gate"], lengths, strict=True)
    ]
    return pd.DataFrame(
        {
            "update": np.repeat(rows["update"].to_numpy(), lengths),
            "success": np.repeat(rows["success"].to_numpy(bool), lengths),
            "shift": _joined(rows["teacher"]) - _joined(rows["logp"]),
            "gate": np.concatenate(gates) if gates else np.empty(0),
        }
    )


def _joined(lists: pd.Series) -> Any:
    return np.concatenate([np.asarray(values, float) for values in lists]) if len(lists) else np.empty(0)


def _gates(tokens: pd.DataFrame) -> Iterator[charts.Chart]:
    gate = tokens["gate"].dropna().to_numpy()
    if len(gate):
        counts, edges = np.histogram(gate, BINS, (0.0, 1.0))
        title = "Gate of a token (% of tokens)"
        yield charts.Chart(title, charts.histogram(title, edges.tolist(), counts.tolist(), "gate"))


def _gaps(tokens: pd.DataFrame) -> Iterator[charts.Chart]:
    lines = [
        charts.Series(name, means.index.tolist(), means.tolist())
        for name, won in (("success", True), ("failure", False))
        for means in [tokens[tokens["success"] == won].groupby("update")["shift"].mean()]
        if len(means)
    ]
    title = "Teacher gap D by outcome (nats)"
    yield charts.Chart(title, charts.lines(title, lines), charts.legend([line.name for line in lines]))


def outcome_table(tokens: pd.DataFrame) -> Table:
    """The teacher's shift and the gate, by outcome of the episode."""
    columns = (
        Column("Outcome"),
        Column("tokens", "number", ",.0f"),
        Column("mean D", "number", "+.3f"),
        Column("D > 0", "percent"),
        Column("mean gate", "number", ".3f"),
    )
    rows: list[tuple[Value, ...]] = [
        (
            name,
            len(part),
            float(part["shift"].mean()),
            float((part["shift"] > 0).mean()),
            float(part["gate"].mean()) if part["gate"].notna().any() else None,
        )
        for name, won in (("success", True), ("failure", False))
        for part in [tokens[tokens["success"] == won]]
        if len(part)
    ]
    return Table("outcomes", "Teacher gap by outcome", columns, tuple(rows), ("D in nats per token; D > 0 in %.",))
