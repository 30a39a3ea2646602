"""The reporter on a made-up run: what is compared, what is refused, and that nothing a model wrote is ever markup."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from synthetic_run import METHODS, card, write_cell, write_manifest, write_run

from harness.cards import Ledger
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.contracts import HarnessError
from harness.reporting import comparison_tables, figures, frames
from harness.reporting.comparison import BUDGETS
from harness.reporting.report import comparison_text, read, write_report
from harness.reporting.statistics import Estimate
from harness.reporting.tables import Column, Table, latex, markdown, rich_table, to_csv

HOSTILE = "</script><script>alert(1)</script> a|b\nc & <img src=x onerror=alert(2)> {{ 7*7 }} $x_1$"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "study", skill=HOSTILE)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text()


def trained(**settings: object) -> CellConfig:
    return CellConfig(env=EnvConfig(id="Sokoban-v1"), method=METHODS["grpo"], train=TrainConfig(updates=5), **settings)


def printed(part: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cell_of(directory: Path, method: str) -> Path:
    found = frames.cells(directory)
    return directory / "cells" / found.loc[found["method"] == method, "cell"].iloc[0]


# ------------------------------------------------------------------------------------------------- reading


def test_frames_have_one_row_per_cell_episode_and_update(run: Path) -> None:
    found = frames.cells(run)
    assert len(found) == 36
    assert set(found["method"]) == {"random", "base (tiny)", "grpo", "opd-teacher", "seed", "oracle"}
    assert len(frames.evaluations(run)) == 48 * (18 + 18 * 9)
    assert len(frames.updates(run)) == 18 * 40
    assert "stop_reasons/max_steps" in frames.updates(run)
    assert set(frames.skills(run)["method"]) == {"seed"}


def test_evaluation_numbers_arrive_in_the_table_unchanged(run: Path) -> None:
    episodes = frames.evaluations(run)
    last = episodes[(episodes["method"] == "grpo") & (episodes["env"] == "Sokoban-v1") & (episodes["update"] == 40)]
    arm = read(run).comparison.arms["Sokoban-v1", "grpo"]
    assert arm.final.value == pytest.approx(last["success"].mean())
    assert arm.spent("episodes")[:, 0].tolist() == [128 * u for u in range(0, 41, 5)]
    seed = read(run).comparison.arms["Sokoban-v1", "seed"]
    assert seed.spent("sampled_tokens")[0, 0] == 256 * (108 + 24)  # stage 1 and its analyses are charged


@pytest.mark.parametrize("content", [None, "", "cells"])
def test_nothing_to_report_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    directory = tmp_path / "run"
    if content is not None:
        (directory / content).mkdir(parents=True)
    with pytest.raises(HarnessError, match=r"no results at|no finished cell in") as error:
        write_report(directory)
    assert "\n" not in str(error.value)
    assert not (directory / "report.html").exists()


def test_unfinished_cells_are_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", envs=("Sokoban-v1",), methods=("grpo",), tasks=8, updates=5)
    unfinished = cell_of(run, "grpo")
    (unfinished / "manifest.json").unlink()
    with (unfinished / "evals.jsonl").open("a") as file:
        file.write('{"update": 5, "led')  # killed while writing
    results = read(run)
    assert results.unfinished == ["Sokoban-v1 grpo seed 0"]
    assert results.comparison.arms["Sokoban-v1", "grpo"].seeds == (1,)
    assert "Unfinished, not in the tables: Sokoban-v1 grpo seed 0" in printed(comparison_text(run))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("evals.jsonl", lambda text: text.replace('"update": 5', '"update" 5', 1), r"evals\.jsonl, line 2: not JSON"),
        ("evals.jsonl", lambda text: text.rstrip("\n")[:-3], r"evals\.jsonl, line 2: the line is cut off"),
        ("evals.jsonl", lambda text: text.replace("results", "result"), r"evals\.jsonl, line 1: no 'results'"),
        ("config.json", lambda text: text.replace('"seed":0', '"seed":"x"'), r"config\.json: seed: "),
        ("manifest.json", lambda text: text.replace("parser", "parsre"), r"manifest\.json: protocol .*parser"),
        ("manifest.json", lambda text: text[:40], r"cannot read .*manifest\.json"),
    ],
)
def test_damaged_files_are_named_with_their_line(tmp_path: Path, file: str, damage: object, message: str) -> None:
    (tmp_path / "cells").mkdir()
    path = write_cell(tmp_path, trained(), {0: 0.1, 5: 0.5}, 8) / file
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(HarnessError, match=message):
        read(tmp_path)


# ------------------------------------------------------------------------------------------- comparability


def test_different_cards_are_shown_apart_with_the_fields_that_differ(tmp_path: Path) -> None:
    other = replace(card("Sokoban-v1"), max_steps=30, history=5)
    for seed in (0, 1):
        write_cell(tmp_path, trained(seed=seed), {0: 0.1, 5: 0.5}, 16)
    write_cell(tmp_path, trained(seed=2), {0: 0.1, 5: 0.9}, 16, protocol=other)
    comparison = read(tmp_path).comparison
    assert [(s.name, s.main) for s in comparison.settings] == [("Sokoban-v1", True), ("Sokoban-v1 (protocol 2)", False)]
    assert comparison.arms["Sokoban-v1", "grpo"].seeds == (0, 1)
    assert comparison.arms["Sokoban-v1 (protocol 2)", "grpo"].seeds == (2,)
    (note,) = comparison.card_notes
    assert "not comparable" in note
    assert "history (2 / 5), max_steps (15 / 30)" in note
    assert note in comparison_tables.comparison_table(comparison).notes
    assert comparison_tables.paired_table(comparison).rows == ()


def test_scripted_policies_join_the_setting_of_the_policies_they_stand_beside(run: Path) -> None:
    settings = read(run).comparison.settings
    assert [s.name for s in settings] == [
        "ALFWorld-v1",
        "EZPoints-v1",
        "Sokoban-v1",
    ]  # though their prompt hash differs


def test_trainings_that_differ_in_a_setting_are_not_taken_for_seeds(tmp_path: Path) -> None:
    write_cell(tmp_path, trained(), {0: 0.1, 5: 0.5}, 8)
    hot = trained(seed=1).model_copy(update={"train": TrainConfig(updates=5, learning_rate=0.1)})
    write_cell(tmp_path, hot, {0: 0.1, 5: 0.0}, 8)
    methods = read(tmp_path).comparison.methods
    assert methods == ["grpo (train/learning_rate=0.1)", "grpo (train/learning_rate=1e-06)"]


def test_crashed_episodes_are_excluded_and_counted(tmp_path: Path) -> None:
    path = write_cell(tmp_path, trained(), {0: 0.0, 5: 0.0}, 16)
    lines = (path / "evals.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace('"stop_reason": "max_steps"', '"stop_reason": "env_error"', 4)
    (path / "evals.jsonl").write_text("\n".join(lines) + "\n")
    results = read(tmp_path)
    arm = results.comparison.arms["Sokoban-v1", "grpo"]
    assert arm.excluded == 4
    assert arm.n == "1 × 12 (4 excluded)"
    row = comparison_tables.seeds_table(results.comparison, results.evaluations).rows[0]
    assert row[5:7] == (12, 4)


def test_an_evaluation_that_crashed_whole_leaves_gaps_and_a_report(tmp_path: Path) -> None:
    write_cell(tmp_path, CellConfig(env=EnvConfig(id="ALFWorld-v1"), policy="tiny"), {0: 0.2}, 16)
    config = trained().model_copy(update={"env": EnvConfig(id="ALFWorld-v1")})
    file = write_cell(tmp_path, config, {0: 0.2, 5: 0.5}, 16) / "evals.jsonl"
    first, last = file.read_text().splitlines()
    crashed = re.sub('"stop_reason": "[a-z_]+"', '"stop_reason": "env_error"', last)
    file.write_text(f"{first}\n{crashed}\n")
    write_report(tmp_path)
    (row,) = comparison_tables.paired_table(read(tmp_path).comparison).rows
    assert "no task in common" in row
    assert "| grpo | – |" in (tmp_path / "tables/comparison.md").read_text()


def test_the_tables_say_what_was_made_up(run: Path) -> None:
    results = read(run)
    differences = comparison_tables.paired_table(results.comparison)
    found = {(row[0], row[1]): row[2:] for row in differences.rows}
    difference, p, *_ = found["Sokoban-v1", "grpo − base (tiny)"]
    assert isinstance(difference, Estimate)
    assert difference.low > 0.2
    assert p < 0.001
    assert all("oracle" not in comparison for _, comparison in found)
    efficiency = comparison_tables.efficiency_table(results.comparison, ("episodes",))
    area = {(row[0], row[1]): row[2].value for row in efficiency.rows}
    assert area["Sokoban-v1", "opd-teacher"] > area["Sokoban-v1", "grpo"]
    final = comparison_tables.comparison_table(results.comparison)
    assert [row[0] for row in final.rows] == ["random", "base (tiny)", "grpo", "opd-teacher", "seed", "oracle"]


# ---------------------------------------------------------------------------------------------- renderings


def awkward() -> Table:
    columns = (Column("a|b_\n<c>"), Column("rate", "range", "+.1f"), Column("n", "number", ",.0f"))
    rows = (
        ("50% & $x_1$ #{~^\\}", Estimate(-0.123, -0.2, -0.0001), 1234.0),
        ("=1+1", Estimate(float("nan"), float("nan"), float("nan")), None),
        ("[red]x[/red] [a](javascript:b) `c` *d*", Estimate(0.5, float("nan"), float("nan")), float("inf")),
    )
    return Table("awkward", "T|itle", columns, rows, ("note_1",), (("E_1", card("E_1")),))


def test_markdown_keeps_its_cells() -> None:
    lines = markdown(awkward()).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 5
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    assert rows[0].startswith(r"| a\|b\_ &lt;c&gt; |")
    assert r"[a\](javascript:b) \`c\` \*d\*" in rows[4]
    assert "−12.3 [−20.0, 0.0] | 1,234 |" in rows[2]
    assert "prompt hash: feedbeef0123" in lines[-1]


def test_latex_escapes_every_special_character() -> None:
    text = latex(awkward())
    assert (
        r"50\% \& \$x\_1\$ \#\{\textasciitilde{}\textasciicircum{}\textbackslash{}\} & $-$12.3 [$-$20.0, 0.0]" in text
    )
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    assert len(re.findall(r"(?<!\\)&", body)) == 2 * 3
    assert text.count("{") == text.count("}")


def test_csv_holds_full_precision_and_no_formulas(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(to_csv(awkward()))
    found = pd.read_csv(tmp_path / "t.csv")
    assert found["rate low"].tolist()[0] == -0.2
    assert found.iloc[1, 0] == "'=1+1"
    assert found["n"].isna().tolist() == [False, True, True]


def test_terminal_shows_markup_as_it_is() -> None:
    text = printed(rich_table(awkward()))
    assert "[red]x[/red]" in text
    assert "max steps: 15" in text


# --------------------------------------------------------------------------------------------- whole report


def test_everything_is_written(run: Path, page: str) -> None:
    names = {"comparison", "differences", "efficiency", "matched-budget", "kinds-alfworld-v1", "ledger", "runs"}
    written = {path.name for path in (run / "tables").iterdir()}
    assert written == {f"{name}.{e}" for name in names for e in ("csv", "md", "tex")} | {"protocol.csv"}
    drawn = {path.name for path in (run / "figures").iterdir()}
    assert {"efficiency-episodes.svg", "efficiency-sampled_tokens.png", "final.png", "dynamics-skills.svg"} <= drawn
    for table in ("comparison", "runs"):
        rows = list(csv.reader((run / "tables" / f"{table}.csv").open()))
        assert all(len(row) == len(rows[0]) for row in rows)
    assert "2 × 48" in page
    assert {path.stem for path in (run / "report/cells").iterdir()} == set(frames.cells(run)["cell"])
    assert not list(run.rglob("*.tmp"))


def test_every_link_leads_somewhere_in_the_run(run: Path, page: str) -> None:
    pages = [run / "report.html", *run.glob("report/*/*.html")]
    assert len(pages) > 36
    for path in pages:
        text = path.read_text()
        ids = set(re.findall(r'\bid="([^"]+)"', text))
        for target in re.findall(r'\b(?:src|href)="([^"]+)"', text):
            file, _, anchor = target.partition("#")
            assert not file or (path.parent / file).resolve().is_relative_to(run.resolve()), target
            assert not file or (path.parent / file).is_file(), f"{path}: {target}"
            assert file or anchor in ids, f"{path}: {target}"


def test_model_output_is_escaped_everywhere(run: Path, page: str) -> None:
    written = [path.read_text() for path in run.glob("report/**/*") if path.suffix in (".html", ".js")]
    assert any("alert(1)" in text for text in written)  # the skill is shown ...
    for text in (page, *written):
        assert "<script>" not in text  # ... and the only scripts are files of ours
        assert "</script><script>" not in text
        assert "<img src=x" not in text
        assert "<b>a desk" not in text


def test_ids_in_a_page_are_unique(run: Path, page: str) -> None:
    for text in (page, *(path.read_text() for path in run.glob("report/*/*.html"))):
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids))


def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    write_cell(tmp_path, trained(), {0: 0.1, 5: 0.4}, 8)
    write_report(tmp_path)
    (tmp_path / "report/cells/gone.html").write_text("of a cell that was deleted")
    first = {path: path.read_bytes() for path in tmp_path.glob("report/**/*.html") if path.stem != "gone"}
    write_report(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("report/**/*.html")} == first


def test_a_report_takes_its_own_old_tables_and_figures_away_and_nothing_else(tmp_path: Path) -> None:
    write_cell(tmp_path, trained(), {0: 0.1, 5: 0.4}, 8)
    write_report(tmp_path, budgets=["flops"])
    (tmp_path / "figures/mine.png").write_bytes(b"")
    write_report(tmp_path, budgets=["episodes"])
    assert {path.name for path in (tmp_path / "figures").glob("efficiency-*.png")} == {"efficiency-episodes.png"}
    assert (tmp_path / "figures/mine.png").exists()


@pytest.mark.parametrize("name", ["credit.parquet", "audit.json"])
def test_a_broken_file_leaves_the_last_report_as_it_was(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path, envs=("Sokoban-v1",), methods=("seed",), seeds=(0,), tasks=8, updates=5)
    write_report(run)
    (cell_of(run, "seed") / name).write_text("{}\n{")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(HarnessError, match=name.replace(".", r"\.")) as error:
        write_report(run, budgets=["flops"])
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_budgets_and_threshold_can_be_chosen(tmp_path: Path) -> None:
    write_cell(tmp_path, trained(), {0: 0.1, 5: 0.6}, 32)
    write_report(tmp_path, budgets=["trained_tokens", "wall_seconds"], threshold=0.4)
    table = (tmp_path / "tables/efficiency.md").read_text()
    assert "trained tokens" in table
    assert "wall s" in table
    assert "40" in table
    assert {p.name for p in (tmp_path / "figures").glob("efficiency-*.svg")} == {
        "efficiency-trained_tokens.svg",
        "efficiency-wall_seconds.svg",
    }
    with pytest.raises(HarnessError, match="trained_tokens"):
        write_report(tmp_path, budgets=["trained_token"])


def test_ticks_of_a_short_run_are_whole_updates(tmp_path: Path) -> None:
    write_cell(tmp_path, trained(), {0: 0.1, 3: 0.6}, 32)
    (axis,) = figures.sample_efficiency(read(tmp_path).comparison, "updates").axes
    assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_published_numbers_stand_beside_the_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "run", envs=("ALFWorld-v1",), methods=("grpo",), tasks=8, updates=5)
    published = Path(__file__).parents[3] / "results/published"
    page = write_report(tmp_path / "run", published).read_text()
    assert 'id="table-published"' in page
    assert "not comparable" in (tmp_path / "run/tables/published.md").read_text()


def test_figures_are_the_same_bytes_every_time(run: Path) -> None:
    first, second = (figures.render(figures.final_success(read(run).comparison)) for _ in range(2))
    assert first == second
    ElementTree.fromstring(first["svg"])


@pytest.mark.parametrize("budget", BUDGETS)
def test_labels_of_neighbouring_panels_do_not_touch(run: Path, budget: str) -> None:
    figure = figures.sample_efficiency(read(run).comparison, budget)
    assert figure is not None
    figures.render(figure)
    boxes = [axis.xaxis.label.get_window_extent() for axis in figure.axes]
    assert len(boxes) == 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_every_method_has_a_look_of_its_own(run: Path) -> None:
    comparison = read(run).comparison
    arm = comparison.arms["Sokoban-v1", "grpo"]
    many = {("Sokoban-v1", f"method {n}"): replace(arm, method=f"method {n}") for n in range(20)}
    starred = {("Sokoban-v1", "grpo*"): replace(arm, method="grpo*")}
    looks = figures.looks(replace(comparison, arms=comparison.arms | many | starred))
    pairs = [(look.colour, look.marker, look.hollow) for name, look in looks.items() if name.startswith("method")]
    assert len(pairs) == len(set(pairs))
    assert (looks["grpo*"].colour, looks["grpo*"].hollow) == (looks["grpo"].colour, True)


@pytest.mark.parametrize("text", [r"$\bad{ --><script>", "\x00\x1b[2J\x9b", "\u202e\ud800\uffff\u2028", "漢" * 200])
def test_hostile_names_do_not_break_a_figure(text: str) -> None:
    with figures.style():
        figure = Figure()
        figure.subplots().plot([0, 1], label=text)
        figure.axes[0].set_title(text)
        figure.axes[0].legend()
    svg = figures.render(figure)["svg"]
    ElementTree.fromstring(svg)
    assert b"<script" not in svg


def test_evaluation_alone_makes_a_report(tmp_path: Path) -> None:
    cell = write_cell(tmp_path, CellConfig(env=EnvConfig(id="EZPoints-v1"), policy="tiny"), {0: 0.2}, 8)
    page = write_report(tmp_path).read_text()
    assert "Sample efficiency" not in page
    assert not (tmp_path / "tables" / "ledger.csv").exists()
    own = (tmp_path / f"report/cells/{cell.name}.html").read_text()
    assert "Evaluation after update 0" in own
    assert 'id="training"' not in own
    assert 'id="method"' not in own


def test_warnings_of_a_cell_stand_before_the_numbers(tmp_path: Path) -> None:
    path = write_cell(tmp_path, CellConfig(env=EnvConfig(id="EZPoints-v1"), policy="tiny"), {0: 0.2}, 8)
    write_manifest(path, card("EZPoints-v1"), Ledger(), {"warnings": ["no distillation token was active"]})
    page = write_report(tmp_path).read_text()
    for text in (page, (tmp_path / f"report/cells/{path.name}.html").read_text()):
        assert text.index("no distillation token was active") < text.index("<table")
