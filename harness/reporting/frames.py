"""Finished cells as pandas frames: one row per cell, per evaluated episode, per training update, per skill.

Columns that every frame has: ``cell`` (the directory's name), ``env``, ``method`` (the row of the comparison table),
``seed`` and ``card`` (a digest of the protocol card; numbers under different cards are never averaged). What
identifies a cell beyond these is part of ``method``: two trainings that differ in a setting get different names. Rows
measured with skills in the prompt are named with a star, ``skill-grpo*``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness.cards import Ledger, ProtocolCard
from harness.config import CellConfig
from harness.contracts import UNCOUNTED, HarnessError, digest
from harness.policy.api import PREFIX as API
from harness.policy.api import parse_endpoint
from harness.store import CellDir, Record
from harness.validation import validate

SCRIPTED = ("random", "oracle")
"""Policies that read no prompt."""
UNREAD = ("history", "truncation", "temperature", "decoding", "prompt_hash")
"""What a protocol card says about prompts and answers; it does not apply to scripted policies."""
STAR = "*"
"""Ends the name of a row that was measured with skills in the prompt."""


@dataclass(frozen=True)
class Cell:
    """One finished cell: its directory, configuration, manifest, protocol and the name of its row in the tables."""

    store: CellDir
    config: CellConfig
    manifest: Record
    protocol: ProtocolCard
    method: str

    @property
    def id(self) -> str:
        return self.store.path.name

    @property
    def title(self) -> str:
        return f"{self.config.env.id} · {self.method} · seed {self.config.seed}"

    @property
    def trained(self) -> bool:
        """Whether the policy's weights were changed."""
        return self.config.method is not None and self.config.method.trains

    @cached_property
    def key(self) -> Record:
        """The columns every frame has."""
        return {
            "cell": self.id,
            "env": self.config.env.id,
            "method": self.method,
            "seed": self.config.seed,
            "card": digest(asdict(self.protocol))[:12],
        }


def read_cells(directory: Path) -> tuple[list[Cell], list[str]]:
    """Finished cells, ordered by environment, method and seed, and the titles of the unfinished ones.

    Raises HarnessError where the directory holds no finished cell or a file is missing or broken.
    """
    if not directory.is_dir():
        raise HarnessError(f"no results at {directory}: no such directory")
    if (directory / "config.json").is_file():
        raise HarnessError(f"{directory} is a single cell: name the run's directory, which holds its cells/")
    stores = [CellDir(path) for path in sorted((directory / "cells").glob("*")) if (path / "config.json").is_file()]
    finished = [store for store in stores if store.finished]
    unfinished = sorted(_config(store).title for store in stores if not store.finished)
    if not finished:
        found = f"{len(stores)} unfinished cells" if stores else "no cells"
        raise HarnessError(f"no finished cell in {directory} ({found}); start or resume one with `harness run`")
    return cells_at([store.path for store in finished]), unfinished


def cells_at(paths: Sequence[Path]) -> list[Cell]:
    """The finished cells in these directories, named beside each other; ordered as in :func:`read_cells`."""
    stores = [CellDir(path) for path in paths]
    configs = [_config(store) for store in stores]
    manifests = [_manifest(store) for store in stores]
    protocols = _protocols([(c, ProtocolCard(**m["protocol"])) for c, m in zip(configs, manifests, strict=True)])
    names = _names(list(zip(configs, protocols, strict=True)))
    found = [Cell(*parts) for parts in zip(stores, configs, manifests, protocols, names, strict=True)]
    return sorted(found, key=lambda c: (c.config.env.id, c.method, c.config.seed, c.id))


def cells(directory: Path) -> pd.DataFrame:
    """One row per finished cell: key, whether it was trained, policy, panel, provenance and ``ledger/*`` totals."""
    return pd.DataFrame([_cell_row(cell) for cell in read_cells(directory)[0]])


def evaluations(directory: Path) -> pd.DataFrame:
    """One row per evaluated episode.

    Columns beyond the key: ``skills`` (what the prompt held: ``plain`` or ``library``), ``update``, ``ledger/*``
    (training budget spent by then), ``task``, ``kind``, ``attempt``, ``success``, ``score``, ``reward``, ``steps``,
    ``stop_reason`` and ``counted`` (False for crashes of environment or endpoint, which enter no score).
    """
    return evaluations_of(read_cells(directory)[0])


def updates(directory: Path) -> pd.DataFrame:
    """One row per training update: key and every metric, nested ones joined by ``/``."""
    return updates_of(read_cells(directory)[0])


def skills(directory: Path) -> pd.DataFrame:
    """One row per skill: key, ``update``, ``task``, ``attempt``, ``success``, ``text``, ``summary``, ``author``, ..."""
    return skills_of(read_cells(directory)[0])


def evaluations_of(found: Sequence[Cell]) -> pd.DataFrame:
    """:func:`evaluations` of cells already read."""
    rows = []
    for cell in found:
        for number, record in enumerate(_records(cell.store, "evals.jsonl"), start=1):
            try:
                spent = {f"ledger/{name}": value for name, value in record["ledger"].items()}
                skills = record["skills"]
                row = cell.method + STAR * (skills == "library")
                shared = {**cell.key, "method": row, "skills": skills, "update": record["update"], **spent}
                rows += [
                    {**shared, **result, "counted": result["stop_reason"] not in UNCOUNTED}
                    for result in record["results"]
                ]
            except KeyError as error:
                raise HarnessError(f"{cell.store.path / 'evals.jsonl'}, line {number}: no {error} in it") from error
    frame = pd.DataFrame(rows)
    if frame.empty:
        raise HarnessError(f"the finished cells hold no evaluation: {', '.join(cell.id for cell in found)}")
    return frame


def updates_of(found: Sequence[Cell]) -> pd.DataFrame:
    """:func:`updates` of cells already read."""
    return pd.DataFrame(
        [{**cell.key, **flat(record)} for cell in found for record in _records(cell.store, "metrics.jsonl")]
    )


def skills_of(found: Sequence[Cell]) -> pd.DataFrame:
    """:func:`skills` of cells already read."""
    return pd.DataFrame([{**cell.key, **record} for cell in found for record in _records(cell.store, "skills.jsonl")])


def flat(record: Record, prefix: str = "") -> Record:
    """A nested record with joined keys: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    out: Record = {}
    for name, value in record.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}/")
        else:
            out[prefix + name] = value
    return out


# ------------------------------------------------------------------------------------------------- reading


def _config(store: CellDir) -> CellConfig:
    return validate(CellConfig, store.read_json("config.json"), str(store.path / "config.json"))


def _manifest(store: CellDir) -> Record:
    path = store.path / "manifest.json"
    manifest = store.read_json("manifest.json")
    for name, kind in (("protocol", ProtocolCard), ("ledger", Ledger)):
        given = manifest.get(name) if isinstance(manifest, dict) else None
        if not isinstance(given, dict):
            raise HarnessError(f"{path}: no {name!r} in it")
        wrong = {f.name for f in fields(kind)} ^ given.keys()
        if wrong:
            raise HarnessError(f"{path}: {name} has missing or unknown fields: {', '.join(sorted(wrong))}")
    store.require_whole(manifest)
    return dict(manifest)


def _records(store: CellDir, name: str) -> list[Record]:
    """Records of a finished cell's JSONL file, where nothing may be torn."""
    path = store.path / name
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        last = path.read_bytes().count(b"\n") + 1
        raise HarnessError(f"{path}, line {last}: the line is cut off")
    return store.records(name)


def _cell_row(cell: Cell) -> Record:
    manifest = cell.manifest
    return {
        **cell.key,
        "trained": cell.trained,
        "policy": cell.config.policy,
        "panel": cell.protocol.panel,
        "panel_hash": cell.protocol.panel_hash,
        "git": manifest.get("git"),
        "harness": manifest.get("harness"),
        "started": manifest.get("started"),
        "finished": manifest.get("finished"),
        **{f"ledger/{name}": value for name, value in manifest["ledger"].items()},
    }


# ----------------------------------------------------------------------------------------- cards and names


def _protocols(found: Sequence[tuple[CellConfig, ProtocolCard]]) -> list[ProtocolCard]:
    """Each cell's card; a scripted policy takes over what does not apply to it from the cells it stands beside.

    Of several cards that agree with a scripted policy's in all that applies, it joins the most frequent one.
    """
    read = Counter(card for config, card in found if config.method or config.policy not in SCRIPTED)

    def joined(card: ProtocolCard) -> ProtocolCard:
        return next((peer for peer, _ in read.most_common() if set(card.differences(peer)) <= set(UNREAD)), card)

    return [joined(card) if not config.method and config.policy in SCRIPTED else card for config, card in found]


def _names(found: Sequence[tuple[CellConfig, ProtocolCard]]) -> list[str]:
    """The table row of each (configuration, card): method or policy, made unique by the settings that differ.

    Cells that differ in their seed alone share a row. The untrained start of the trained cells is called ``base``.
    """
    backbones = {config.policy for config, _ in found if config.method}
    plain = [_name(config, backbones) for config, _ in found]
    settings = [_settings(config) for config, _ in found]
    groups: dict[tuple[str, ProtocolCard], list[Record]] = defaultdict(list)
    for (_, card), name, setting in zip(found, plain, settings, strict=True):
        groups[name, card].append(setting)
    names = []
    for (_, card), name, setting in zip(found, plain, settings, strict=True):
        peers = groups[name, card]
        differing = [key for key in sorted(setting) if any(peer.get(key) != setting[key] for peer in peers)]
        names.append(f"{name} ({', '.join(f'{key}={setting[key]}' for key in differing)})" if differing else name)
    return names


def policy_name(policy: str) -> str:
    """Last part of a policy's name: ``Qwen/Qwen2.5-3B-Instruct`` is Qwen2.5-3B-Instruct, local or served."""
    name = parse_endpoint(policy)[0] if policy.startswith(API) else policy
    return name.rstrip("/").rsplit("/", 1)[-1]


def _name(config: CellConfig, backbones: set[str]) -> str:
    endpoint = config.policy.startswith(API)
    policy = parse_endpoint(config.policy)[0] if endpoint else policy_name(config.policy)
    if config.method is None:
        return f"base ({policy})" if config.policy in backbones else policy
    return config.method.name if len(backbones) == 1 else f"{config.method.name} ({policy})"


def _settings(config: CellConfig) -> Record:
    """Everything that must agree between the seeds of one row. The policy is in the name, its weights are not."""
    given: dict[str, Any] = config.model_dump(mode="json", exclude={"seed", "policy"})
    return {key: json.dumps(value) for key, value in flat(given).items()}


def in_words(value: object) -> str:
    """A value of a manifest on one line: parts of a record by name, empty ones left out, entries of a list in a row."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(part)}" for name, part in value.items() if part not in ([], "", None))
    return "; ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def card_rows(card: ProtocolCard) -> list[tuple[str, str]]:
    """A protocol card as (field, value) pairs in declaration order."""
    return [(name.replace("_", " "), str(value)) for name, value in asdict(card).items()]
