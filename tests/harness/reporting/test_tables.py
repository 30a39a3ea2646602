"""LaTeX that compiles: by a TeX engine where there is one, by its structure everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic_run import card, write_run

from harness.reporting.report import read, tables
from harness.reporting.statistics import Estimate
from harness.reporting.tables import Column, Table, latex

HOSTILE = "50% & $x_1$ #{~^\\} [a] <b> |c| \"d\" 'e' –−±×≥≤→·Δ é ∞ 漢 \u2028 \x1b[31m `f` --"


def awkward() -> Table:
    columns = (Column("a_b & c", group="E_1 %"), Column("rate", "range", "+.1f", "E_1 %"), Column("n", "number"))
    rows = (
        (HOSTILE, Estimate(-0.123, -0.2, -0.0001), 1234.0),
        ("[first]", Estimate(float("nan"), float("nan"), float("nan")), None),
        ("*", None, 0.0),
    )
    return Table("awk_ward", "T_i & tle", columns, rows, (HOSTILE, "note_1"), (("E_1", card("E_1")),))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    """An awkward table and all those of a made-up run."""
    run = write_run(tmp_path_factory.mktemp("run") / "study", tasks=16, updates=10)
    return {"awkward": awkward(), **tables(read(run))}


def document(found: dict[str, Table]) -> str:
    body = "\n\\clearpage\n".join(latex(table) for table in found.values())
    return f"\\documentclass{{article}}\n\\usepackage{{booktabs}}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"


def test_structure(found: dict[str, Table]) -> None:
    for table in found.values():
        text = latex(table)
        begun, ended = (re.findall(rf"\\{word}\{{(\w+)\}}", text) for word in ("begin", "end"))
        assert begun == ended[::-1] == ["table", "tabular"]
        plain = re.sub(r"\\[{}]", "", text)
        assert plain.count("{") == plain.count("}")
        width = len(table.narrow.columns)
        assert re.search(rf"\\begin{{tabular}}{{[lr]{{{width}}}}}", text)
        body = text.split("\\toprule")[1].split("\\bottomrule")[0]
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert len(rows) == len(table.rows) + 1 + any(column.group for column in table.columns)
        for row in rows:
            spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row))
            assert len(re.findall(r"(?<!\\)&", row)) + spanned == width - 1
            assert not row.startswith("[")


def test_no_character_is_left_that_tex_would_read_or_cannot_print(found: dict[str, Table]) -> None:
    text = latex(found["awkward"])
    assert {character for character in text if not character.isascii()} == {"é"}
    assert "U+6F22" in text
    code = [line for line in text.splitlines() if not line.startswith("%")]
    assert not any(re.search(r"(?<!\\)[%#_~^]", line.replace("\\_", "")) for line in code)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


@pytest.mark.slow
def test_a_tex_engine_compiles_every_table(found: dict[str, Table], tmp_path: Path) -> None:
    engine = next((name for name in ("pdflatex", "tectonic") if shutil.which(name)), None)
    if engine is None:
        pytest.skip("no pdflatex and no tectonic on this machine")
    (tmp_path / "tables.tex").write_text(document(found))
    options = ["-interaction=nonstopmode", "-halt-on-error"] if engine == "pdflatex" else []
    done = subprocess.run([engine, *options, "tables.tex"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "tables.pdf").stat().st_size > 10_000
