"""Any text in a report's tables, pages and data: it stays in its cell, runs nothing and reorders nothing."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from markupsafe import Markup
from nasty import NASTY, few, texts

from harness.inert import readable, visible
from harness.reporting import charts, site
from harness.reporting.tables import Column, Table, csv_text, file_name, latex, markdown, to_csv

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def table(text: str) -> Table:
    columns = (Column(text), Column("n", "number", group=text))
    return Table("name", text, columns, ((text, 1.0), (text, -2.5)), (text,))


@few
@given(texts)
def test_tables_keep_their_shape(text: str) -> None:
    shown = table(text)
    rows = list(csv.reader(io.StringIO(to_csv(shown))))
    assert [len(row) for row in rows] == [2, 2, 2]
    assert rows[1][0] == csv_text(text)
    assert not re.match(r"\s*[=+@\-]", rows[1][0])
    lines = markdown(shown).splitlines()
    body = [line for line in lines if line.startswith("| ")]
    assert len(body) == 4
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3 for line in body)
    assert not re.search(r"<(?!br)[a-z/!]", markdown(shown), re.IGNORECASE)
    written = latex(shown)
    assert written.count("\\\\\n") == 3 + ("\\multicolumn" in written)
    assert re.findall(r"\\(input|include|write|catcode|def|href|url)\b", written) == []
    for rendered in (to_csv(shown), markdown(shown), written):
        assert not STEERING.search(rendered)


@few
@given(texts)
def test_a_file_name_is_one_part_of_a_path(text: str) -> None:
    name = f"kinds-{file_name(text)}.csv"
    assert Path(name).name == name
    assert len(name.encode()) < 255
    assert re.fullmatch(r"[\w.-]+", name)


def test_file_names_of_different_texts_differ() -> None:
    assert file_name("ALFWorld-v1 (history 2)") == "alfworld-v1-history-2"
    assert len({file_name(text) for text in ("a/b", "a\\b", "ab", "a:b")}) == 4


@few
@given(texts)
def test_data_of_a_page_is_one_call_and_holds_the_very_text(text: str) -> None:
    script = site.script_json({"text": text, text: [text]})
    assert json.loads(script) == {"text": text, text: [text]}
    assert "<" not in script
    assert not STEERING.search(script)
    assert len(script.splitlines()) == 1


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@few
@given(texts)
def test_a_page_shows_text_and_no_markup_of_it(text: str) -> None:
    template = site._environment().from_string("<p title='{{ text }}'>{{ text }}</p>{{ made }}")
    page = template.render(text=text, made=Markup("<b>{}</b>").format(text))
    read = Elements()
    read.feed(page)
    assert read.tags == ["p", "b"]
    assert read.text == visible(text) * 2
    assert not STEERING.search(page)


@few
@given(texts)
def test_charts_hold_no_markup_of_their_names(text: str) -> None:
    drawn = charts.bar(text, [(text, 1.0), ("b", 2.0)]) + charts.legend([text, "b"])
    read = Elements()
    read.feed(str(drawn))
    assert {"script", "img"}.isdisjoint(read.tags)


@pytest.mark.parametrize("text", NASTY)
def test_a_page_is_written_whatever_is_in_it(tmp_path: Path, text: str) -> None:
    site.write_data(tmp_path, "data", [text])
    written = (tmp_path / "report" / "data" / "data.js").read_text(encoding="utf-8")
    assert written.count("\n") == 1
    assert json.loads(written.removeprefix('harness.receive("data", ').removesuffix(");\n")) == [text]
    with pytest.raises(ValueError, match="data name"):
        site.write_data(tmp_path, f"../{text}", [])


def test_templates_refuse_what_they_were_not_given() -> None:
    with pytest.raises(jinja2.UndefinedError):
        site._environment().from_string("{{ nothing }}").render()
    assert readable("\ud800") == "\ufffd"
