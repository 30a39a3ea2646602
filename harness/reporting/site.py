"""The static site of a run: HTML pages, their data and their assets, all readable from disk without a network.

::

    DIR/report.html                 the overview
    DIR/report/cells/<id>.html      one page per cell; likewise episodes/<id>.html and skills/<id>.html
    DIR/report/assets/              style sheets and scripts, copied from harness/templates/site
    DIR/report/data/<name>.js       one call of harness.receive("<name>", value); browsers do not fetch from file://

No page holds a script of its own, and a content security policy forbids any: what a model wrote is text for certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.inert import visible
from harness.reporting.frames import card_rows
from harness.reporting.statistics import Estimate
from harness.reporting.tables import Value
from harness.store import writing

FOLDER = "report"
"""Where everything but the overview lies, within a run's directory."""

OVERVIEW = "report.html"

_UNFIT = re.compile("[<\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a script must not hold as it is: a lone surrogate has no UTF-8 form, others end a script element or, to old
browsers, a line, or show the code in another order than it has."""


def write_page(
    run: Path, path: str, template: str, title: str, crumbs: Sequence[tuple[str, str]] = (), **context: Any
) -> None:
    """Render a page of a run.

    Args:
        run: The run's directory.
        path: File within it, ``report.html`` or ``report/...``.
        template: File in ``harness/templates/site``.
        crumbs: (name, path within the run's directory) of the pages above, the overview excepted.
        context: What the template shows. It also has ``title``, ``run`` (the run's name) and ``up`` (the prefix that
            leads from the page to the run's directory, e.g. ``../../``).
    """
    up = "../" * path.count("/")
    name = run.resolve().name
    html = _environment().get_template(template).render(title=title, run=name, up=up, crumbs=crumbs, **context)
    _write(run / path, html.lstrip() + "\n")


def write_data(run: Path, name: str, value: Any) -> None:
    """Write data for the pages: ``harness.load(name)`` in the browser gives ``value``.

    ``name`` consists of letters, digits, dots and dashes; ``value`` of what JSON knows.
    """
    if not re.fullmatch(r"[A-Za-z0-9.-]+", name):
        raise ValueError(f"data name {name!r}: only letters, digits, dots and dashes")
    _write(run / FOLDER / "data" / f"{name}.js", f"harness.receive({script_json(name)}, {script_json(value)});\n")


def write_chunks(run: Path, name: str, index: dict[str, Any], chunks: Iterable[tuple[int, Any]]) -> None:
    """Write a list that pages load in parts: ``name.0``, ``name.1``, ... and, under ``name``, what is read at once.

    Args:
        index: Its ``starts`` are added: the number of the first entry of each chunk.
        chunks: (number of its first entry, data) of each.
    """
    starts = []
    for order, (start, chunk) in enumerate(chunks):
        starts.append(start)
        write_data(run, f"{name}.{order}", chunk)
    write_data(run, name, {**index, "starts": starts})


def write_assets(run: Path) -> None:
    """Copy style sheets and scripts of the pages."""
    for asset in files("harness").joinpath("templates/site").iterdir():
        if asset.name.endswith((".css", ".js")):
            _write(run / FOLDER / "assets" / asset.name, asset.read_text(encoding="utf-8"))


def script_json(value: Any) -> str:
    """Compact JSON that may stand in a script: it neither closes the element nor breaks a line. NaN is refused."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNFIT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def sort_key(value: Value) -> str | float:
    """What a column is sorted by when its heading is clicked."""
    if isinstance(value, Estimate):
        return value.value
    return "" if value is None else value


def breakable(name: str) -> Markup:
    """A name that may go on in another line behind its underscores."""
    return Markup("_<wbr>").join(name.split("_"))


def protocol_id(setting: str) -> str:
    """Where on the overview a setting's protocol card stands."""
    return f"protocol-{re.sub(r'[^A-Za-z0-9]+', '-', setting).strip('-').lower()}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness", "templates/site"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["zip"] = zip
    environment.filters["sort_key"] = sort_key
    environment.filters["breakable"] = breakable
    environment.filters["card_rows"] = card_rows
    environment.filters["protocol_id"] = protocol_id
    return environment


def _shown(value: Any) -> Any:
    """What a template prints: text made visible."""
    return type(value)(visible(value)) if isinstance(value, str) else value


def _write(path: Path, text: str) -> None:
    """Plainly: a site is put in place when it is whole."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))
