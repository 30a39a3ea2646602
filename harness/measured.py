"""What finished cells and ``scripts/gpu_check.sh`` measured, for estimates of cells that have not run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.config import CellConfig
from harness.contracts import HarnessError
from harness.estimate import ASSUMED, ASSUMED_VLLM, Lengths, Speed, assumed_lengths, episode_tokens
from harness.policy.sizes import Size
from harness.records import finished_cell
from harness.store import CellDir

GPU_CHECK = Path("results/gpu-check.json")
"""What ``scripts/gpu_check.sh`` measured on this machine."""

Finished = tuple[CellDir, CellConfig]


def finished_cells(directory: Path) -> list[Finished]:
    """The finished cells of a run that this version of the harness can read."""
    found = []
    for path in sorted(directory.glob("cells/*/manifest.json")):
        with suppress(HarnessError):  # of an older version: nothing is measured in it
            found.append(finished_cell(path.parent))
    return found


def kind_of(cell: CellConfig) -> tuple[str, str, str]:
    """What cells have in common whose lengths and speed are alike."""
    return cell.env.id, cell.policy, cell.precision


def measured_lengths(cell: CellConfig, alike: Sequence[Finished]) -> Lengths:
    """Lengths as in finished training cells of the same kind; what they do not tell is assumed."""
    lengths = assumed_lengths(cell)
    records = [record for place, _ in alike for record in place.records("metrics.jsonl")]
    if not records:
        return lengths
    asked = written = 0.0
    for place, other in alike:
        ledger = place.records("metrics.jsonl")[-1]["ledger"]
        if ledger["analyzer_tokens"] and other.train:
            asked += other.train.updates * other.train.tasks * other.train.group
            written += ledger["analyzer_tokens"]
    lengths = replace(
        lengths,
        steps=fmean(record["episode_steps"] for record in records),
        prompt=fmean(record.get("prompt_tokens", lengths.prompt) for record in records),
        answer=fmean(record["response_tokens"] for record in records),
        analysis_answer=written / asked if asked else lengths.analysis_answer,
        kept=1 - fmean(record["degenerate_groups"] for record in records),
        basis=f"as in {len(alike)} finished cell{'s' if len(alike) > 1 else ''}",
    )
    return replace(lengths, analysis_prompt=episode_tokens(cell, lengths) if cell.analysis else 0.0)


def measured_rate(alike: Sequence[Finished]) -> float | None:
    """FLOP/s that finished training cells reached on this machine, by their ledgers; None where there are none."""
    ledgers = [place.read_json("manifest.json")["ledger"] for place, _ in alike]
    spent = sum(ledger["wall_seconds"] for ledger in ledgers)
    return sum(ledger["flops"] for ledger in ledgers) / spent if spent else None


def gpu_check(path: Path = GPU_CHECK) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HarnessError(f"{path} is damaged: {error}; measure again with scripts/gpu_check.sh") from error
    return content


def speed_of(cell: CellConfig, size: Size, check: Mapping[str, Any] | None) -> Speed:
    """How fast a GPU runs a cell: as measured on the model nearest in size, else assumed."""
    speed = ASSUMED
    if check is not None:
        try:
            near = min(check["models"], key=lambda model: abs(math.log(model["parameters"] / size.parameters)))
            speed = Speed(
                name=str(check["device"]),
                peak=float(check["peak_flops"]),
                memory=float(check["memory_bytes"]),
                **{kind: float(near["share_of_peak"][kind]) for kind in ("sampling", "scoring", "training")},
                basis=f"measured by scripts/gpu_check.sh on {near['name']}",
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HarnessError(f"{GPU_CHECK} does not hold a GPU check: {error}; measure again") from error
    if cell.engine.kind == "vllm":
        return Speed(**{**vars(speed), "sampling": ASSUMED_VLLM, "basis": f"{speed.basis}; sampling by vLLM assumed"})
    return speed
