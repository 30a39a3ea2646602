"""What is registered, as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.contracts import HarnessError
from harness.methods import Method, get_method
from harness.recipes import load_recipe, packaged
from harness.registry import ENVS, METHODS, make_env, registered


def envs() -> Table:
    """Every registered environment with its protocol defaults; one that cannot be built says why."""
    table = Table("environment", "modality", "steps", "history", "panels", "success", box=None)
    for name in registered(ENVS):
        try:
            with closing(make_env(name)) as env:
                card = env.card
        except HarnessError as error:
            table.add_row(name, "-", "-", "-", "-", Text(str(error), "red"))
            continue
        steps, history = str(card.max_steps), str(card.history)
        table.add_row(name, card.modality, steps, history, " ".join(card.panels), card.success)
    return table


def methods() -> Table:
    """Every registered method: what it is, and the point it is in the space of methods."""
    table = Table("method", "what it is, and its start | advantage | teacher | signal", box=None)
    table.columns[0].no_wrap = True
    for name in registered(METHODS):
        method = get_method(name)
        table.add_row(name, Text.assemble(f"{method.summary}\n", (" | ".join(_point(method)), "dim")))
    return table


def _point(method: Method) -> tuple[str, ...]:
    """A method's axes in words."""
    start = method.start + (", skills in prompts" if method.rollout == "library" else "")
    if method.evaluation != ("plain",):
        start += ", evaluated " + " and ".join("with skills" if e == "library" else "plain" for e in method.evaluation)
    advantage = f"{method.advantage.estimator} by {method.advantage.statistics}" if method.advantage else "-"
    teacher = f"{method.teacher.weights} x {method.teacher.context}" if method.teacher else "-"
    signal = f"{method.signal.coefficient:g} x {method.signal.kind}" if method.signal else "-"
    return start, advantage, teacher, signal


def recipes() -> Table:
    """Every packaged recipe with its grid: environments x methods x seeds."""
    table = Table("recipe", "what it compares", "envs x methods x seeds", box=None)
    table.columns[2].no_wrap = True
    table.columns[0].no_wrap = True
    for name in packaged():
        recipe = load_recipe(name)
        places = ", ".join(plan.env.id for plan in recipe.envs)
        size = f"{len(recipe.envs)} x {len(recipe.methods)} x {len(recipe.seeds)}"
        grid = f"{recipe.policy} on {places}: {', '.join(recipe.methods)}"
        table.add_row(name, Text.assemble(f"{recipe.summary}\n", (grid, "dim")), size)
    return table


def panels(env_id: str | None, options: Mapping[str, Any]) -> Table:
    """Names of every environment's panels; for one environment also size, hash and kinds, which builds them."""
    if env_id is None:
        table = Table("environment", "panels", box=None)
        for name in registered(ENVS):
            with closing(make_env(name)) as env:
                table.add_row(name, " ".join(env.card.panels))
        return table
    table = Table("panel", "tasks", "hash", "kinds", "notes", box=None)
    with closing(make_env(env_id, options)) as env:
        for name in env.card.panels:
            try:
                panel = env.panel(name)
            except HarnessError as error:
                table.add_row(name, "-", "-", "-", Text(str(error), "red"))
                continue
            kinds = Counter(task.kind for task in panel)
            text = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            table.add_row(name, str(len(panel)), panel.hash, text, "; ".join(panel.notes))
    return table
