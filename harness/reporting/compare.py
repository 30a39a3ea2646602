"""``harness compare A B``: two results on one panel, task by task; different panels or protocols are refused."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.contracts import HarnessError, unknown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from harness.reporting.comparison import Arm
    from harness.reporting.differences import Paired
    from harness.reporting.statistics import Estimate, Outcomes
    from harness.reporting.tables import Table

EPILOG = """\
examples:
  harness compare results/quick:grpo results/quick:seed --env Sokoban-v1
  harness compare results/eval/cells/HASH results/quick/cells/HASH
  harness compare results/table1-tiny:skill-grpo 'results/table1-tiny:skill-grpo*' --env ALFWorld-v1

A result is a cell's directory, or a run's directory with :ROW, the row of its table: all its seeds together. Exit code
2 if the two cannot be compared; the message names the fields that differ.
"""

LISTED = 10
"""Tasks listed on which the two differ most."""


def command(parser: argparse.ArgumentParser) -> None:
    """Compare two results task by task, on one panel under one protocol."""
    parser.epilog = EPILOG
    parser.add_argument("a", metavar="A", help="cell directory, or run directory:ROW")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--env", metavar="ENV", help="environment, where a run has several")
    parser.add_argument("--metric", choices=["success", "score"], default="success", help="default success")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from harness.reporting.tables import rich_table
    from harness.terminal import Terminal

    result = compare_results(options.a, options.b, options.env, options.metric)
    if options.json:
        print(json.dumps(as_json(result), indent=2, allow_nan=False))
        return 0
    console = Terminal()
    for number, table in enumerate(tables(result)):
        if number:
            console.print()
        console.print(rich_table(table))
    return 0


@dataclass(frozen=True)
class Side:
    """One of the two: what it was called on the command line, its arm, its outcomes in the metric, their average."""

    given: str
    arm: Arm
    outcomes: Outcomes
    value: Estimate

    @property
    def label(self) -> str:
        seeds = self.arm.seeds
        return f"{self.arm.method} ({'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))})"


@dataclass(frozen=True)
class Result:
    """A compared pair: A minus B.

    Attributes:
        counts: Tasks solved by only A, only B, both, neither (:func:`harness.reporting.differences.mcnemar_counts`).
        kinds: Per kind of task: number of tasks, average of A, of B, and the difference.
        tasks: Tasks by the size of their difference: id, kind, average of A, of B.
    """

    metric: str
    a: Side
    b: Side
    total: Paired
    counts: tuple[float, float, float, float]
    kinds: dict[str, tuple[int, float, float, Paired]]
    tasks: tuple[tuple[str, str, float, float], ...]


# ------------------------------------------------------------------------------------------------- reading


def compare_results(a: str, b: str, env: str | None = None, metric: str = "success") -> Result:
    """Compare two results, each a cell's directory or a run's directory with ``:ROW``.

    Raises HarnessError where one does not exist, is unfinished or ambiguous, or where panels or protocols differ.
    """
    import numpy as np

    from harness.reporting.differences import mcnemar_counts, paired, pooled_seed_variance

    (arm_a, peers_a), (arm_b, peers_b) = _arms(a, env), _arms(b, env)
    if (_split(a)[0].resolve(), arm_a.method, arm_a.setting) == (_split(b)[0].resolve(), arm_b.method, arm_b.setting):
        raise HarnessError(f"{a} and {b} are the same result")
    _refuse_different(arm_a, arm_b)
    order = arm_a.setting.tasks
    ours, theirs = (_in_order(_outcomes(arm, metric), arm.setting.tasks, order) for arm in (arm_a, arm_b))
    first, second = Side(a, arm_a, ours, _value(arm_a, metric)), Side(b, arm_b, theirs, _value(arm_b, metric))
    trained = (arm_a.trained, arm_b.trained)
    peers = [_in_order(_outcomes(arm, metric), arm.setting.tasks, order) for arm in (peers_a | peers_b).values()]

    def difference(mask: NDArray[np.bool_]) -> Paired:
        pooled = pooled_seed_variance([outcomes.where(mask) for outcomes in peers])
        return paired(ours.where(mask), theirs.where(mask), pooled, trained)

    common = (ours.count.sum(0) > 0) & (theirs.count.sum(0) > 0)
    if not common.any():
        raise HarnessError(f"not comparable: {a} and {b} have no task in common that did not crash")
    kinds = np.array(ours.kinds)
    of_kind = {kind: common & (kinds == kind) for kind in dict.fromkeys(ours.kinds)}
    by_kind = {
        kind: (int(mask.sum()), _mean(ours.where(mask)), _mean(theirs.where(mask)), difference(mask))
        for kind, mask in of_kind.items()
        if mask.any()
    }
    gaps = np.where(common, ours.per_task - theirs.per_task, 0.0)
    tasks = [
        (order[t], ours.kinds[t], float(ours.per_task[t]), float(theirs.per_task[t]))
        for t in np.argsort(-np.abs(gaps), kind="stable")
        if gaps[t]
    ]
    counts = mcnemar_counts(ours, theirs)
    return Result(metric, first, second, difference(common), counts, by_kind, tuple(tasks))


def _arms(given: str, env: str | None) -> tuple[Arm, dict[tuple[Path, str], Arm]]:
    """The arm that an argument names, and all trainings beside it: they tell how far seeds lie apart."""
    from harness.reporting.comparison import compare
    from harness.reporting.frames import cells_at, evaluations_of, read_cells

    path, row = _split(given)
    if (path / "config.json").is_file():
        if not (path / "manifest.json").is_file():
            raise HarnessError(f"{path}: the cell is unfinished; resume it with `harness run` or `harness eval`")
        cells = cells_at([path])
    else:
        cells = read_cells(path)[0]
    evaluations = evaluations_of(cells)
    rows = sorted(set(evaluations["method"]))
    if row is not None and row not in rows:
        raise HarnessError(f"{path}: {unknown('row', row, rows)}")
    comparison = compare(cells, evaluations)
    arms = [arm for arm in comparison.arms.values() if row in (None, arm.method)]
    envs = sorted({arm.setting.env for arm in arms})
    if env is not None and env not in envs:
        raise HarnessError(f"{given}: {unknown('environment', env, envs)}")
    arms = [arm for arm in arms if env in (None, arm.setting.env)]
    if len({arm.method for arm in arms}) > 1:
        raise HarnessError(f"{given} has several rows: name one as {path}:ROW ({', '.join(rows)})")
    if len({arm.setting.env for arm in arms}) > 1:
        raise HarnessError(f"{given} has several environments: name one with --env ({', '.join(envs)})")
    if len(arms) > 1:
        fields = ", ".join(arms[0].setting.card.differences(arms[1].setting.card))
        raise HarnessError(
            f"{given} was measured under several protocols, which differ in {fields}: name a single cell"
        )
    return arms[0], {(path.resolve(), name): arm for name, arm in comparison.trainings(arms[0].setting).items()}


def _split(given: str) -> tuple[Path, str | None]:
    """An argument as (directory, row); a path that exists may hold colons itself."""
    if Path(given).exists() or ":" not in given:
        return Path(given), None
    path, _, row = given.rpartition(":")
    return Path(path), row


def _refuse_different(a: Arm, b: Arm) -> None:
    """Refuse cards that differ; what a card says about prompts does not apply to a scripted policy."""
    from harness.reporting.frames import SCRIPTED, UNREAD

    cards = (a.setting.card, b.setting.card)
    scripted = any(arm.config.method is None and arm.config.policy in SCRIPTED for arm in (a, b))
    differing = [name for name in cards[0].differences(cards[1]) if not (scripted and name in UNREAD)]
    if differing:
        named = ", ".join(f"{name} {getattr(cards[0], name)} / {getattr(cards[1], name)}" for name in differing)
        raise HarnessError(f"not comparable: {named}")
    if set(a.setting.tasks) != set(b.setting.tasks):
        raise HarnessError("not comparable: the two hold different tasks under one panel hash")


def _outcomes(arm: Arm, metric: str) -> Outcomes:
    return arm.outcomes() if metric == "success" else arm.scores


def _value(arm: Arm, metric: str) -> Estimate:
    from harness.reporting.statistics import interval

    scores = arm.scores
    return arm.final if metric == "success" else interval(_mean(scores), arm.replicates(scores))


def _in_order(outcomes: Outcomes, given: Sequence[str], wanted: Sequence[str]) -> Outcomes:
    """Outcomes with their tasks in another order."""
    from harness.reporting.statistics import Outcomes

    place = {task: index for index, task in enumerate(given)}
    order = [place[task] for task in wanted]
    kinds = tuple(outcomes.kinds[index] for index in order)
    return Outcomes(outcomes.total[:, order], outcomes.count[:, order], kinds)


def _mean(outcomes: Outcomes) -> float:
    from harness.reporting.statistics import micro

    return micro(outcomes)


# ------------------------------------------------------------------------------------------------- showing


def tables(result: Result) -> list[Table]:
    """The result for a reader: both values, the difference by kind of task, the tasks that differ most."""
    from harness.reporting.tables import Column, Table

    a, b, total, setting = result.a, result.b, result.total, result.a.arm.setting
    sides = tuple(
        (letter, side.label, side.value, side.arm.n, side.arm.updates[-1]) for letter, side in (("A", a), ("B", b))
    )
    kinds = tuple((kind, n, x, y, d.difference, d.detectable) for kind, (n, x, y, d) in result.kinds.items())
    everything = ("all (micro)", total.tasks, _mean(a.outcomes), _mean(b.outcomes), total.difference, total.detectable)
    averages = (Column("A", "percent"), Column("B", "percent"))
    shown = result.tasks[:LISTED]
    found = [
        Table(
            "values",
            f"{setting.env}: {result.metric}",
            (
                Column(""),
                Column("result"),
                Column(result.metric, "range"),
                Column("n"),
                Column("updates", "number", ".0f"),
            ),
            sides,
            _notes(result),
            ((setting.env, setting.card),),
        ),
        Table(
            "difference",
            "A − B in points, by kind of task",
            (
                *(Column("kind"), Column("tasks", "number", ".0f"), *averages),
                *(Column("A − B", "range", "+.1f"), Column("detectable", "percent")),
            ),
            (*kinds, everything),
        ),
        Table(
            "tasks",
            "Tasks that differ most",
            (Column("task"), Column("kind"), *averages),
            shown,
            (f"{len(shown)} of {len(result.tasks)} tasks that differ.",),
        ),
    ]
    return [table for table in found if table.rows]


def _notes(result: Result) -> tuple[str, ...]:
    """What the numbers say, in sentences."""
    from harness.reporting.tables import Column

    total, trained = result.total, result.a.arm.trained or result.b.arm.trained
    difference = Column("", "range", "+.1f").show(total.difference)
    p, these = (Column("", "p").show(value) for value in (total.p, total.p_policies))
    over = "over seeds and tasks" if total.seeds and trained else "over tasks"
    notes = [f"A − B: {difference} points, 95 % interval {over}, on {total.tasks} common tasks."]
    if not total.seeds:
        notes.append("One seed of a trained method: whether the methods differ when trained again cannot be told.")
    elif trained:
        notes.append(f"The methods, trained again: p = {p} (t-test over seeds and tasks).".replace("= <", "<"))
    notes.append(f"These policies: p = {these} (exact sign-flip test over tasks).".replace("= <", "<"))
    if result.metric == "success":
        names = ("only A", "only B", "both", "neither")
        whole = all(float(count).is_integer() for count in result.counts)
        counts = ", ".join(f"{name} {n:.{0 if whole else 1}f}" for name, n in zip(names, result.counts, strict=True))
        notes.append(f"Solved by: {counts}{'' if whole else ' (expected for one random episode of each)'}.")
    if math.isfinite(total.detectable):
        sizes = " / ".join(dict.fromkeys(str(len(side.arm.seeds)) for side in (result.a, result.b)))
        covers = "" if total.seeds else ", training again not covered"
        notes.append(
            f"{sizes} seed{'s' * (sizes != '1')} × {total.tasks} tasks resolve {100 * total.detectable:.1f} points: a"
            f" true difference of that size is found in 80 % of repetitions{covers}."
        )
    return tuple(notes)


def as_json(result: Result) -> dict[str, Any]:
    """Everything as JSON data; what could not be computed is null."""
    counts = dict(zip(("only_a", "only_b", "both", "neither"), result.counts, strict=True))
    kinds = {
        kind: {"tasks": n, "a": x, "b": y, **_numbers(asdict(found))} for kind, (n, x, y, found) in result.kinds.items()
    }
    sides = {
        name: {
            "given": side.given,
            "method": side.arm.method,
            "seeds": side.arm.seeds,
            "update": side.arm.updates[-1],
            "value": _numbers(asdict(side.value)),
            "excluded": side.arm.excluded,
        }
        for name, side in (("a", result.a), ("b", result.b))
    }
    tasks = [{"task": task, "kind": kind, "a": x, "b": y} for task, kind, x, y in result.tasks]
    return {
        "env": result.a.arm.setting.env,
        "metric": result.metric,
        **sides,
        **_numbers(asdict(result.total)),
        "mcnemar": counts if result.metric == "success" else None,
        "kinds": kinds,
        "differing": tasks,
        "protocol": asdict(result.a.arm.setting.card),
    }


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """A record without NaN, which JSON does not know."""
    return {
        name: _numbers(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and math.isnan(value)
        else value
        for name, value in record.items()
    }
