"""``harness eval``: one evaluation-only cell, stored like any other, and its scores for the terminal."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from harness.config import EnvConfig, EvalConfig, Precision
from harness.contracts import UNCOUNTED, HarnessError
from harness.policy.api import Calls
from harness.progress import Board
from harness.recipes import evaluation, resolve_env
from harness.reporting.statistics import (
    Outcomes,
    macro,
    macro_replicates,
    seed_draws,
    success_interval,
    task_draws,
    wilson,
)
from harness.store import CellDir, cell_dir, check_writable


def evaluate(
    env: EnvConfig,
    policy: str,
    precision: Precision,
    seed: int,
    settings: EvalConfig,
    directory: Path,
    workers: int,
    calls: Calls,
    console: Console,
) -> CellDir:
    """Play what is missing of a panel; returns the cell's directory. Raises HarnessError for bad input."""
    from harness.policy.load import check_policy_spec, trainable

    if precision != "float32" and not trainable(policy):
        raise HarnessError(f"--precision is for models that run here, and {policy!r} is none")
    config = evaluation(resolve_env(env, settings.panel), policy, check_policy_spec(policy), seed, settings)
    config = config.model_copy(update={"precision": precision})
    place = cell_dir(directory, config)
    if not place.finished:
        check_writable(directory)
        with Board({config.hash: config.title}, 0, console) as board:
            from harness.cell import run_cell

            run_cell(config, place, lambda progress: board.show(config.hash, progress), workers, calls)
    return place


def show(place: CellDir, console: Console, prices: tuple[float, float] | None = None) -> None:
    """Print a finished evaluation: scores by kind, micro and macro average, the protocol card, the panel's notes.

    Args:
        prices: Of a million prompt tokens and a million answer tokens, to print what the episodes cost.
    """
    record = place.records("evals.jsonl")[-1]
    config = place.read_json("config.json")
    console.print(scores(record["results"], f"{config['env']['id']}  policy {config['policy']}  seed {config['seed']}"))
    card = Table(title="protocol", title_justify="left", box=None, show_header=False)
    for name, value in record["protocol"].items():
        card.add_row(name.replace("_", " "), str(value))
    console.print(card)
    for note in place.read_json("manifest.json")["panel"]["notes"]:
        console.print(f"panel: {note}", soft_wrap=True)
    if spent := tokens(place.read_json("manifest.json").get("played") or {}, prices):
        console.print(spent, highlight=False)
    console.print(f"cell: {place.path}", soft_wrap=True)


def tokens(played: dict[str, int], prices: tuple[float, float] | None) -> str:
    """What an evaluation took in tokens, and in money where prices are given; empty where no endpoint counted any."""
    asked, answered = played.get("prompt_tokens", 0), played.get("sampled_tokens", 0)
    if not asked:
        return ""
    cost = f"  cost: {(asked * prices[0] + answered * prices[1]) / 1e6:.4f}" if prices else ""
    return f"tokens: {asked:,} of prompts, {answered:,} of answers{cost}"


def scores(results: list[dict[str, Any]], title: str) -> Table:
    """Success by kind with Wilson 95 % intervals, then over all episodes (micro) and over kinds (macro)."""
    counted = [result for result in results if result["stop_reason"] not in UNCOUNTED]
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in counted:
        kinds[result["kind"]].append(result)
    first = Column("kind", overflow="fold", no_wrap=True)
    table = Table(first, "episodes", "success", "95 % interval", "score", "steps", title=title, title_justify="left")
    for kind in sorted(kinds):
        table.add_row(kind, *_row(kinds[kind]))
    if counted:
        table.add_section()
        table.add_row("micro average", *_row(counted))
        table.add_row("macro average", f"{len(kinds)} kinds", *_macro(counted))
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


def _macro(counted: list[dict[str, Any]]) -> tuple[str, ...]:
    """Mean over kinds; its interval from a bootstrap over the tasks of each kind."""
    tasks = {result["task"]: result["kind"] for result in counted}
    place = {task: number for number, task in enumerate(tasks)}
    total, count, score = np.zeros((3, 1, len(tasks)))
    for result in counted:
        total[0, place[result["task"]]] += result["success"]
        score[0, place[result["task"]]] += result["score"]
        count[0, place[result["task"]]] += 1
    outcomes = Outcomes(total, count, tuple(tasks.values()))
    draws = seed_draws(1, "seeds"), task_draws(outcomes.kinds, "tasks")
    bounds = success_interval(macro(outcomes), macro_replicates(outcomes, *draws), len(tasks))
    points = macro(Outcomes(score, count, outcomes.kinds))
    return f"{bounds.value:.1%}", f"{bounds.low:.1%} - {bounds.high:.1%}", f"{points:.3f}", ""


def _mean(members: list[dict[str, Any]], name: str) -> float:
    return sum(float(member[name]) for member in members) / len(members)
