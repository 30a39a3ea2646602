"""Makes the store of a catalogue, once. An interrupted build goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from envs_text.webshop import goals, nouns
from envs_text.webshop.catalogue import Product
from envs_text.webshop.goals import Request
from envs_text.webshop.records import Position
from envs_text.webshop.search import Index, contents
from envs_text.webshop.store import Row, Rows, decode, encode
from harness.contracts import HarnessError

BATCH = 2_000
"""Products between two marks in the journal."""

Source = Callable[[Position], Iterator[tuple[Product, tuple[Request, ...], Position]]]
"""From a position of the source file on: products without nouns, their requests, the position after each."""


def build(directory: Path, name: str, source: Source, size: int) -> None:
    """Make the store of a catalogue.

    Each of its parts is finished before it gets its final name, so whatever has its name is whole.

    Args:
        directory: Exists; may hold what an interrupted build left.
        name: What the catalogue's version starts with; the hash of its content follows.
        size: Bytes of the source file, for the progress bar.
    """
    tagger = nouns.tagger()
    with _progress() as bars:
        _write_products(directory, name, source, bars, size)
        rows = Rows(directory)
        _write_index(directory, rows, bars)
        _write_goals(directory, rows, bars)
    with (directory / "products.jsonl").open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    manifest = {"version": f"{name}-{content[:12]}", "products": len(rows), "nouns": tagger}
    _write_json(directory / "manifest.json", manifest)


def _write_products(directory: Path, name: str, source: Source, bars: Progress, size: int) -> None:
    if (directory / "offsets.npy").exists():
        return
    journal = directory / "journal.json"
    written: dict[str, int] = (
        json.loads(journal.read_text()) if journal.exists() else {"bytes": 0, **asdict(Position())}
    )
    size_so_far = written.pop("bytes")
    position = Position(**written)
    bar = bars.add_task("products and their nouns", total=size, completed=position.offset)
    with (directory / "products.jsonl").open("a+b") as file:
        file.truncate(size_so_far)
        file.seek(0)
        lengths, asins = array("q"), dict[str, None]()
        for line in file:
            lengths.append(len(line))
            asins[decode(line)[0].asin] = None
        rest = source(position)
        while batch := list(islice(rest, BATCH)):
            fresh: dict[str, Row] = {}
            for product, requests, _ in batch:
                if product.asin not in asins:  # of products with one code, the first counts
                    fresh.setdefault(product.asin, (product, requests))
            tags = nouns.tag([product.name for product, _ in fresh.values()])
            for (product, requests), found in zip(fresh.values(), tags, strict=True):
                lengths.append(file.write(encode(replace(product, nouns=found), requests)))
            asins |= dict.fromkeys(fresh)
            position = batch[-1][2]
            file.flush()
            os.fsync(file.fileno())
            _write_json(journal, {"bytes": file.tell(), **asdict(position)})
            bars.update(bar, completed=position.offset)
    bars.update(bar, completed=size)
    if not asins:
        raise HarnessError(f"{name} holds no products")
    codes = np.array(list(asins), dtype="S")
    _write_array(directory / "asins.npy", codes)
    _write_array(directory / "sorted.npy", np.argsort(codes, kind="stable").astype(np.int32))
    _write_array(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _write_index(directory: Path, rows: Rows, bars: Progress) -> None:
    if (directory / "index").exists():
        return
    unfinished = directory / "index.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    texts = (contents(rows[number][0]) for number in bars.track(range(len(rows)), description="search index"))
    Index.build(texts).save(unfinished)
    unfinished.rename(directory / "index")


def _write_goals(directory: Path, rows: Rows, bars: Progress) -> None:
    found = {kind: (array("Q"), array("i"), array("i")) for kind in goals.KINDS}
    for row in bars.track(range(len(rows)), description="goals"):
        product, requests = rows[row]
        for kind, (ranks, of_row, numbers) in found.items():
            for number, make in enumerate(goals.of_row(kind, product, requests)):
                ranks.append(goals.rank(make()))
                of_row.append(row)
                numbers.append(number)
    for kind, (ranks, of_row, numbers) in found.items():
        if ranks:
            order = np.lexsort((numbers, of_row, ranks))
            _write_array(directory / f"{kind}.npy", np.column_stack((of_row, numbers)).astype(np.int32)[order])


def _write_array(path: Path, values: NDArray[Any]) -> None:
    with path.with_suffix(".unfinished").open("wb") as file:
        np.save(file, values)
    path.with_suffix(".unfinished").replace(path)


def _write_json(path: Path, value: Any) -> None:
    path.with_suffix(".unfinished").write_text(json.dumps(value))
    path.with_suffix(".unfinished").replace(path)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield bars
