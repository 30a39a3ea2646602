"""The report of a run: a static site, tables as CSV, Markdown and LaTeX, figures as PNG and SVG.

``report.html`` is the overview; ``harness.reporting.site`` says where the other pages lie. They open from disk without
a network. Everything a model or a configuration wrote is escaped in them.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.text import Text

from harness.records import episodes_recorded
from harness.reporting import comparison_tables as build
from harness.reporting import figures
from harness.reporting.comparison import BUDGETS, Comparison, check_budget, compare
from harness.reporting.frames import Cell, evaluations_of, in_words, read_cells, updates_of
from harness.reporting.published import load
from harness.reporting.published_table import published_table
from harness.reporting.site import FOLDER, OVERVIEW, write_assets, write_page
from harness.reporting.site_cells import cell_page, write_cell_page
from harness.reporting.site_episodes import most_per_cell, write_episode_pages
from harness.reporting.site_skills import write_skill_page
from harness.reporting.tables import Table, cards_csv, latex, markdown, rich_table, to_csv
from harness.store import write_bytes, writing

BUDGET_COLUMNS = ("episodes", "sampled_tokens", "cpu_seconds")
"""Budgets of sample efficiency where none are named."""

GENERATED = {
    "tables": ("comparison", "differences", "efficiency", "matched-budget", "kinds-*", "ledger", "runs", "published"),
    "figures": ("final", "efficiency-*", "dynamics-*"),
}
ENDINGS = (".csv", ".md", ".tex", ".png", ".svg")
"""Names of what a report may write into these folders, and their endings; other files are somebody else's."""


@dataclass(frozen=True)
class Picture:
    """A figure of the overview: file name without ending, name on its tab, caption, size in CSS pixels."""

    name: str
    label: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Section:
    """A part of the overview; figures stand above the tables or below them."""

    id: str
    title: str
    tables: list[Table]
    figures: list[Picture]
    figures_first: bool = False


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


def write_report(
    directory: Path,
    published: Path | None = None,
    budgets: Sequence[str] = BUDGET_COLUMNS,
    threshold: float | None = None,
    prices: tuple[float, float] | None = None,
) -> Path:
    """Write ``report.html``, ``report/``, ``tables/`` and ``figures/`` into a run's directory; returns the page's path.

    Args:
        published: Directory of published numbers to put beside the measured ones.
        budgets: Names of ``comparison.BUDGETS`` at which sample efficiency is measured and drawn.
        threshold: Success, from 0 to 1, whose price is asked; None: the reference's final success.
        prices: Of a million prompt tokens and a million answer tokens of external annotators, to tell what they cost.

    Raises HarnessError where no cell is finished, a file is broken, a budget has no such name or the directory cannot
    be written.
    """
    results = read(directory)
    budgets = [check_budget(name) for name in dict.fromkeys(budgets)]
    found = tables(results, published, budgets, threshold, prices)
    # Made beside the old one and put in its place when it is whole, so that a broken file leaves no half of a report.
    with writing(directory), tempfile.TemporaryDirectory(prefix=".report-", dir=directory) as made:
        site = Path(made) / directory.resolve().name  # pages name the run by its directory
        for folder in GENERATED:
            (site / folder).mkdir(parents=True)
        for table in found.values():
            for ending, text in (("csv", to_csv(table)), ("md", markdown(table)), ("tex", latex(table))):
                write_bytes(site / "tables" / f"{table.name}.{ending}", text.encode())
        write_bytes(site / "tables" / "protocol.csv", cards_csv(results.comparison.cards).encode())
        pictures = {group: list(_draw(results, group, budgets, site)) for group in ("efficiency", "final", "dynamics")}
        write_assets(site)
        most = most_per_cell([episodes_recorded(cell.store) for cell in results.cells])
        links = {cell.id: _write_cell(results, cell, site, most) for cell in results.cells}
        _write_overview(results, found, pictures, links, site)
        _replace(directory, site)
    return directory / OVERVIEW


def _replace(directory: Path, site: Path) -> None:
    """Put a report in place of the last one; tables and figures that only the last one had go with it.

    The overview goes first and comes last, so that half of a report is none, and is written again.
    """
    (directory / OVERVIEW).unlink(missing_ok=True)
    shutil.rmtree(directory / FOLDER, ignore_errors=True)  # no pages of cells that are gone
    (site / FOLDER).replace(directory / FOLDER)
    for folder, names in GENERATED.items():
        (directory / folder).mkdir(exist_ok=True)
        for old in (path for name in names for path in (directory / folder).glob(f"{name}.*")):
            if old.suffix in ENDINGS:
                old.unlink()
        for new in (site / folder).iterdir():
            new.replace(directory / folder / new.name)
    (site / OVERVIEW).replace(directory / OVERVIEW)


def tables(
    results: Results,
    published: Path | None = None,
    budgets: Sequence[str] = BUDGET_COLUMNS,
    threshold: float | None = None,
    prices: tuple[float, float] | None = None,
) -> dict[str, Table]:
    """All tables of a report by name; those without rows are left out."""
    comparison = results.comparison
    found = [
        build.comparison_table(comparison),
        build.paired_table(comparison),
        build.efficiency_table(comparison, budgets, threshold),
        build.matched_budget_table(comparison, budgets),
        *(build.kinds_table(comparison, s) for s in comparison.settings if len(set(s.kinds)) > 1),
        build.ledger_table(comparison, prices),
        build.seeds_table(comparison, results.evaluations),
        *([published_table(comparison, load(published))] if published else []),
    ]
    return {table.name: table for table in found if table.rows}


# ------------------------------------------------------------------------------------------------- figures


def _draw(results: Results, group: str, budgets: Sequence[str], site: Path) -> Iterator[Picture]:
    """Draw a group of figures, write each as PNG and SVG, and yield it for the page."""
    comparison = results.comparison
    trained = any(arm.trained for arm in comparison.arms.values())
    drawn: list[tuple[str, str, str, Figure | None]] = []
    if group == "final":
        caption = "Final success; bars are 95 % intervals over seeds and tasks, small dots single seeds."
        drawn.append(("final", "Final success", caption, figures.final_success(comparison)))
    elif group == "efficiency" and trained:
        for name in budgets:
            budget = BUDGETS[name]
            if any(arm.spent(name).any() for arm in comparison.arms.values()):
                bands = "; bands are 95 % intervals over seeds and tasks" if figures.banded(comparison) else ""
                caption = (
                    f"Success on the evaluation panel against {budget.short}{bands}. A curve starts where its "
                    "preparation (SEED's stage 1) has been paid."
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
            for kind, data in figures.render(drawing).items():
                write_bytes(site / "figures" / f"{name}.{kind}", data)
            width, height = (round(96 * inches) for inches in drawing.get_size_inches())
            yield Picture(name, label, caption, width, height)


# --------------------------------------------------------------------------------------------------- pages


def _write_cell(results: Results, cell: Cell, site: Path, most: int) -> list[tuple[str, str]]:
    """Write all pages of a cell, on at most so many episodes; returns their (label, path), the cell's own first."""
    evaluations = results.evaluations
    written = [
        ("episodes", write_episode_pages(cell, site, most)),
        ("skills", write_skill_page(cell, site)),
    ]
    others = [(label, path) for label, path in written if path]
    write_cell_page(cell, site, evaluations[evaluations["cell"] == cell.id], others)
    return [(cell.id, cell_page(cell)), *others]


def _write_overview(
    results: Results,
    found: dict[str, Table],
    pictures: dict[str, list[Picture]],
    links: dict[str, list[tuple[str, str]]],
    site: Path,
) -> None:
    recipe = results.directory / "recipe.yaml"
    write_page(
        site,
        OVERVIEW,
        "overview.html.j2",
        results.directory.resolve().name,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        comparison=results.comparison,
        cells=results.cells,
        warnings=list(_warnings(results)),
        sections=_sections(found, pictures),
        links=links,
        cards=results.comparison.cards,
        provenance=_provenance(results.cells),
    )


def _sections(found: dict[str, Table], pictures: dict[str, list[Picture]]) -> list[Section]:
    """The overview's parts in order, without the empty ones; a table that no part asks for stands in the last but one.

    A table belongs to the part that names it or the beginning of its name up to a dash.
    """
    plan = (
        ("result", "Result", ("comparison",), "final", False),
        ("efficiency", "Sample efficiency", ("efficiency", "matched"), "efficiency", True),
        ("differences", "Paired differences", ("differences",), "", False),
        ("published", "Published and measured", ("published",), "", False),
        ("kinds", "Kinds of task", ("kinds",), "", False),
        ("ledger", "What it cost", ("ledger",), "", False),
        ("dynamics", "Training", (), "dynamics", False),
        ("more", "More tables", None, "", False),
        ("runs", "Every run", ("runs",), "", False),
    )
    placed = {name for _, _, names, _, _ in plan for name in names or ()}
    made = []
    for key, title, names, group, first in plan:
        heads = {name: name.split("-", 1)[0] for name in found}
        chosen = [
            found[name] for name, head in heads.items() if (head in names if names is not None else head not in placed)
        ]
        made.append(Section(key, title, chosen, pictures.get(group, []), first))
    return [section for section in made if section.tables or section.figures]


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
            yield f"{cell.title}: {warning}"
    notes = {(c.config.env.id, note) for c in results.cells for note in c.manifest["panel"].get("notes", [])}
    for env, note in sorted(notes):
        yield f"{env}, evaluation panel: {note}"


def _provenance(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Revision, versions and machines that the cells ran on, each distinct one once."""
    found: dict[str, dict[str, None]] = {"harness": {}, "git": {}, "versions": {}, "machine": {}}
    for cell in cells:
        for name, seen in found.items():
            value = cell.manifest.get(name)
            seen.setdefault(in_words(value))
    return {name: list(seen) for name, seen in found.items()}
