"""The long records of a cell: the steps of its episodes with their pictures, and the credit of each token.

An episode's steps are one JSON string, its ``trace``, so that the parquet file stays flat: a list of
``{observation, response, action, valid, reward}``. Detailed episodes also say what the policy was shown: ``prompt``,
the text of the very prompt, and ``pictures``, names of files in the cell's ``pictures/`` in the order of the
placeholders.

``credit.parquet`` has one row per step of each detailed training episode; :func:`read_credit` lists its columns.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from harness.config import CellConfig
from harness.contracts import Episode, HarnessError, Image, Prompt, Step
from harness.store import CellDir, writing
from harness.validation import validate

if TYPE_CHECKING:
    import pandas as pd

PICTURES = "pictures"
"""Directory of a cell that holds the pictures of its detailed episodes."""

CREDIT_COLUMNS = (
    "update",
    "task",
    "attempt",
    "step",
    "ids",
    "tokens",
    "logp",
    "teacher",
    "gate",
    "advantage",
    "pull",
    "skill",
    "in_policy",
    "in_distill",
    "chosen",
)
EPISODE_COLUMNS = ("phase", "update", "task", "kind", "attempt", "success", "skills", "detail", "task_text", "trace")
"""Columns of the recorded episodes that readers rely on; there are more."""
TRACES_AT_ONCE = 2048
"""Read together where only some are wanted."""


def trace(episode: Episode, pictures: Path | None) -> str:
    """The steps as JSON; where ``pictures`` is a directory, with prompts and pictures, which are written there.

    Raises HarnessError where a picture cannot be written.
    """
    return json.dumps([_step(step, pictures) for step in episode.steps], ensure_ascii=False)


def read_trace(text: str) -> list[dict[str, Any]]:
    """The steps in a ``trace``."""
    steps: list[dict[str, Any]] = json.loads(text)
    return steps


def _step(step: Step, pictures: Path | None) -> dict[str, Any]:
    record = {
        "observation": step.observation["text"],
        "response": step.response.text,
        "action": step.action,
        "valid": step.valid,
        "reward": step.reward,
    }
    if pictures is None:
        return record
    names = [save_picture(image, pictures) for image in step.prompt.images]
    return {**record, "prompt": step.prompt.text, "pictures": names}


def finished_cell(path: Path) -> tuple[CellDir, CellConfig]:
    """A finished cell's directory and configuration. Raises HarnessError where there is none, or one not finished."""
    cell = CellDir(path)
    if not (path / "config.json").is_file():
        raise HarnessError(f"no cell at {path}: name a directory such as results/quick/cells/HASH")
    config = validate(CellConfig, cell.read_json("config.json"), str(path / "config.json"))
    if not cell.finished:
        raise HarnessError(f"the cell at {path} is not finished; resume it with `harness run`")
    return cell, config


# ------------------------------------------------------------------------------------------------ pictures


def save_picture(image: Image, directory: Path) -> str:
    """Write a picture unless it is there; returns its name: 16 hex digits of the SHA-256 of the file, ``.png``."""
    name, data = _png(image.shape, image.tobytes())
    path = directory / name
    if not path.exists():
        with writing(path):
            directory.mkdir(exist_ok=True)
            # Whole or absent after a kill. Forcing thousands of small files to the disk would cost more than playing.
            temporary = path.with_name(f"{name}.tmp")
            temporary.write_bytes(data)
            temporary.replace(path)
    return name


@lru_cache(maxsize=256)  # environments show the same picture again and again
def _png(shape: tuple[int, ...], pixels: bytes) -> tuple[str, bytes]:
    file = io.BytesIO()
    PIL.Image.fromarray(np.frombuffer(pixels, np.uint8).reshape(shape)).save(file, "PNG")
    data = file.getvalue()
    return f"{hashlib.sha256(data).hexdigest()[:16]}.png", data


def read_picture(path: Path) -> Image:
    """A picture, (H, W, 3) uint8. Raises HarnessError where it is missing or broken."""
    try:
        with PIL.Image.open(path) as file:
            return np.asarray(file.convert("RGB"))
    except OSError as error:
        raise HarnessError(f"cannot read the picture {path}: {error}") from error


def read_prompt(step: dict[str, Any], cell: CellDir) -> Prompt:
    """The prompt of a detailed step, pictures included. Raises HarnessError where a picture is missing or broken."""
    return Prompt(step["prompt"], tuple(read_picture(cell.path / PICTURES / name) for name in step["pictures"]))


# ------------------------------------------------------------------------------------------------- parquet


def read_credit(cell: CellDir) -> pd.DataFrame:
    """The credit of each token of a finished cell's detailed training episodes; empty where none was kept.

    One row per step. Columns: ``update``, ``task``, ``attempt``, ``step`` (0-based); per response token ``ids``,
    ``tokens`` (their texts), ``logp`` (l, at the update's start), ``teacher`` (l_s) and ``gate`` (g) or None, ``pull``
    (-dL/dl at the update's start in units in which GRPO gives the advantage, :mod:`harness.credit`); ``advantage`` of
    the row, NaN where it has no policy gradient; ``skill`` that the teacher read, else empty; ``in_policy``,
    ``in_distill``: whether the row has a place in that term; ``chosen``: whether it was trained on (False: it is in
    neither, or ``train.max_rows`` left it out). Raises HarnessError where the file is broken.
    """
    return _frame(cell, "credit", CREDIT_COLUMNS)


def read_episodes(cell: CellDir) -> pd.DataFrame:
    """The recorded episodes of a finished cell; empty where none were kept. Raises HarnessError for a broken file."""
    return _frame(cell, "episodes", EPISODE_COLUMNS)


def read_outcomes(cell: CellDir) -> pd.DataFrame:
    """As :func:`read_episodes` without ``trace``, which takes more room than all the rest: what each came to."""
    return _frame(cell, "episodes", [name for name in EPISODE_COLUMNS if name != "trace"], leave_out="trace")


def read_traces(cell: CellDir, rows: NDArray[np.int64]) -> list[str]:
    """The ``trace`` of some recorded episodes, by their places in ascending order; the others are passed by.

    Raises HarnessError for a broken file.
    """
    path = cell.path / "episodes.parquet"
    import pyarrow.parquet

    found: list[str] = []
    start = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(TRACES_AT_ONCE, columns=["trace"]):
            wanted = rows[(rows >= start) & (rows < start + len(batch))] - start
            found += batch.column(0).take(pyarrow.array(wanted)).to_pylist()
            start += len(batch)
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {path}: {error}") from error
    return found


def episodes_recorded(cell: CellDir) -> int:
    """How many episodes :func:`read_episodes` finds, from the file's end alone. Raises HarnessError as it does."""
    path = cell.path / "episodes.parquet"
    if not path.is_file():
        return 0
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {path}: {error}") from error


def _frame(cell: CellDir, name: str, columns: Sequence[str], leave_out: str = "") -> pd.DataFrame:
    """A parquet file as a frame that has these columns, with or without rows."""
    import pandas  # loaded by readers only: a running cell has no use for it

    table = read_table(cell, name, leave_out)
    if table is None:
        return pandas.DataFrame(columns=list(columns))
    if missing := [column for column in columns if column not in table.column_names]:
        raise HarnessError(f"{cell.path / name}.parquet has no column {missing[0]!r}")
    frame: pd.DataFrame = table.to_pandas()
    return frame


def read_table(cell: CellDir, name: str, leave_out: str = "") -> Any:
    """A parquet file of a finished cell as pyarrow table, without the column ``leave_out``; None where there is none.

    Raises HarnessError for a broken one.
    """
    path = cell.path / f"{name}.parquet"
    if not path.is_file():
        return None
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        return file.read([column for column in file.schema_arrow.names if column != leave_out])
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read {path}: {error}") from error
