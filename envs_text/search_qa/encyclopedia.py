"""The generated encyclopedia: invented people, towns, companies, countries and rivers, one short passage each.

A passage is a name and its facts, each a fixed piece of text followed by another name::

    Arlo Vensby was born in Morhaven and works for Borolar Mills, married to Ornia Pellkin.

Every word of a name is invented and belongs to one kind of thing. The encyclopedia is the same in every process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

VERSION = "encyclopedia-1"
PEOPLE = 1160


def _words(stems: str, endings: str) -> tuple[str, ...]:
    return tuple(stem + ending for stem, ending in product(stems.split(), endings.split()))


FIRST_NAMES = _words("Ar Bel Cor Dal El Fen Gar Hal Ish Jor Kal Lum Mir Nor Or Per", "lo nia vek ric sa")
LAST_NAMES = _words(
    "Ven Tor Mar Hol Quil Strom Bran Cald Dray Esk Fal Grim Hask Irv Jesk Kerr Lunt Mosk Nev Oth Pell Rusk Sorn Tull "
    "Wex",
    "ner sby low kin ard oway",
)
TOWNS = _words(
    "Mor Kel Tan Bry Asp Cro Dun Eld Fern Gos Hex Ives Lin Mel Nes Pol Rams Sten Thorn Wyn",
    "haven ford wick mouth burg dale",
)
COMPANIES = _words("Alt Bor Cryn Dex Ferr Glin Hyd Jun Kall Lumb Myr Nex Opt Pyr Syl Trav", "adyne orix umex ithe olar")
TRADES = ("Mills", "Works", "Bank", "Press", "Foods", "Tools", "Glass", "Lines")
COUNTRIES = _words("Kes Vol Zam Tir Bel Dor Gal Lor Mal Nar Ost Quen", "tria dovia mania landia goria")
RIVERS = _words("Ab Bren Clu Du Eth Flo Gle Hin Isk Jar Lae Mu Ny Ril Sha Ulv", "nen ruva shil ska mora")

WORDS = (*FIRST_NAMES, *LAST_NAMES, *TOWNS, *COMPANIES, *TRADES, *COUNTRIES, *RIVERS)
"""All words that names are made of."""

NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)?"
"""Pattern of a generated name."""


@dataclass(frozen=True)
class Relation:
    """What a passage of one kind says about its subject.

    Attributes:
        of: Kind of the subject.
        told: What stands between the subject (or the fact before) and the object, in two wordings.
        brief: The relation in two or three words, for thoughts.
    """

    of: str
    told: tuple[str, str]
    brief: str


RELATIONS: Mapping[str, Relation] = {
    "birthplace": Relation("person", (" was born in", " is a native of"), "born in"),
    "employer": Relation("person", (" and works for", ", employed by"), "works for"),
    "spouse": Relation("person", (", married to", ". The spouse is"), "married to"),
    "country": Relation("town", (" is a town in", " lies in"), "lies in"),
    "river": Relation("town", (" on the river", " beside the river"), "on the river"),
    "mayor": Relation("town", (". Its mayor is", " and is led by"), "led by"),
    "founder": Relation("company", (" was founded by", " is a company of"), "founded by"),
    "seat": Relation("company", (" and has its seat in", ", based in"), "based in"),
    "capital": Relation("country", (" is a country governed from", " has its capital at"), "governed from"),
    "source": Relation("river", (" is a river that rises in", " flows out of"), "rises in"),
}
"""Relations by name; those of one kind in the order in which a passage tells them."""

_TOLD = {told: name for name, relation in RELATIONS.items() for told in relation.told}
_FACT = re.compile(f"({'|'.join(re.escape(told) for told in _TOLD)}) ({NAME})")


@dataclass(frozen=True)
class Entry:
    """One thing of the encyclopedia: its name, kind, facts (relation -> name of another thing) and passage."""

    name: str
    kind: str
    facts: Mapping[str, str]
    text: str


@lru_cache(maxsize=1)
def entries() -> Mapping[str, Entry]:
    """The whole encyclopedia by name, in a fixed order."""
    rng = random.Random(VERSION)
    people = [f"{first} {last}" for first, last in rng.sample(list(product(FIRST_NAMES, LAST_NAMES)), PEOPLE)]
    companies = [f"{name} {rng.choice(TRADES)}" for name in COMPANIES]
    capitals = rng.sample(TOWNS, len(COUNTRIES))
    country = {**{town: rng.choice(COUNTRIES) for town in TOWNS}, **dict(zip(capitals, COUNTRIES, strict=True))}
    couples = rng.sample(people, PEOPLE // 2)
    spouse = dict(zip(couples[::2] + couples[1::2], couples[1::2] + couples[::2], strict=True))

    def some(names: Sequence[str], count: int) -> list[str]:
        """Names in random order, each as often as any other."""
        rounds = [rng.sample(names, len(names)) for _ in range(-(-count // len(names)))]
        return [name for names in rounds for name in names][:count]

    found = {
        "person": _facts(people, birthplace=some(TOWNS, PEOPLE), employer=some(companies, PEOPLE)),
        "town": _facts(
            TOWNS,
            country=[country[town] for town in TOWNS],
            river=some(RIVERS, len(TOWNS)),
            mayor=some(people, len(TOWNS)),
        ),
        "company": _facts(companies, founder=some(people, len(companies)), seat=some(TOWNS, len(companies))),
        "country": _facts(COUNTRIES, capital=capitals),
        "river": _facts(RIVERS, source=some(COUNTRIES, len(RIVERS))),
    }
    for name, other in spouse.items():
        found["person"][name]["spouse"] = other
    return {
        name: Entry(name, kind, facts, _passage(name, facts, rng.randrange(2)))
        for kind, things in found.items()
        for name, facts in things.items()
    }


def _facts(names: Sequence[str], **objects: Sequence[str]) -> dict[str, dict[str, str]]:
    return {
        name: {relation: values[number] for relation, values in objects.items()} for number, name in enumerate(names)
    }


def _passage(name: str, facts: Mapping[str, str], wording: int) -> str:
    return name + "".join(f"{RELATIONS[relation].told[wording]} {other}" for relation, other in facts.items()) + "."


def read_facts(text: str) -> dict[str, str]:
    """What a passage says about its subject: relation -> name. Empty for texts that are not of this encyclopedia."""
    return {_TOLD[told]: name for told, name in _FACT.findall(text)}
