"""Published numbers beside measured ones: difference, its interval, and a verdict on every row.

The verdict: *not comparable* if a condition that decides the number is known to differ, naming each; else *reproduced*
if the 95 % interval of the difference, the published run's own sampling error included, holds zero; else *not
reproduced*. What is not published cannot differ and stands in the notes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from harness.config import TrainConfig
from harness.reporting import statistics as st
from harness.reporting.comparison import Arm, Comparison
from harness.reporting.frames import STAR, policy_name
from harness.reporting.published import Number, Protocol, Registry
from harness.reporting.statistics import Estimate
from harness.reporting.tables import Column, Table, Value

Z = NormalDist().inv_cdf((1 + st.LEVEL) / 2)


@dataclass(frozen=True)
class Measured:
    """An arm in the words of the registry: methods it may stand for, backbone, and how it was trained, if it was."""

    arm: Arm
    methods: tuple[str, ...]
    backbone: str
    train: TrainConfig | None
    response_tokens: int


@dataclass(frozen=True)
class Field:
    """A condition that decides a number: its value here and in print; None is not published."""

    name: str
    measured: str
    published: str | None
    same: bool

    @property
    def differs(self) -> bool:
        """Whether it is published and another."""
        return self.published is not None and not self.same

    @classmethod
    def of(cls, name: str, measured: float | str, published: float | str | None) -> Field:
        """A field whose two values are compared as they are."""
        shown = None if published is None else _plain(published)
        return cls(name, _plain(measured), shown, measured == published)


def published_table(comparison: Comparison, registry: Registry) -> Table:
    """Every measured arm beside every published number of its environment and method.

    Of several published backbones and splits the measured one counts; where there is none, the first stands for all.
    """
    columns = (
        Column("Environment"),
        Column("Method"),
        Column("Published backbone"),
        Column("Average"),
        Column("published", "plusminus"),
        Column("measured", "plusminus"),
        Column("difference", "range", "+.1f"),
        Column("Verdict"),
        Column("Flags"),
        Column("Differs, measured / published", detail=True),
        Column("Source", detail=True),
    )
    rows: list[tuple[Value, ...]] = []
    used: list[tuple[Measured, Number]] = []
    for ours, theirs in _pairs(comparison, registry):
        here, there = measured_average(ours.arm, theirs), printed_average(theirs)
        conditions = list(fields(ours, theirs, registry))
        verdict, difference = judge(here, there, conditions)
        differing = "; ".join(f"{f.name} {f.measured} / {f.published}" for f in conditions if f.differs)
        names = (ours.arm.setting.name, ours.arm.method, theirs.row.backbone, f"{theirs.measure}, {theirs.average}")
        source = f"{theirs.source.paper}, {theirs.source.place}, {theirs.row.method}"
        rows.append((*names, there, here, difference, verdict, ", ".join(theirs.flags), differing, source))
        used.append((ours, theirs))
    title = "Published and measured"
    return Table("published", title, columns, tuple(rows), tuple(_notes(used, registry)), comparison.cards)


# ------------------------------------------------------------------------------------------------ matching


def identify(arm: Arm, comparison: Comparison, registry: Registry) -> Measured | None:
    """What an arm is in the words of the registry; None for policies that no paper has a row for."""
    config, index = arm.config, registry.index
    policy, longest = policy_name(config.policy), config.env.max_response_tokens
    name = index.backbones.get(policy, policy)
    if config.method is not None:
        star = STAR if arm.method.endswith(STAR) else ""
        train = config.train if config.method.learns else None
        return Measured(arm, (config.method.name + star,), name, train, longest)
    if policy in index.released:
        known = index.released[policy]
        return Measured(arm, known.methods, known.backbone, None, longest)
    starts = {other.config.policy for other in comparison.arms.values() if other.config.method is not None}
    if policy in index.backbones or config.policy in starts:
        return Measured(arm, ("vanilla",), name, None, longest)
    return None


def _pairs(comparison: Comparison, registry: Registry) -> Iterator[tuple[Measured, Number]]:
    numbers, index = list(registry.numbers), registry.index
    for setting in comparison.settings:
        for arm in comparison.arms_of(setting):
            ours = identify(arm, comparison, registry)
            if ours is None:
                continue
            about = [
                number
                for number in numbers
                if index.benchmarks[number.row.benchmark].env == setting.env and number.method in ours.methods
            ]
            panels = {
                split
                for number in about
                for split, names in index.benchmarks[number.row.benchmark].splits.items()
                if setting.card.panel in names
            }
            about = _preferred(about, {ours.backbone}, lambda number: number.row.backbone)
            for number in _preferred(about, panels, lambda number: number.row.split):
                yield ours, number


def _preferred(numbers: list[Number], wanted: set[str], key: Callable[[Number], str]) -> list[Number]:
    """The numbers whose key is wanted, or else those that agree with the first one's."""
    found = wanted & {key(number) for number in numbers} or {key(number) for number in numbers[:1]}
    return [number for number in numbers if key(number) in found]


# ----------------------------------------------------------------------------------------------- comparing


def fields(ours: Measured, theirs: Number, registry: Registry) -> Iterator[Field]:
    """The conditions that decide whether two numbers may be compared, the backbone first."""
    card, printed = ours.arm.setting.card, registry.index.protocols[theirs.entry.protocol]
    benchmark = registry.index.benchmarks[theirs.row.benchmark]
    yield Field.of("backbone", ours.backbone, theirs.row.backbone)
    if theirs.average == "unknown":
        yield Field("average", "micro", "unknown", False)
    for name, condition in benchmark.conditions.items():
        part = re.search(condition.part, str(getattr(card, name)))
        here = part[0] if part else ""
        yield Field(name, here, condition.published, bool(re.search(condition.here, here)))
    panels = benchmark.splits.get(theirs.row.split, ())
    yield Field("split", f"panel {card.panel}", theirs.row.split, card.panel in panels)
    if theirs.average == "macro":
        kinds, printed_kinds = set(ours.arm.setting.kinds), set(benchmark.kinds.values())
        yield Field("kinds of task", str(len(kinds)), str(len(printed_kinds)), kinds == printed_kinds)
    yield Field.of("history", card.history, printed.history)
    yield Field.of("max steps", card.max_steps, printed.max_steps)
    yield Field.of("temperature", card.temperature, printed.temperature)
    yield Field.of("checkpoint", card.checkpoint, printed.checkpoint)
    yield Field.of("response tokens", ours.response_tokens, printed.response_tokens)
    if ours.train:
        yield Field.of("updates", ours.train.updates, printed.updates)
        yield Field.of("tasks per update", ours.train.tasks, printed.tasks)
        yield Field.of("episodes per task", ours.train.group, printed.group)


def judge(here: Estimate, there: Estimate, conditions: Sequence[Field]) -> tuple[str, Estimate | None]:
    """The verdict, and the difference with its interval where there is one to speak of."""
    differing = [f for f in conditions if f.differs]
    if differing:
        names = [f"{f.name} {f.measured} / {f.published}" if f.name == "backbone" else f.name for f in differing]
        return f"not comparable: {', '.join(names)}", None
    if not math.isfinite(here.margin):
        return "not comparable: nothing measured", None
    value = here.value - there.value
    error = there.margin if math.isfinite(there.margin) else 0.0
    low = value - math.hypot(here.value - here.low, error)
    high = value + math.hypot(here.high - here.value, error)
    return "reproduced" if low <= 0 <= high else "not reproduced", Estimate(value, low, high)


def measured_average(arm: Arm, theirs: Number) -> Estimate:
    """The same measure and kind of average of an arm's last evaluation; a mean over episodes where it is not known."""
    outcomes = arm.outcomes() if theirs.measure == "success" else arm.scores
    if theirs.average == "macro":
        replicates = st.macro_replicates(outcomes, arm.seed_draws, arm.setting.task_draws)
        return st.success_interval(st.macro(outcomes), replicates, outcomes.played)
    return st.success_interval(st.micro(outcomes), arm.replicates(outcomes), outcomes.played)


def printed_average(number: Number) -> Estimate:
    """A published value with its own sampling error; without an interval where the number of episodes is unknown."""
    if number.entry.draws is None:
        return Estimate(number.value, math.nan, math.nan)
    error = sampling_error(number.shares, number.entry.draws)
    return Estimate(number.value, max(0.0, number.value - error), min(1.0, number.value + error))


def sampling_error(shares: Sequence[float], draws: int) -> float:
    """Half width of the 95 % interval of a mean of shares (Agresti-Coull), the draws split evenly among them.

    For a score in [0, 1] it is an upper bound: of all such variables with one mean, a binary one varies most.
    """
    n = draws / len(shares) + Z**2
    centres = [(share * draws / len(shares) + Z**2 / 2) / n for share in shares]
    return Z * math.sqrt(math.fsum(p * (1 - p) / n for p in centres)) / len(shares)


# --------------------------------------------------------------------------------------------------- notes


def _notes(used: Sequence[tuple[Measured, Number]], registry: Registry) -> Iterator[str]:
    yield (
        "In %. A published value is one training run; its ± is the sampling error of the draws it was evaluated on,"
        " nothing where their number is not published (for means over kinds: draws split evenly among the kinds; for"
        " scores: an upper bound). What another training seed would have given is in no published ±."
    )
    yield (
        "Difference: measured − published, 95 % interval from both errors; of one measured seed it is over tasks alone."
        " Reproduced: it holds zero, which a wide interval does easily. Not comparable: what is named differs; the CSV"
        " file and the page hold both values."
    )
    protocols = dict.fromkeys(theirs.entry.protocol for _, theirs in used)
    for name in protocols:
        if known := _protocol(registry.index.protocols[name]):
            yield f"Published protocol, {name}: {known}."
    bare = {
        f"{theirs.row.benchmark} {theirs.row.method}": None
        for _, theirs in used
        if not _protocol(registry.index.protocols[theirs.entry.protocol])
    }
    if bare:
        yield f"Unknown, as no protocol is published: {', '.join(bare)}."
    if used:
        yield (
            "Panel unpublished: which tasks were played is known of no published number. Prompts are worded differently"
            " here, and too long ones lose their oldest history first; neither decides a verdict."
        )
    for name in dict.fromkeys(flag for _, theirs in used for flag in theirs.flags):
        if reason := _reason(name, registry):
            yield f"{name}: {reason}."


def _protocol(protocol: Protocol) -> str:
    """What is published of a protocol and what is not; empty where nothing is."""
    names = {"tasks": "tasks per update", "group": "episodes per task", "truncation": "too long prompts"}
    given = {names.get(name, name.replace("_", " ")): value for name, value in protocol}
    known = [f"{name} {_plain(value)}" for name, value in given.items() if value is not None]
    unknown = [name for name, value in given.items() if value is None]
    return "; ".join(known + [f"unknown: {', '.join(unknown)}"] * bool(unknown)) if known else ""


def _reason(flag: str, registry: Registry) -> str:
    """What a flag of the table means, where its words do not say it."""
    if flag == "copied":
        return "the paper took the row over from another one"
    if flag == "mean of printed kinds":
        return "the printed average is over episodes; this is the mean of the cells printed for each kind of task"
    return "; ".join(dict.fromkeys(s.reason for s in registry.index.suspect if s.flag == flag))


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
