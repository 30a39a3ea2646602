"""Numbers that papers print, as data, beside what was measured here.

``results/published/`` holds the numbers (CSV files, one row per cell of a table) and ``registry.yaml``: who measured
each row, under which protocol as far as that is published, which kind of average it is, and what is wrong with it.
``published_table`` compares like with like: micro with micro, macro with macro, one backbone with the same backbone.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from rich.table import Table as RichTable
from rich.text import Text

from harness.contracts import HarnessError
from harness.methods import Frozen
from harness.validation import read_yaml, validate

REGISTRY = "registry.yaml"
UNITS = ("percent", "score_0_100")
"""Units of headlines; both are hundredths."""
Average = Literal["micro", "macro", "unknown"]
Measure = Literal["success", "score"]


class Selection(Frozen):
    """Rows of the CSV files: those that agree in every column given; a list names several values."""

    table: tuple[str, ...] = ()
    benchmark: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    backbone: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    metric: tuple[str, ...] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def given(self) -> str:
        """The columns given, as text."""
        return ", ".join(f"{column} {' or '.join(values)}" for column, values in self if values)

    def holds(self, row: Row) -> bool:
        """Whether a row is among them."""
        return all(not values or getattr(row, column) in values for column, values in self)


class Protocol(Frozen):
    """The conditions of a published number, as far as they are published; None is not published."""

    history: int | None = None
    max_steps: int | None = None
    temperature: float | None = None
    truncation: str | None = Field(None, description="what happens to a prompt that is too long")
    checkpoint: str | None = Field(None, description="last or best")
    updates: int | None = None
    tasks: int | None = Field(None, description="tasks per update")
    group: int | None = Field(None, description="episodes per task in training")
    response_tokens: int | None = Field(None, description="longest answer")


class Headline(Frozen):
    """A metric that stands for a whole table row, and what it corresponds to here."""

    measure: Measure
    average: Average = Field(description="over episodes, over kinds of task, or not known")
    variant: str = Field("", description="appended to the method's name here, e.g. -20 for a fifth of the data")


class Entry(Frozen):
    """What is known about some rows of one file."""

    select: Selection
    provenance: Literal["own_run", "copied", "unstated", "user_reproduction", "approximate", "computed", "stated"] = (
        Field(description="who measured it")
    )
    origin: str = Field("", description="where it was copied or computed from")
    headlines: dict[str, Headline] = Field(default_factory=dict, description="metric to what it is here")
    draws: int | None = Field(None, ge=1, description="episodes of the evaluation; repeats of a task may be among them")
    seeds: int = Field(1, ge=1, description="training runs")
    protocol: str
    notes: tuple[str, ...] = ()


class Source(Frozen):
    """One CSV file."""

    file: str
    paper: str
    place: str = Field(description="table or figure")
    read: str = Field(description="how the numbers got here")
    entries: tuple[Entry, ...]


class Condition(Frozen):
    """A field of the protocol card that two numbers must agree in, worded differently here and there."""

    published: str
    here: str = Field(description="regular expression of what means the same in a card here")
    part: str = Field(".*", description="regular expression of the part of the card's field that is compared and shown")


class Benchmark(Frozen):
    """A benchmark of the papers as an environment of the harness."""

    env: str
    conditions: dict[str, Condition] = Field(default_factory=dict, description="by field of the protocol card")
    splits: dict[str, tuple[str, ...]] = Field(description="split to panels here that draw from it")
    kinds: dict[str, str] = Field(
        default_factory=dict, description="metric of one kind of task to the kind's name here"
    )


class Released(Frozen):
    """Weights that the authors of a paper released."""

    backbone: str
    methods: tuple[str, ...] = Field(description="the harness's names of the rows that they may stand beside")


class Identity(Frozen):
    """Rows that hold the same digits as others."""

    these: Selection
    those: Selection
    flag: str


class Suspect(Frozen):
    """Cells that look wrong, and the metric of the same rows that suffers."""

    select: Selection
    affects: str
    flag: str
    reason: str


class Index(Frozen):
    """``registry.yaml``."""

    papers: dict[str, str]
    benchmarks: dict[str, Benchmark]
    backbones: dict[str, str]
    released: dict[str, Released] = Field(default_factory=dict)
    methods: dict[str, str]
    protocols: dict[str, Protocol]
    tables: tuple[Source, ...]
    identical: tuple[Identity, ...] = ()
    suspect: tuple[Suspect, ...] = ()


class Row(Frozen):
    """One line of a CSV file."""

    table: str
    benchmark: str
    split: str
    backbone: str
    method: str
    metric: str
    value: float
    unit: str

    @property
    def place(self) -> tuple[str, ...]:
        """What the row shares with the other metrics of its method."""
        return self.table, self.benchmark, self.split, self.backbone, self.method


COLUMNS = tuple(Row.model_fields)
"""Of every CSV file."""


@dataclass(frozen=True)
class Number:
    """One published number that a measurement can stand beside.

    Attributes:
        method: The harness's name of the method.
        value: Share in [0, 1].
        shares: What the value is the mean of, each in [0, 1]: itself, or one share per kind of task.
        flags: Short remarks: origin, how it was derived, what is wrong with it.
    """

    row: Row
    source: Source
    entry: Entry
    method: str
    measure: Measure
    average: Average
    value: float
    shares: tuple[float, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Registry:
    """All published numbers with what is known about them."""

    directory: Path
    index: Index
    rows: tuple[tuple[Row, Source, Entry], ...]

    @property
    def numbers(self) -> Iterator[Number]:
        """Every headline; for an average over episodes whose kinds are printed too, also the mean over kinds."""
        cells = {(*row.place, row.metric): row.value / 100 for row, _, _ in self.rows}
        for row, source, entry in self.rows:
            headline = entry.headlines.get(row.metric)
            if headline is None:
                continue
            method = self.index.methods[row.method] + headline.variant
            flags = (entry.provenance.replace("_", " "), *self.remarks(row))
            kinds = self.index.benchmarks[row.benchmark].kinds
            printed = [cells[*row.place, kind] for kind in kinds if (*row.place, kind) in cells]
            complete = bool(kinds) and len(printed) == len(kinds)
            shares = tuple(printed) if headline.average == "macro" and complete else (row.value / 100,)
            given = (row, source, entry, method, headline.measure)
            yield Number(*given, headline.average, row.value / 100, shares, flags)
            if headline.average == "micro" and complete:
                value = math.fsum(printed) / len(printed)
                yield Number(*given, "macro", value, tuple(printed), (*flags, "mean of printed kinds"))

    def remarks(self, row: Row) -> Iterator[str]:
        """Flags of what is wrong with a row, or with one that its value is made of."""
        yield from (same.flag for same in self.index.identical if same.these.holds(row))
        for suspect in self.index.suspect:
            if suspect.select.model_copy(update={"metric": (suspect.affects,)}).holds(row):
                yield suspect.flag


# ------------------------------------------------------------------------------------------------- reading


def default_directory() -> Path:
    """``results/published`` of the checkout or of the current directory. Raises HarnessError if there is neither."""
    places = [root / "results" / "published" for root in (Path(__file__).resolve().parents[2], Path.cwd())]
    for place in places:
        if (place / REGISTRY).is_file():
            return place
    looked = ", ".join(str(place) for place in dict.fromkeys(places))
    raise HarnessError(f"no published numbers at {looked}: name the directory of {REGISTRY} with --published DIR")


def load(directory: Path) -> Registry:
    """Read and check a registry.

    Raises HarnessError where a file is missing or malformed, a row is covered by no entry or by two, or an entry names
    a protocol, method, benchmark or row that does not exist.
    """
    path = directory / REGISTRY
    if not path.is_file():
        raise HarnessError(f"no published numbers at {directory}: there is no {REGISTRY}")
    data = read_yaml(path.read_text(encoding="utf-8"), f"{path} is not YAML")
    index = validate(Index, data, str(path))
    _check_names(index, path)
    rows = tuple(found for source in index.tables for found in _covered(directory, source))
    _check_rows(index, rows, path)
    unlisted = sorted({file.name for file in directory.glob("*.csv")} - {source.file for source in index.tables})
    if unlisted:
        raise HarnessError(f"{path}: no entry for the file {unlisted[0]}")
    return Registry(directory, index, rows)


def _check_names(index: Index, path: Path) -> None:
    """Refuse references to a paper or protocol that does not exist."""
    for source in index.tables:
        if source.paper not in index.papers:
            raise HarnessError(f"{path}: {source.file}: no paper {source.paper!r} is given")
        for entry in source.entries:
            if entry.protocol not in index.protocols:
                raise HarnessError(f"{path}: {source.file}: no protocol {entry.protocol!r} is given")


def _check_rows(index: Index, rows: Sequence[tuple[Row, Source, Entry]], path: Path) -> None:
    """Refuse remarks about rows that do not exist, and headlines without a method or an environment here."""
    remarked = [side for same in index.identical for side in (same.these, same.those)]
    for selection in (*remarked, *(suspect.select for suspect in index.suspect)):
        if not any(selection.holds(row) for row, _, _ in rows):
            raise HarnessError(f"{path}: no row is {selection.given}")
    for row, source, entry in rows:
        if row.metric in entry.headlines:
            if row.unit not in UNITS:
                raise HarnessError(
                    f"{path}: {source.file}: a headline's unit is one of {', '.join(UNITS)}, not {row.unit!r}"
                )
            for what, name, known in (
                ("method", row.method, index.methods),
                ("benchmark", row.benchmark, index.benchmarks),
            ):
                if name not in known:
                    raise HarnessError(f"{path}: {source.file}: no {what} {name!r} is given")


def _covered(directory: Path, source: Source) -> Iterator[tuple[Row, Source, Entry]]:
    """The rows of a file, each with the one entry that speaks of it."""
    path = directory / source.file
    if not path.is_file():
        raise HarnessError(f"{directory / REGISTRY} names {source.file}, which does not exist")
    used: set[int] = set()
    for line, row in _read(path):
        about = [number for number, entry in enumerate(source.entries) if entry.select.holds(row)]
        if len(about) != 1:
            what = "no entry speaks" if not about else f"{len(about)} entries speak"
            raise HarnessError(f"{directory / REGISTRY}: {what} of {source.file}, line {line}")
        used.add(about[0])
        yield row, source, source.entries[about[0]]
    for number, entry in enumerate(source.entries):
        if number not in used:
            raise HarnessError(f"{directory / REGISTRY}: no row of {source.file} is {entry.select.given}")


def _read(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise HarnessError(f"{path}: the columns must be {','.join(COLUMNS)}")
        for line in reader:
            yield reader.line_num, validate(Row, line, f"{path}, line {reader.line_num}")


def listing(registry: Registry) -> RichTable:
    """One line per kind of row: where it is printed, what it is, who measured it, what is known against it."""
    headings = ("source", "rows", "benchmark", "methods", "measured by", "average", "n", "remarks")
    table = RichTable(*headings, box=None, title=f"published numbers of {registry.directory}", title_justify="left")
    for source in registry.index.tables:
        for entry in source.entries:
            rows = [row for row, _, about in registry.rows if about is entry]
            methods = list(dict.fromkeys(row.method for row in rows))
            flags = [flag for row in rows for flag in registry.remarks(row)]
            named = (
                ", ".join(dict.fromkeys(row.benchmark for row in rows)),
                ", ".join(methods) if len(methods) < 4 else f"{len(methods)} methods",
                entry.provenance.replace("_", " "),
                ", ".join(dict.fromkeys(headline.average for headline in entry.headlines.values())),
                str(entry.draws or ""),
                "; ".join(dict.fromkeys([entry.origin] * bool(entry.origin) + flags)),
            )
            table.add_row(Text(f"{source.paper}, {source.place}"), str(len(rows)), *map(Text, named))
    return table
