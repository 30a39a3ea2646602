"""The official WebShop files, by their official names, as a shop.

Read are the products (``items_shuffle_1000.json`` or ``items_shuffle.json``), their attributes and instructions
(``items_ins_v2_1000.json`` or ``items_ins_v2.json``) and, where present, people's requests (``items_human_ins.json``).
On first use a store is built beside them, see `envs_text.webshop.build`.

Differences from the original loader: where the price is a range, the product's price is drawn from a hash of its code
and not from the random numbers of the process; a product without annotation has no attributes instead of a dummy one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from envs_text.webshop.build import build
from envs_text.webshop.catalogue import Product
from envs_text.webshop.goals import Request
from envs_text.webshop.records import Position, Record, stream
from envs_text.webshop.store import DiskShop
from harness.contracts import DataMissing, HarnessError, digest

CATALOGUES = {"items_shuffle_1000.json": "items_ins_v2_1000.json", "items_shuffle.json": "items_ins_v2.json"}
"""Files of products, and the file of attributes that belongs to each."""

HUMAN = "items_human_ins.json"

FORMAT = 1
"""Version of the store's layout and of what is read from the files; another one is built anew."""

DEFAULT_PRICE = "$100.0"
"""What a product without a price costs in the original."""


@dataclass(frozen=True)
class Files:
    """The files of one catalogue."""

    products: Path
    attributes: Path
    human: Path | None


def open_shop(path: str | Path) -> DiskShop:
    """The shop of the official files in a directory; the first call builds its store (minutes to an hour, resumable).

    Args:
        path: The directory, or the file of products where the directory holds both catalogues.

    Raises:
        HarnessError: Files are missing or malformed (one line with file and line number), the store can be written
            nowhere, or the noun tagger is not installed.
    """
    files = locate(Path(path))
    directory = _place(files)
    if not (directory / "manifest.json").exists():
        with _alone(directory):
            if not (directory / "manifest.json").exists():
                size = files.products.stat().st_size
                build(directory, files.products.stem, lambda start: read(files, start), size)
    return _opened(directory)


@lru_cache(maxsize=4)
def _opened(directory: Path) -> DiskShop:
    return DiskShop(directory)


def locate(path: Path) -> Files:
    """Find the files of a catalogue; raises HarnessError where one is missing or the choice is not clear."""
    if path.is_file():
        directory, names = path.parent, [path.name]
    else:
        directory, names = path, [name for name in CATALOGUES if (path / name).is_file()]
    if not names or names[0] not in CATALOGUES:
        raise DataMissing(f"no WebShop products at {path} (option data): {' or '.join(CATALOGUES)} is needed")
    if len(names) > 1:
        raise HarnessError(f"{path} holds two catalogues: name one of the files {' and '.join(names)} instead")
    attributes = directory / CATALOGUES[names[0]]
    if not attributes.is_file():
        raise HarnessError(f"{directory} holds {names[0]} but not {attributes.name}, which belongs to it")
    human = directory / HUMAN
    return Files(directory / names[0], attributes, human if human.is_file() else None)


# --------------------------------------------------------------------------------------------------- reading


def read(files: Files, start: Position) -> Iterator[tuple[Product, tuple[Request, ...], Position]]:
    """Products without nouns, their requests and the position after each, in the order of the file.

    Products whose code is ``nan`` or longer than ten characters are left out, as in the original.
    """
    annotations = _by_code(files.attributes, _annotation)
    requests = _by_code(files.human, _requests) if files.human else {}
    for record in stream(files.products, start if start.number else None):
        asin = record.string(record.value, "asin")
        if not asin or not asin.isascii():
            raise record.error(f"asin {asin!r} is no code")
        if asin != "nan" and len(asin) <= 10:
            product = _product(record, annotations.get(asin, _Annotation()))
            yield product, requests.get(asin, ()), record.after


@dataclass(frozen=True, slots=True)
class _Annotation:
    attributes: tuple[str, ...] = ()
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()


T = TypeVar("T")


def _by_code(path: Path, parse: Callable[[Record], T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for record in stream(path):
        if record.key in found:
            raise record.error(f"{record.key!r} stands here for the second time")
        found[record.key] = parse(record)
    return found


def _annotation(record: Record) -> _Annotation:
    if not isinstance(record.value, dict):
        raise record.error(f"the entry of {record.key!r} must be an object")
    instruction = record.value.get("instruction")
    return _Annotation(
        attributes=_interned(record.strings(record.value.get("attributes", []), "attributes")),
        instruction=record.string(record.value, "instruction") if instruction else "",
        instruction_attributes=_interned(
            record.strings(record.field(record.value, "instruction_attributes"), "instruction_attributes")
            if instruction
            else ()
        ),
    )


def _interned(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same texts; a million products share a few thousand attributes."""
    return tuple(map(sys.intern, names))


def _requests(record: Record) -> tuple[Request, ...]:
    if not isinstance(record.value, list):
        raise record.error(f"the entry of {record.key!r} must be a list of requests")
    return tuple(
        Request(
            text=record.string(asked, "instruction"),
            attributes=record.strings(record.field(asked, "instruction_attributes"), "instruction_attributes"),
            options=record.strings(record.field(asked, "instruction_options"), "instruction_options"),
        )
        for asked in record.value
    )


def _product(record: Record, annotation: _Annotation) -> Product:
    fields = record.value
    asin, name = record.string(fields, "asin"), record.string(fields, "name")
    price, price_text = _price(record, asin)
    bullets = record.field(fields, "small_description")
    return Product(
        asin=asin.upper(),
        title=name,
        name=name,
        category=record.string(fields, "category"),
        query=record.string(fields, "query").lower().strip(),
        product_category=record.string(fields, "product_category"),
        description=record.string(fields, "full_description"),
        bullets=(bullets,) if isinstance(bullets, str) else record.strings(bullets, "small_description"),
        reviews=(),
        rating="N.A.",
        attributes=annotation.attributes,
        options=_options(record),
        price=price,
        price_text=price_text,
        instruction=annotation.instruction,
        instruction_attributes=annotation.instruction_attributes,
        nouns=(),
    )


def _options(record: Record) -> dict[str, tuple[str, ...]]:
    """Option names and values in lower case; in values ``/`` becomes ``|``, which an action may hold."""
    given = record.field(record.value, "customization_options") or {}
    if not isinstance(given, dict):
        raise record.error("customization_options must be an object")
    options: dict[str, tuple[str, ...]] = {}
    for name, values in given.items():
        if values is not None:
            if not isinstance(values, list):
                raise record.error(f"the values of option {name!r} must be a list")
            texts = (record.string(value, "value").strip().replace("/", " | ").lower() for value in values)
            options[name.lower()] = tuple(texts)
    return options


def _price(record: Record, asin: str) -> tuple[float, str]:
    """What the product costs, dollars, and how pages show it. Of a range, a fixed price within it is drawn."""
    given = record.value.get("pricing") or DEFAULT_PRICE
    if not isinstance(given, str):
        raise record.error("pricing must be a text")
    try:
        bounds = [float(Decimal(re.sub(r"[^\d.]", "", price))) for price in given.split("$")[1:]][:2]
    except InvalidOperation:
        raise record.error(f"pricing {given!r} holds something that is no price") from None
    if not bounds:
        raise record.error(f"pricing {given!r} holds no price in dollars")
    if len(bounds) == 1:
        return bounds[0], f"${bounds[0]}"
    share = int(hashlib.sha256(asin.encode()).hexdigest()[:13], 16) / 16**13
    low, high = bounds
    return round(low + (high - low) * share, 2), f"${low} to ${high}"


# ---------------------------------------------------------------------------------------------------- places


def _place(files: Files) -> Path:
    """The directory of the store: beside the files, or in the user's cache where one cannot write there."""
    known = [path.stat() for path in (files.products, files.attributes, files.human) if path]
    key = digest([FORMAT, str(files.products.resolve()), [[stat.st_size, stat.st_mtime_ns] for stat in known]])
    name = f"webshop-{files.products.stem}-{key[:12]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [files.products.parent / ".seed-harness" / name, cache / "seed-harness" / name]
    for place in places:
        if (place / "manifest.json").exists():
            return place
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / "lock").touch()
        except OSError:
            continue
        return place
    raise HarnessError(
        f"the store of the products can be written neither to {places[0]} nor to {places[1]};"
        " make one of them writable (XDG_CACHE_HOME moves the second)"
    )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Waits until no other process builds this store."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
