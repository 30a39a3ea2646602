"""The pages of a report in a real browser: clicked through, read, driven by keys, printed; and hostile text in them."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from synthetic_run import write_cell, write_run

from harness.config import CellConfig, EnvConfig
from harness.inert import visible
from harness.records import read_episodes
from harness.reporting import frames
from harness.reporting.report import write_report
from harness.reporting.site import script_json

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = (
    "</script><script>alert(1)</script> <img src=x onerror=alert(2)> \x1b[31mred\x1b[0m {{ 7*7 }} \u2028 'q' \"r\""
)
KINDS = ("overview", "cells", "episodes", "episode", "skills")
"""Every kind of page; ``episode`` is an open episode with its credit."""


@dataclass
class Run:
    """A run's directory with its report, and the cell of seed, which has pages of every kind."""

    path: Path
    cell: str

    def url(self, kind: str) -> str:
        base = self.path.as_uri()
        return {
            "overview": f"{base}/report.html",
            "episode": f"{base}/report/episodes/{self.cell}.html#train/20/train%2F000017/1",
        }.get(kind, f"{base}/report/{kind}/{self.cell}.html")


@dataclass
class Visit:
    """An open page and everything that it asked for or complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def loaded(self) -> list[Path]:
        return [Path(unquote(urlsplit(url).path)) for url in self.requests if url.startswith("file:")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = write_run(
        tmp_path_factory.mktemp("site") / "study",
        envs=("ALFWorld-v1",),
        methods=("grpo", "seed"),
        seeds=(0,),
        tasks=16,
        skill=HOSTILE,
    )
    write_report(path)
    cells = frames.cells(path)
    return Run(path, str(cells.loc[cells["method"] == "seed", "cell"].iloc[0]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(browser: Browser, url: str, **options: object) -> Iterator[Visit]:
    """Open a page; afterwards nothing may have failed, alerted, or left the disk."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    page = context.new_page()
    visit = Visit(page)
    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("requestfailed", lambda request: visit.problems.append(f"not loaded: {request.url}"))
    page.on("console", lambda message: visit.problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: visit.problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (visit.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    try:
        yield visit
        assert visit.problems == []
        assert [url for url in visit.requests if not url.startswith("file:")] == []
    finally:
        context.close()


def ready(page: Page, kind: str) -> None:
    """Wait for what scripts build."""
    waited = {"episodes": "#list tbody tr", "skills": "#list tbody tr", "episode": "#episode .tokens .token"}
    if kind in waited:
        page.wait_for_selector(waited[kind])


# ----------------------------------------------------------------------------------------- clicking through


def test_every_page_is_reached_by_clicking_and_shows_the_numbers_of_the_frames(run: Run, browser: Browser) -> None:
    cell = next(cell for cell in frames.read_cells(run.path)[0] if cell.id == run.cell)
    evaluations, episodes = frames.evaluations(run.path), read_episodes(cell.store)
    of_cell = evaluations[evaluations["cell"] == run.cell]
    last = of_cell[of_cell["update"] == of_cell["update"].max()]
    with visit(browser, run.url("overview")) as visited:
        page = visited.page
        row = page.locator("#table-runs tbody tr", has=page.get_by_role("link", name=run.cell))
        assert f"{100 * last['success'].mean():.1f} [" in row.inner_text()

        row.get_by_role("link", name=run.cell).click()
        assert page.locator("h1").inner_text() == "ALFWorld-v1 · seed · seed 0"
        overall = page.locator("#table-kinds tbody tr", has_text="all (micro)").locator("td").all_inner_texts()
        assert overall[2] == "16"
        assert overall[3].startswith(f"{100 * last['success'].mean():.1f} [")
        assert float(overall[5]) == pytest.approx(last["steps"].mean(), abs=0.05)
        axes = dict(
            page.locator("#table-method tbody tr").evaluate_all(
                "rows => rows.map(r => [r.cells[0].innerText, r.cells[1].innerText])"
            )
        )
        assert axes["teacher.context"] == "own_skill"
        assert axes["signal.beta"] == "5.0"
        for figure in ("Gate of a token (% of tokens)", "Teacher gap D by outcome (nats)", "Entropy (nats)"):
            assert page.locator("figure", has_text=figure).locator("svg").count() == 1

        page.get_by_role("link", name="episodes", exact=True).first.click()
        ready(page, "episodes")
        assert str(len(episodes)) in page.locator("#list .count").inner_text()
        page.locator("select[name=phase]").select_option("train")
        assert page.locator("#list tbody tr[data-row]").count() == int((episodes["phase"] == "train").sum())
        page.locator("#list tbody tr a").first.click()
        page.wait_for_selector("#episode section.step")
        assert page.locator("#episode section.step").count() == 2

        page.get_by_role("link", name="ALFWorld-v1 · seed · seed 0").click()
        page.get_by_role("link", name="skills", exact=True).first.click()
        ready(page, "skills")
        assert page.locator("#list tbody tr[data-row]").count() == len(frames.skills_of([cell]))
        page.locator("#list tbody tr a").first.click()
        page.wait_for_selector("#episode section.step")
        page.locator(".crumbs a").first.click()
        assert page.locator("#result").count() == 1


def test_the_tokens_of_an_episode_carry_their_credit(run: Run, browser: Browser) -> None:
    credit = frames.pd.read_parquet(run.path / f"cells/{run.cell}/credit.parquet")
    rows = credit[(credit["update"] == 20) & (credit["attempt"] == 1)].sort_values("step")
    first = rows.iloc[0]
    with visit(browser, run.url("episode")) as visited:
        page = visited.page
        ready(page, "episode")
        assert page.locator("#episode .token-box").count() == 1
        assert page.locator("#episode .tokens .token").count() == sum(map(len, rows["tokens"]))
        tokens = page.locator("#step-1 .tokens .token")
        assert tokens.all_inner_texts() == list(first["tokens"])
        tokens.nth(2).click()
        shown = lambda name: page.locator(f'#token [data-value="{name}"] dd').inner_text().replace("−", "-")  # noqa: E731
        assert float(shown("shift D")) == pytest.approx(first["teacher"][2] - first["logp"][2], abs=1e-3)
        assert float(shown("gate g")) == pytest.approx(first["gate"][2], abs=1e-3)
        assert float(shown("A before")) == pytest.approx(first["advantage"], abs=1e-3)
        assert float(shown("A′ after")) == pytest.approx(first["pull"][2], abs=1e-3)
        shift = sum(float(np.sum(row["teacher"] - row["logp"])) for _, row in rows.iterrows())
        total = page.locator("#sums .total td").first.inner_text().replace("−", "-")
        assert float(total) == pytest.approx(shift, abs=1e-3)
        ups, downs = page.locator("#step-1 .token.up").count(), page.locator("#step-1 .token.down").count()
        shifts = np.round(first["teacher"] - first["logp"], 9)
        assert (ups, downs) == (int((shifts > 0).sum()), int((shifts < 0).sum()))


def test_tables_sort_by_any_column_and_empty_cells_stay_last(run: Run, browser: Browser) -> None:
    with visit(browser, run.url("overview")) as visited:
        page = visited.page
        table = page.locator("#table-comparison table")
        first = lambda: table.locator("tbody tr").first.locator("td").first.inner_text()  # noqa: E731
        heading = table.get_by_role("button", name="success")
        heading.click()
        assert first() == "oracle"
        assert table.locator("th[aria-sort=descending]").count() == 1
        heading.press("Enter")
        assert first() == "random"
        kinds = page.locator("#table-matched-budget tbody tr")
        assert kinds.count() > 0


# -------------------------------------------------------------------------------------------------- keyboard


def test_figures_are_chosen_by_keyboard_and_by_address(run: Run, browser: Browser) -> None:
    with visit(browser, run.url("overview")) as visited:
        page = visited.page
        tabs = page.locator("#dynamics [role=tab]")
        visible = lambda: page.locator("#dynamics figure:visible").evaluate_all("all => all.map(f => f.dataset.label)")  # noqa: E731
        assert visible() == ["Learning"]
        tabs.first.focus()
        page.keyboard.press("ArrowRight")
        assert visible() == ["Optimisation"]
        assert page.evaluate("document.activeElement.textContent") == "Optimisation"
        page.keyboard.press("End")
        assert visible() == ["Skills"]
        page.keyboard.press("ArrowRight")
        assert visible() == ["Learning"]
        page.evaluate("location.hash = 'figure-dynamics-skills'")
        page.wait_for_function("document.querySelector('#figure-dynamics-skills').offsetHeight > 0")
        assert visible() == ["Skills"]
        assert page.locator("#dynamics img:visible").evaluate("image => image.complete && image.naturalWidth > 0")


def test_episodes_are_browsed_by_keyboard(run: Run, browser: Browser) -> None:
    with visit(browser, run.url("episodes")) as visited:
        page = visited.page
        ready(page, "episodes")
        page.keyboard.press("/")
        page.keyboard.type("train/000017")
        page.keyboard.press("Enter")
        assert page.locator("#list tbody tr[data-row]").count() == 6
        page.keyboard.press("j")
        assert page.locator("#list tr[aria-selected=true]").evaluate("row => row.sectionRowIndex") == 1
        page.keyboard.press("Enter")
        ready(page, "episode")
        opened = page.url
        page.keyboard.press("j")
        page.wait_for_function("before => location.href !== before", arg=opened)
        ready(page, "episode")
        colouring = page.locator(".panel [aria-pressed=true]").get_attribute("data-colouring")
        page.keyboard.press("t")
        assert page.locator(".panel [aria-pressed=true]").get_attribute("data-colouring") != colouring
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.classList.contains('token')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#list tbody tr")
        assert page.locator("#episode").is_hidden()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_stop_of_the_tabulator_skips_to_the_content(run: Run, browser: Browser, kind: str) -> None:
    with visit(browser, run.url(kind)) as visited:
        ready(visited.page, kind)
        if kind != "episode":  # there an address has moved the focus
            visited.page.keyboard.press("Tab")
            assert visited.page.evaluate("document.activeElement.getAttribute('href')") == "#content"
        unnamed = visited.page.locator("button, a, input, select, svg[role=img], img").evaluate_all(
            "all => all.filter(e => !(e.innerText || e.getAttribute('aria-label') || e.alt)).map(e => e.outerHTML)"
        )
        assert unnamed == []


# -------------------------------------------------------------------------------------------- looks and print

CONTRAST = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => top[3] * v + (1 - top[3]) * below[i]);
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!text || !element.checkVisibility() || element.disabled) continue;
    const style = getComputedStyle(element), below = background(element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className} ${text.slice(0, 40)}`);
  }
  return { low, paper: light(background(document.body)) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_readable_on_light_and_on_dark(run: Run, browser: Browser, kind: str, scheme: str) -> None:
    with visit(browser, run.url(kind), color_scheme=scheme) as visited:
        ready(visited.page, kind)
        found = visited.page.evaluate(CONTRAST)
        assert found["low"] == []
        assert (found["paper"] > 0.5) == (scheme == "light")
        assert visited.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        visited.page.evaluate("document.querySelector('h1').style.color = 'var(--line)'")
        assert [line for line in visited.page.evaluate(CONTRAST)["low"] if "H1" in line]  # the measure itself works


@pytest.mark.parametrize("kind", KINDS)
def test_print_is_black_on_white_without_controls_and_within_the_sheet(run: Run, browser: Browser, kind: str) -> None:
    with visit(browser, run.url(kind), color_scheme="dark") as visited:
        page = visited.page
        ready(page, kind)
        page.set_viewport_size({"width": 695, "height": 1000})  # A4 within its margins
        page.emulate_media(media="print", color_scheme="dark")
        found = page.evaluate(CONTRAST)
        assert found["low"] == []
        assert found["paper"] == 1
        assert (
            page.locator("nav, [role=tablist], .bar").evaluate_all("all => all.filter(e => e.checkVisibility()).length")
            == 0
        )
        assert page.locator("figure").evaluate_all("all => all.filter(e => !e.checkVisibility()).length") == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


# ------------------------------------------------------------------------------------------- hostile and long


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_text_is_shown_and_does_nothing(run: Run, browser: Browser, kind: str) -> None:
    with visit(browser, run.url(kind)) as visited:
        page = visited.page
        ready(page, kind)
        if kind == "skills":
            page.keyboard.press("Enter")
            page.wait_for_selector("tr.unfolded")
        if kind in ("episode", "skills"):
            assert page.get_by_text("</script><script>alert(1)</script>").count() > 0
            said = page.evaluate("document.body.textContent")
            assert visible(HOSTILE) in said  # signs in place of what steers a terminal it is copied to
        assert page.locator("script:not([src]), img[src=x]").count() == 0
        page.wait_for_timeout(50)  # an image that fails to load would have said so by now


def test_scripts_of_data_hold_any_text() -> None:
    value = {HOSTILE: [HOSTILE, None, 1.5, "\ud800 alone"]}
    text = script_json(value)
    assert "<" not in text
    assert not re.search("[\u2028\u2029]", text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match=r"NaN|Out of range"):
        script_json([float("nan")])


def test_two_thousand_episodes_load_an_index_and_no_more_than_one_part(tmp_path: Path, browser: Browser) -> None:
    cell = write_cell(tmp_path, CellConfig(env=EnvConfig(id="EZPoints-v1"), policy="tiny"), {0: 0.4}, 2000, "short")
    write_report(tmp_path)
    assert len(list(tmp_path.glob("report/data/*.episodes.*.js"))) == 2000 / 50
    start = time.perf_counter()
    with visit(browser, (tmp_path / f"report/episodes/{cell.name}.html").as_uri()) as visited:
        ready(visited.page, "episodes")
        print(f"2,000 episodes listed after {time.perf_counter() - start:.2f} s")
        assert "2,000" in visited.page.locator("#list .count").inner_text()
        opened = [path for path in visited.loaded if path.parent.name == "data"]
        assert opened == [tmp_path / f"report/data/{cell.name}.episodes.js"]
        assert sum(path.stat().st_size for path in visited.loaded) < 1_000_000
        visited.page.keyboard.press("Enter")
        visited.page.wait_for_selector("#episode section.step")
        print(f"the first of them shown after {time.perf_counter() - start:.2f} s")
        assert len([path for path in visited.loaded if path.parent.name == "data"]) == 2
        assert sum(path.stat().st_size for path in visited.loaded) < 1_000_000
