"""One typed table, rendered as Markdown, CSV, LaTeX (booktabs) and for the terminal.

A cell holds a value, not a string: text, a number, or an :class:`Estimate`. The column says how to print it, the
renderer how to escape it. Protocol cards travel with the table and are printed under it in every form; CSV files stay
plain data and get their cards as a file of their own.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from harness.cards import ProtocolCard
from harness.contracts import digest
from harness.inert import visible
from harness.reporting.statistics import Estimate

Value = str | int | float | Estimate | None

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """How one column is named and printed.

    Attributes:
        group: Heading shared by neighbouring columns, e.g. the environment; may be empty.
        kind: ``text``; ``number``; ``p`` (a p-value); ``percent`` (a share, printed times 100); ``plusminus`` (an
            estimate of a share as value ± longer side of its interval); ``range`` (an estimate as value [low, high]).
        format: Format specification of the numbers.
        detail: Left out where space is narrow: in the terminal, Markdown and LaTeX.
    """

    name: str
    kind: Literal["text", "number", "p", "percent", "plusminus", "range"] = "text"
    format: str = ".1f"
    group: str = ""
    detail: bool = False

    def show(self, value: Value) -> str:
        """The value as plain text, not yet escaped for any medium."""
        if value is None:
            return MISSING
        if isinstance(value, str):
            return value
        number = value.value if isinstance(value, Estimate) else float(value)
        if not math.isfinite(number):
            return MISSING
        if self.kind == "p":
            return "< 0.001" if number < 0.001 else f"{number:.3f}"
        factor = 1 if self.kind == "number" else 100
        text = signed(format(factor * number, self.format))
        if not isinstance(value, Estimate) or self.kind in ("number", "percent"):
            return text
        if not math.isfinite(value.margin):
            return text
        if self.kind == "plusminus":
            return f"{text} ± {factor * value.margin:{self.format.lstrip('+')}}"
        low, high = (signed(format(factor * bound, self.format)) for bound in (value.low, value.high))
        return f"{text} [{low}, {high}]"


@dataclass(frozen=True)
class Table:
    """A table with what a reader needs to know to read it.

    Attributes:
        name: File name without ending.
        cards: Protocol cards by the name under which the table speaks of them.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    cards: tuple[tuple[str, ProtocolCard], ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.name!r}: every row needs {len(self.columns)} values")

    @property
    def narrow(self) -> Table:
        """The table without its detail columns."""
        kept = [index for index, column in enumerate(self.columns) if not column.detail]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[index] for index in kept), rows=rows)

    @property
    def headings(self) -> list[str]:
        """One heading per column, its group included."""
        return [f"{c.group} {c.name}".strip() for c in self.columns]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Runs of neighbouring columns with one group heading: (heading, number of columns)."""
        return [(name, len(list(run))) for name, run in itertools.groupby(self.columns, key=lambda c: c.group)]

    def shown(self, escape: Callable[[str], str] = str) -> list[list[str]]:
        """All cells as text, escaped for a medium."""
        return [[escape(c.show(v)) for c, v in zip(self.columns, row, strict=True)] for row in self.rows]


def signed(text: str) -> str:
    """A formatted number with a proper minus sign, and without one where it is zero."""
    return text.lstrip("+-") if not text.strip("+-0.,") else text.replace("-", "−")


def card_lines(cards: Sequence[tuple[str, ProtocolCard]]) -> list[tuple[str, str]]:
    """Protocol cards as (name, fields) lines; what several cards have in common stands in a line of its own."""
    fields = [{name: str(value) for name, value in asdict(card).items()} for _, card in cards]
    common = dict(set.intersection(*(set(f.items()) for f in fields))) if len(fields) > 1 else {}
    lines = [
        (name, {k: v for k, v in f.items() if k not in common}) for (name, _), f in zip(cards, fields, strict=True)
    ]
    if common:
        lines.insert(0, ("all", {name: fields[0][name] for name in fields[0] if name in common}))
    return [(name, "; ".join(f"{k.replace('_', ' ')}: {v}" for k, v in shown.items())) for name, shown in lines]


def file_name(text: str) -> str:
    """A text as part of a file's name; where characters had to be left out, a hash tells it from others."""
    wanted = re.sub(r"[()]", "", text.replace(" ", "-")).lower()
    kept = re.sub(r"[^\w.-]", "", wanted)[:50]
    return kept if kept == wanted else f"{kept}-{digest(text)[:8]}"


# ------------------------------------------------------------------------------------------------ Markdown


def markdown_escape(text: str) -> str:
    """Text that neither leaves its table cell nor becomes markup."""
    text = re.sub(r"\s+", " ", visible(text)).strip()
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Brackets are markup only where a link target follows, underscores only at the edge of a word.
    return re.sub(r"[\\`*|~]|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)


def markdown(table: Table) -> str:
    """A GitHub-flavoured table under a heading, with its notes and cards."""
    table = table.narrow
    headings = [markdown_escape(": ".join(filter(None, (c.group, c.name)))) for c in table.columns]
    align = [":--" if column.kind == "text" else "--:" for column in table.columns]
    lines = [headings, align, *table.shown(markdown_escape)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [markdown_escape(note) for note in table.notes]
    cards = [f"- **{markdown_escape(name)}** – {markdown_escape(text)}" for name, text in card_lines(table.cards)]
    parts = [f"### {markdown_escape(table.title)}", body, *notes]
    return "\n\n".join([*parts, *(["Protocol:", "\n".join(cards)] if cards else [])]) + "\n"


# ----------------------------------------------------------------------------------------------------- CSV


def to_csv(table: Table) -> str:
    """Full-precision data, one line per row; an estimate takes three columns: value, low, high.

    Text that a spreadsheet would run as a formula is prefixed with an apostrophe.
    """
    estimates = [column.kind in ("plusminus", "range") for column in table.columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header: list[str] = []
    for heading, estimate in zip(map(csv_text, table.headings), estimates, strict=True):
        header += [heading, f"{heading} low", f"{heading} high"] if estimate else [heading]
    writer.writerow(header)
    for row in table.rows:
        line: list[str | int | float | None] = []
        for value, estimate in zip(row, estimates, strict=True):
            if isinstance(value, Estimate):
                line += [plain(value.value), plain(value.low), plain(value.high)]
            elif isinstance(value, str):
                line.append(csv_text(value))
                line += [None, None] if estimate else []
            else:
                line += [plain(value), None, None] if estimate else [plain(value)]
        writer.writerow(line)
    return out.getvalue()


def csv_text(text: str) -> str:
    """Text that a spreadsheet takes for text, whatever it trims or widens before it looks for a formula."""
    return f"'{visible(text)}" if re.match(r"\s*[=+\-@＝＋－＠]", text) else visible(text)


def plain(value: int | float | None) -> int | float | None:
    """A number for CSV: nothing where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def cards_csv(cards: Sequence[tuple[str, ProtocolCard]]) -> str:
    """One line per protocol card."""
    columns = (Column("name"), *(Column(name) for name in (asdict(cards[0][1]) if cards else ())))
    rows = tuple((name, *(str(value) for value in asdict(card).values())) for name, card in cards)
    return to_csv(Table("protocol", "Protocol cards", columns, rows))


# --------------------------------------------------------------------------------------------------- LaTeX

LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "→": r"$\to$",
    "·": r"$\cdot$",
    "Δ": r"$\Delta$",
    "—": "---",
    "…": r"\ldots{}",
    "“": "``",
    "”": "''",
    "‘": "`",
    "’": "'",
}
ACCENTS = frozenset("\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0327")
"""Combining marks of letters that LaTeX's standard encodings print: grave, acute, circumflex, tilde, dots, ring, ..."""


def latex_escape(text: str) -> str:
    """Text for LaTeX: special characters and the mathematical signs of our own tables.

    Letters with an accent stay; what the standard encodings cannot print is written as its code point, U+6F22.
    """
    text = re.sub(r"\s+", " ", visible(text)).strip()
    # Two hyphens in a row would become a dash.
    return "".join("{}-" if a == b == "-" else _latex_character(b) for a, b in zip(f" {text}", text, strict=False))


def _latex_character(character: str) -> str:
    if character in LATEX:
        return LATEX[character]
    letter = unicodedata.normalize("NFD", character)
    if letter[0].isascii() and ACCENTS.issuperset(letter[1:]):
        return "" if unicodedata.category(character) == "Cc" else character
    return f"U+{ord(character):04X}"


def latex(table: Table) -> str:
    """A ``table`` environment with booktabs rules; needs ``\\usepackage{booktabs}``."""
    table = table.narrow
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{latex_escape(' '.join((table.title + '.', *table.notes)))}}}",
        f"\\label{{tab:{re.sub(r'[^a-z0-9-]', '-', table.name.lower())}}}",
        f"\\begin{{tabular}}{{{''.join('l' if c.kind == 'text' else 'r' for c in table.columns)}}}",
        "\\toprule",
    ]
    if any(column.group for column in table.columns):
        lines += _latex_groups(table)
    lines.append(" & ".join(latex_escape(column.name) for column in table.columns) + " \\\\")
    lines.append("\\midrule")
    # A line that starts with a bracket would be read as the optional argument of the row break before it.
    lines += ["{}" * cells[0].startswith("[") + " & ".join(cells) + " \\\\" for cells in table.shown(latex_escape)]
    lines += ["\\bottomrule", "\\end{tabular}"]
    for name, text in card_lines(table.cards):
        lines.append(f"\\par\\smallskip\\raggedright\\tiny {latex_escape(f'{name} – {text}')}")
    return "\n".join([*lines, "\\end{table}"]) + "\n"


def _latex_groups(table: Table) -> list[str]:
    heads, rules, start = [], [], 1
    for name, width in table.groups:
        heads.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_escape(name)}}}")
        if name:
            rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [" & ".join(heads) + " \\\\", " ".join(rules)]


# ------------------------------------------------------------------------------------------------ terminal


def rich_table(table: Table) -> RenderableType:
    """The table for a terminal, notes and cards dimmed below."""
    table = table.narrow
    rows = table.shown()
    # Where rows come in blocks of one first cell, such as an environment, it becomes a heading and leaves its width.
    blocks = [column.kind for column in table.columns[:2]] == ["text", "text"] and len(table.columns) > 2
    blocks &= len({row[0] for row in rows}) < len(rows)
    view = RichTable(title=Text(table.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[blocks:]:
        heading = "\n".join([*column.group.split(), column.name])
        view.add_column(Text(heading), justify="left" if column.kind == "text" else "right")
    block = None
    for row in rows:
        if blocks and row[0] != block:
            block = row[0]
            view.add_row(Text(block, style="bold"))
        view.add_row(*map(Text, row[blocks:]))
    below = [*table.notes, *(f"Protocol, {name} – {text}" for name, text in card_lines(table.cards))]
    return Group(view, *(Text(line, style="dim") for line in below))
