"""``harness eval``: one evaluation-only cell, stored like any other, and its scores for the terminal."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.config import EnvConfig, EvalConfig
from harness.progress import Board
from harness.recipes import evaluation, resolve_env
from harness.statistics import wilson
from harness.store import CellDir, cell_dir, check_writable

EXCLUDED = ("env_error", "policy_error")
"""Stop reasons of episodes that enter no score."""


def evaluate(
    env: EnvConfig, policy: str, seed: int, settings: EvalConfig, directory: Path, workers: int, console: Console
) -> CellDir:
    """Play a panel unless that was done before; returns the cell's directory. Raises HarnessError for bad input."""
    from harness.policy.load import check_policy_spec

    config = evaluation(resolve_env(env, settings.panel), policy, check_policy_spec(policy), seed, settings)
    place = cell_dir(directory, config)
    if not place.finished:
        check_writable(directory)
        with Board({config.hash: config.title}, 0, console) as board:
            from harness.cell import run_cell

            run_cell(config, place, lambda progress: board.show(config.hash, progress), workers=workers)
    return place


def show(place: CellDir, console: Console) -> None:
    """Print the scores of a finished evaluation: by kind, micro and macro average, and the protocol card."""
    record = place.records("evals.jsonl")[-1]
    config = place.read_json("config.json")
    console.print(scores(record["results"], f"{config['env']['id']}  policy {config['policy']}  seed {config['seed']}"))
    card = Table(title="protocol", title_justify="left", box=None, show_header=False)
    for name, value in record["protocol"].items():
        card.add_row(name.replace("_", " "), str(value))
    console.print(card)
    console.print(f"cell: {place.path}", soft_wrap=True)


def scores(results: list[dict[str, Any]], title: str) -> Table:
    """Success by kind with Wilson 95 % intervals, then over all episodes (micro) and over kinds (macro)."""
    counted = [result for result in results if result["stop_reason"] not in EXCLUDED]
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in counted:
        kinds[result["kind"]].append(result)
    table = Table("kind", "episodes", "success", "95 % interval", "score", "steps", title=title, title_justify="left")
    for kind in sorted(kinds):
        table.add_row(kind, *_row(kinds[kind]))
    if counted:
        table.add_section()
        table.add_row("micro average", *_row(counted))
        rates = [_mean(members, "success") for members in kinds.values()]
        points = [_mean(members, "score") for members in kinds.values()]
        macro = (f"{sum(rates) / len(rates):.1%}", "", f"{sum(points) / len(points):.3f}", "")
        table.add_row("macro average", f"{len(kinds)} kinds", *macro)
    if len(counted) < len(results):
        table.caption = f"{len(results) - len(counted)} episodes ended in an error and are not counted"
    return table


def _row(members: list[dict[str, Any]]) -> tuple[str, ...]:
    wins = sum(bool(member["success"]) for member in members)
    bounds = wilson(wins, len(members))
    return (
        str(len(members)),
        f"{wins / len(members):.1%}",
        f"{bounds.low:.1%} - {bounds.high:.1%}",
        f"{_mean(members, 'score'):.3f}",
        f"{_mean(members, 'steps'):.1f}",
    )


def _mean(members: list[dict[str, Any]], name: str) -> float:
    return sum(float(member[name]) for member in members) / len(members)
