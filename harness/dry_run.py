"""``harness run RECIPE --dry-run``: the cells, and what each of them will take, with where every number comes from.

Nothing is downloaded: a model of the hub that is not on this machine is known by its published size, if at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.config import CellConfig, EnvConfig, LoraConfig, Recipe
from harness.contracts import DataMissing
from harness.estimate import (
    ANALYSIS,
    ANSWER,
    PROMPT,
    STEPS,
    Lengths,
    Memory,
    Speed,
    Work,
    flops,
    memory_of,
    seconds,
    work_of,
)
from harness.measured import finished_cells, gpu_check, kind_of, measured_lengths, measured_rate, speed_of
from harness.policy import load
from harness.policy.sizes import Size, directory_at_hand, size_of
from harness.recipes import Lookup, expand, require_skills, resolve_env
from harness.registry import make_env
from harness.store import cell_dir

NOT_HERE = "unknown until it is downloaded"
"""Fingerprint of a model that is not on this machine."""

WIDTH = 124
"""Characters that the table of estimates takes, however narrow the terminal."""


@dataclass(frozen=True)
class Plan:
    """What a cell will take.

    Attributes:
        absent: Which data of its environment are not here, one line; empty where they are.
        size: Of its policy; None where it has no weights of its own, or nobody knows how many.
        hours: On one GPU at ``speed``, or on this machine at ``rate``; None: unknown.
        speed: Of a GPU.
        rate: FLOP/s that finished cells of this environment and policy reached here; None where there are none.
    """

    cell: CellConfig
    finished: bool
    work: Work
    lengths: Lengths
    absent: str
    size: Size | None
    flops: float | None = None
    memory: Memory | None = None
    hours: float | None = None
    speed: Speed | None = None
    rate: float | None = None

    @property
    def uncounted(self) -> bool:
        """Whether nobody knows how many episodes its evaluations have."""
        return bool(self.absent) and not self.cell.eval.panel_size


def show(recipe: Recipe, directory: Path, console: Console) -> None:
    """Print the cells of a recipe, what each will take, and why we think so. Raises HarnessError for a bad recipe."""
    cells = expand(recipe, Lookup(planned_fingerprint, planned_env, planned_skills))
    console.print(_cells_table(recipe, cells, directory))
    plans = plans_of(recipe, cells, directory)
    console.print()
    narrow, console.width = console.width, max(console.width, WIDTH)
    console.print(_estimates_table(plans))
    console.width = narrow
    largest = max(plans, key=lambda plan: plan.memory.peak if plan.memory else 0.0)
    if largest.memory and largest.memory.peak > 1e9:
        console.print()
        console.print(_memory_table(recipe, largest))
    unread = len(list(directory.glob("cells/*/manifest.json"))) - len(finished_cells(directory))
    if unread:
        console.print(
            f"{unread} finished cells in {directory} are of another version: nothing was measured in them",
            soft_wrap=True,
        )
    for line in _basis(recipe, plans):
        console.print(line, soft_wrap=True)


def _known(cell: CellConfig) -> bool:
    """Whether the cell's hash is that of a run: all its weights are on this machine."""
    return NOT_HERE not in (cell.policy_fingerprint, cell.teacher_fingerprint)


def planned_fingerprint(spec: str) -> str:
    """The fingerprint of a policy, ``NOT_HERE`` for a hub id that is not on this machine."""
    if spec in load.PACKAGED or not load.trainable(spec):
        return load.check_policy_spec(spec)
    directory = directory_at_hand(spec)
    return NOT_HERE if directory is None else load.check_policy_spec(str(directory))


def planned_env(config: EnvConfig, panel: str) -> EnvConfig:
    """As a run resolves it; without its data as the recipe states it, which must then be all that decides a cell."""
    try:
        return resolve_env(config, panel)
    except DataMissing:
        if None in (config.history, config.max_steps):
            raise
        return config


def planned_skills(cells: Sequence[CellConfig]) -> None:
    """Check the skills of panels whose data are there."""
    with suppress(DataMissing):
        require_skills(cells)


def plans_of(recipe: Recipe, cells: Sequence[CellConfig], directory: Path) -> list[Plan]:
    """What each cell will take."""
    done = [one for one in finished_cells(directory) if one[1].train]
    check = gpu_check()

    @cache
    def tasks(env_id: str, options: str, panel: str) -> tuple[int, str]:
        try:
            with closing(make_env(env_id, json.loads(options))) as env:
                return len(env.panel(panel)), ""
        except DataMissing as error:
            return 0, str(error)

    def plan(cell: CellConfig) -> Plan:
        alike = [one for one in done if kind_of(one[1]) == kind_of(cell)]
        lengths = measured_lengths(cell, alike)
        size, teacher = known_size(cell.policy), known_size(cell.teacher) if cell.teacher else None
        options = json.dumps(cell.env.options, sort_keys=True)
        count, absent = tasks(cell.env.id, options, cell.eval.panel)
        work = work_of(cell, lengths, cell.eval.panel_size or count)
        finished = _known(cell) and cell_dir(directory, cell).finished
        if size is None or (cell.teacher and teacher is None):
            return Plan(cell, finished, work, lengths, absent, size)
        total, rate, speed = flops(cell, work, size, teacher), measured_rate(alike), speed_of(cell, size, check)
        hours = seconds(cell, work, size, speed, teacher) / 3600 if recipe.needs.gpus else None
        if rate is not None:
            hours = (total + 2.0 * size.parameters * work.evaluation) / rate / 3600
        memory = memory_of(cell, size, teacher, gpu_memory=speed.memory)
        return Plan(cell, finished, work, lengths, absent, size, total, memory, hours, speed, rate)

    return [plan(cell) for cell in cells]


@cache
def known_size(spec: str) -> Size | None:
    """The size of a policy with weights of its own; None for scripted ones, endpoints and unknown models."""
    return size_of(spec) if load.trainable(spec) else None


# --------------------------------------------------------------------------------------------------- tables


def _cells_table(recipe: Recipe, cells: Sequence[CellConfig], directory: Path) -> Table:
    table = Table("cell", "environment", "method", "seed", "updates", "state", title=f"recipe {recipe.name}", box=None)
    for cell in cells:
        here = _known(cell)
        state = "finished" if here and cell_dir(directory, cell).finished else "missing"
        method = cell.method.name if cell.method else f"{cell.policy} (evaluation)"
        updates = str(cell.train.updates) if cell.train else "-"
        table.add_row(cell.hash if here else "-", cell.env.id, method, str(cell.seed), updates, state)
    return table


COLUMNS = {
    "episodes": "episodes",
    "env_steps": "env steps",
    "sampled_tokens": "sampled",
    "analyzer_tokens": "analyzer",
    "rescored_tokens": "re-scored",
    "trained_tokens": "trained",
    "evaluation_episodes": "evaluated",
}


def _estimates_table(plans: Sequence[Plan]) -> Table:
    """A line for every cell apart from its seed, and the sum over the cells that are missing."""
    table = Table("method", "cells", title="each cell takes about", box=None)
    table.columns[0].no_wrap = True
    for title in (*COLUMNS.values(), "FLOP", "GB", "hours"):
        table.add_column(title, justify="right")
    kinds: dict[tuple[str, str], list[Plan]] = {}
    for plan in plans:
        name = plan.cell.method.name if plan.cell.method else plan.cell.policy
        kinds.setdefault((plan.cell.env.id, name), []).append(plan)
    for env_id in dict.fromkeys(env_id for env_id, _ in kinds):
        table.add_row(env_id)
        for (place, name), same in kinds.items():
            if place == env_id:
                one = same[0]
                memory = one.memory.peak / 1e9 if one.memory else None
                table.add_row(
                    f"  {name}", str(len(same)), *_numbers(one.work, one.flops, memory, one.hours, one.uncounted)
                )
    missing = [plan for plan in plans if not plan.finished]
    total = sum((plan.work for plan in missing), Work())
    uncounted = any(plan.uncounted for plan in missing)
    sums = _numbers(total, _sum(missing, "flops"), None, _sum(missing, "hours"), uncounted)
    table.add_row("all that is missing", str(len(missing)), *sums)
    return table


def _sum(plans: Sequence[Plan], name: str) -> float | None:
    values = [getattr(plan, name) for plan in plans if getattr(plan, name) is not None]
    return sum(values) if values else None


def _numbers(
    work: Work, floating: float | None, memory: float | None, hours: float | None, uncounted: bool
) -> list[str]:
    """The cells of a line; where evaluations are ``uncounted``, what they are part of is a lower bound."""
    least = "≥" if uncounted else ""
    counts = [short(getattr(work, name)) for name in COLUMNS]
    counts[-1] = least + counts[-1]
    counts.append("-" if floating is None else short(floating))
    told = ["-" if value is None else decimal(value) for value in (memory, hours)]
    return [*counts, told[0], least * (hours is not None) + told[1]]


def decimal(number: float) -> str:
    """A number in three digits, from a hundredth on."""
    if 0 < number < 0.01:
        return "<0.01"
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def short(number: float) -> str:
    """A count in three digits: 980, 12.3k, 4.56M, 7.89G, 1.23T, ..."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if number < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}Z"


def _memory_table(recipe: Recipe, plan: Plan) -> Table:
    """Where the memory of the largest cell goes, as its recipe says and with one thing changed."""
    cell, size = plan.cell, plan.size
    name, variants = cell.method.name if cell.method else cell.policy, {"as the recipe says": cell}
    teacher = known_size(cell.teacher) if cell.teacher else None
    if cell.train:
        variants |= _memory_variants(cell, cell.train.gradient_checkpointing, cell.train.lora)
    gpus = max(1, int(recipe.needs.gpus))
    memories = {title: memory_of(other, size, teacher) for title, other in variants.items()} if size else {}
    if size and cell.train and gpus > 1:
        memories[f"each of {gpus} GPUs, FSDP2"] = memory_of(cell, size, teacher, gpus)
    table = Table("GB on a GPU", *memories, title=f"memory of the largest cell, {cell.env.id} {name}", box=None)
    for part in [*(f.name for f in fields(Memory)), "peak"]:
        table.add_row(part, *(decimal(getattr(memory, part) / 1e9) for memory in memories.values()))
    return table


def _memory_variants(cell: CellConfig, checkpointing: bool, lora: LoraConfig | None) -> dict[str, CellConfig]:
    def changed(**settings: Any) -> CellConfig:
        train = cell.train.model_copy(update=settings) if cell.train else None
        return cell.model_copy(update={"train": train})

    other = "no checkpointing" if checkpointing else "checkpointing"
    weights = "all weights" if lora else "LoRA"
    return {
        other: changed(gradient_checkpointing=not checkpointing),
        weights: changed(lora=None if lora else LoraConfig()),
    }


# --------------------------------------------------------------------------------------------------- basis


def _basis(recipe: Recipe, plans: Sequence[Plan]) -> list[str]:
    """Where the numbers come from, in lines."""
    lines = [""]
    for env_id in dict.fromkeys(plan.cell.env.id for plan in plans):
        lengths = max(
            (plan for plan in plans if plan.cell.env.id == env_id), key=lambda plan: plan.work.episodes
        ).lengths
        analyses = f"; analyses {lengths.analysis_prompt:,.0f} + {lengths.analysis_answer:,.0f}"
        lines.append(
            f"{env_id} ({lengths.basis}): {lengths.steps:.1f} steps an episode; tokens a step: prompt "
            f"{lengths.prompt:,.0f}, answer {lengths.answer:,.0f}{analyses if lengths.analysis_answer else ''}"
        )
    for env_id, absent, stated in dict.fromkeys((p.cell.env.id, p.absent, bool(p.cell.eval.panel_size)) for p in plans):
        if absent:
            left_out = "" if stated else ", and its evaluations are not counted"
            lines.append(f"{env_id}: {absent}. Its panels are not checked{left_out}")
    if any(plan.lengths.basis == "assumed" for plan in plans):
        lines.append(
            f"assumed lengths are shares of the limits: steps {STEPS:.0%}, prompt {PROMPT:.0%}, answer {ANSWER:.0%}, "
            f"analysis {ANALYSIS:.0%}; its prompt shows the whole episode; all groups and skills are learned from"
        )
    largest = max((plan.memory.peak for plan in plans if plan.memory), default=0.0)
    for gpu in dict.fromkeys(plan.speed for plan in plans if plan.speed and recipe.needs.gpus):
        if largest > gpu.memory:
            lines.append(
                f"the largest cell needs {largest / 1e9:,.0f} GB, and {gpu.name} has {gpu.memory / 1e9:,.0f}: "
                "the table of its memory shows what fits (train.lora={}; more GPUs under FSDP2)"
            )
    lines.append("FLOPs as in the ledger: 2 x parameters x tokens forward, 6 x trained (LoRA 4 x), without evaluations")
    specs = dict.fromkeys(spec for plan in plans for spec in (plan.cell.policy, plan.cell.teacher) if spec)
    for spec in (spec for spec in specs if load.trainable(spec)):
        size = known_size(spec)
        if size is None:
            lines.append(f"{spec}: not on this machine and of unknown size, so no FLOPs, memory and hours")
        elif directory_at_hand(spec) is None:
            lines.append(
                f"{spec}: not on this machine; {size.parameters:,} parameters are published; no hash before it is here"
            )
        else:
            lines.append(f"{spec}: {size.parameters:,} parameters, counted in its files")
    rates = {plan.cell.env.id: plan.rate for plan in plans if plan.rate is not None}
    if rates:
        told = ", ".join(f"{env_id} {rate / 1e9:,.3g} GFLOP/s" for env_id, rate in rates.items())
        lines.append(f"hours of this machine at the speed of its finished cells: {told}")
    for speed in dict.fromkeys(plan.speed for plan in plans if plan.rate is None and plan.hours is not None):
        if speed is not None:
            lines.append(
                f"GPU hours of {speed.name} with {speed.peak / 1e12:,.0f} TFLOP/s, of which sampling reaches "
                f"{speed.sampling:.0%}, scoring {speed.scoring:.0%}, training {speed.training:.0%} ({speed.basis})"
            )
    hours = _sum([plan for plan in plans if not plan.finished], "hours")
    if hours is None and any(plan.size for plan in plans):
        lines.append(
            "hours: needs.gpus is 0; they are told for GPUs, e.g. needs.gpus=1, or once a cell has finished here"
        )
    elif hours is not None and recipe.needs.gpus > 1:
        least = "at least " if any(plan.uncounted for plan in plans if not plan.finished) else ""
        shared = f"{hours / recipe.needs.gpus:,.0f} hours on {recipe.needs.gpus:g} GPUs kept busy"
        lines.append(f"{least}{hours:,.0f} GPU hours are {shared}")
    return lines
