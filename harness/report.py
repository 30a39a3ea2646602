"""The report of a run: one self-contained HTML page, tables as CSV, Markdown and LaTeX, figures as PNG and SVG.

The page opens from disk without a network. Everything a model or a configuration wrote is escaped in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.text import Text

from harness import comparison_tables as build
from harness import figures
from harness.comparison import BUDGETS, Comparison, compare
from harness.frames import Cell, card_rows, episodes_of, evaluations_of, read_cells, skills_of, updates_of
from harness.statistics import Estimate
from harness.store import write_bytes, writing
from harness.tables import Table, Value, cards_csv, latex, markdown, rich_table, to_csv

BUDGET_COLUMNS = ("episodes", "sampled_tokens", "cpu_seconds")
"""Budgets of the sample-efficiency table."""


@dataclass(frozen=True)
class Picture:
    """A figure of the page: file name without ending, name on its tab, caption, SVG source."""

    name: str
    label: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Results:
    """Everything a report is made of, read once."""

    directory: Path
    cells: list[Cell]
    unfinished: list[str]
    evaluations: pd.DataFrame
    comparison: Comparison


def read(directory: Path) -> Results:
    """Read a run's directory. Raises HarnessError where nothing is finished or a file is broken."""
    cells, unfinished = read_cells(directory)
    evaluations = evaluations_of(cells)
    return Results(directory, cells, unfinished, evaluations, compare(cells, evaluations))


def comparison_text(directory: Path) -> RenderableType:
    """The comparison and its paired differences for the terminal, protocol cards below."""
    results = read(directory)
    differences = build.paired_table(results.comparison)
    first = build.comparison_table(results.comparison)
    parts: list[RenderableType] = [rich_table(first)]
    if differences.rows:
        parts = [rich_table(dataclasses.replace(first, cards=())), Text(), rich_table(differences)]
    if results.unfinished:
        parts.append(Text(f"Unfinished, not in the tables: {', '.join(results.unfinished)}", style="yellow"))
    return Group(*parts)


def write_report(directory: Path) -> Path:
    """Write ``report.html``, ``tables/`` and ``figures/`` into a run's directory; returns the page's path.

    Raises HarnessError where no cell is finished, a file is broken or the directory cannot be written.
    """
    results = read(directory)
    found = tables(results)
    for folder in ("tables", "figures"):
        with writing(directory / folder):
            (directory / folder).mkdir(exist_ok=True)
    for table in found.values():
        for ending, text in (("csv", to_csv(table)), ("md", markdown(table)), ("tex", latex(table))):
            write_bytes(directory / "tables" / f"{table.name}.{ending}", text.encode())
    write_bytes(directory / "tables" / "protocol.csv", cards_csv(results.comparison.cards).encode())
    pictures = {group: list(_draw(results, group)) for group in ("efficiency", "final", "dynamics")}
    page = directory / "report.html"
    write_bytes(page, _page(results, found, pictures).encode())
    return page


def tables(results: Results) -> dict[str, Table]:
    """All tables of a report by name; those without rows are left out."""
    comparison = results.comparison
    found = [
        build.comparison_table(comparison),
        build.paired_table(comparison),
        build.efficiency_table(comparison, BUDGET_COLUMNS),
        *(build.kinds_table(comparison, s) for s in comparison.settings if len(set(s.kinds)) > 1),
        build.ledger_table(comparison),
        build.seeds_table(comparison, results.evaluations),
    ]
    return {table.name: table for table in found if table.rows}


# ------------------------------------------------------------------------------------------------- figures


def _draw(results: Results, group: str) -> Iterator[Picture]:
    """Draw a group of figures, write each as PNG and SVG, and yield it for the page."""
    comparison, folder = results.comparison, results.directory / "figures"
    trained = any(arm.trained for arm in comparison.arms.values())
    drawn: list[tuple[str, str, str, Figure | None]] = []
    if group == "final":
        caption = "Final success; bars are 95 % intervals over seeds and tasks, small dots single seeds."
        drawn.append(("final", "Final success", caption, figures.final_success(comparison)))
    elif group == "efficiency" and trained:
        for name, budget in BUDGETS.items():
            if any(arm.spent(name).any() for arm in comparison.arms.values()):
                caption = (
                    f"Success on the evaluation panel against {budget.short}; bands are 95 % intervals over seeds and "
                    "tasks. A curve starts where its preparation (SEED's stage 1) has been paid."
                )
                figure = figures.sample_efficiency(comparison, name)
                drawn.append((f"efficiency-{name}", budget.label, caption, figure))
    elif group == "dynamics" and trained:
        updates = updates_of(results.cells)
        for name, metrics in figures.DYNAMICS.items():
            caption = "Thick: mean over seeds; thin: single seeds."
            drawn.append(
                (f"dynamics-{name}", name.capitalize(), caption, figures.dynamics(comparison, updates, metrics))
            )
    for name, label, caption, drawing in drawn:
        if drawing is not None:
            rendered = figures.render(drawing)
            for kind, data in rendered.items():
                write_bytes(folder / f"{name}.{kind}", data)
            yield Picture(name, label, caption, inline(rendered["svg"].decode(), name))


def inline(svg: str, name: str) -> Markup:
    """An SVG file as an element of a page: no prologue, and ids that no other figure has."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    return Markup(element.replace("<svg ", '<svg role="img" ', 1))  # matplotlib's own output, labels escaped by it


# ---------------------------------------------------------------------------------------------------- page


def _page(results: Results, found: dict[str, Table], pictures: dict[str, list[Picture]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["zip"] = zip
    environment.filters["sort_key"] = sort_key
    environment.filters["by_method"] = by_method
    environment.filters["card_rows"] = card_rows
    recipe = results.directory / "recipe.yaml"
    template = environment.get_template("report.html.j2")
    text = template.render(
        title=results.directory.resolve().name,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        comparison=results.comparison,
        cells=results.cells,
        unfinished=results.unfinished,
        warnings=list(_warnings(results)),
        tables=found,
        pictures=pictures,
        skills=_skill_samples(results),
        episodes=_episode_samples(results),
        provenance=_provenance(results.cells),
    )
    return text.lstrip() + "\n"


def sort_key(value: Value) -> str | float:
    """What a column is sorted by when its heading is clicked."""
    if isinstance(value, Estimate):
        return value.value
    return "" if value is None else value


def by_method(samples: Sequence[dict[str, Any]]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Samples in groups of one environment and method."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["env"], sample["method"]), []).append(sample)
    return list(groups.items())


def _warnings(results: Results) -> Iterator[str]:
    """What a reader must know before believing a number."""
    yield from results.comparison.card_notes
    if results.unfinished:
        yield f"Unfinished, not in this report: {', '.join(results.unfinished)}."
    excluded = int((~results.evaluations["counted"]).sum())
    if excluded:
        yield f"{excluded} evaluated episodes crashed (environment or endpoint) and enter no score."
    for cell in results.cells:
        for warning in cell.manifest.get("warnings", []):
            yield f"{cell.config.title}: {warning}"
    notes = {(c.config.env.id, note) for c in results.cells for note in c.manifest["panel"].get("notes", [])}
    for env, note in sorted(notes):
        yield f"{env}, evaluation panel: {note}"


def _provenance(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Revision, versions and machines that the cells ran on, each distinct one once."""
    found: dict[str, dict[str, None]] = {"harness": {}, "git": {}, "versions": {}, "machine": {}}
    for cell in cells:
        for name, seen in found.items():
            value = cell.manifest.get(name)
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            seen.setdefault(text)
    return {name: list(seen) for name, seen in found.items()}


# ------------------------------------------------------------------------------------------------- samples


def _skill_samples(results: Results) -> list[dict[str, Any]]:
    """Of each method's first run: a skill of a success and of a failure at the first, middle and last update."""
    samples: list[dict[str, Any]] = []
    for cell in _first_runs(results.cells):
        frame = skills_of([cell])
        if frame.empty:
            continue
        moments = sorted(frame["update"].unique())
        chosen = frame[frame["update"].isin({moments[0], moments[len(moments) // 2], moments[-1]})]
        best_first = chosen.sort_values("usable", ascending=False, kind="stable")
        malformed = frame[~frame["usable"].astype(bool)]
        sample = pd.concat([best_first.groupby(["update", "success"]).head(1), malformed.head(1)])
        samples += sample[~sample.index.duplicated()].sort_index().to_dict("records")  # type: ignore[arg-type]
    return samples


def _episode_samples(results: Results) -> list[dict[str, Any]]:
    """Of each method's first run: a success and a failure of the last evaluation, step by step."""
    samples: list[dict[str, Any]] = []
    for cell in _first_runs(results.cells):
        frame = episodes_of(cell)
        if frame.empty:
            continue
        frame = frame[frame["phase"] == "eval"]
        for _, part in frame[frame["update"] == frame["update"].max()].groupby("success"):
            record: dict[str, Any] = part.iloc[0].to_dict()
            samples.append({**cell.key, **record, "steps": json.loads(record["trace"])})
    return samples


def _first_runs(cells: Sequence[Cell]) -> list[Cell]:
    """The cell with the lowest seed of every environment, card and method."""
    first: dict[tuple[Any, ...], Cell] = {}
    for cell in sorted(cells, key=lambda c: c.config.seed):
        first.setdefault((cell.key["env"], cell.key["card"], cell.method), cell)
    return list(first.values())
