"""The files of a model directory: which there are, and whether they are whole, told without loading any of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.contracts import HarnessError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROCESSOR = "processor_config.json"
TOKENIZER = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
"""Where vision-language models used to keep it."""
MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")


def check_model_files(directory: Path) -> None:
    """Raise HarnessError, naming the file, where a model directory is incomplete or damaged."""
    config = read_json(directory, "config.json")
    if "model" not in read_json(directory, "tokenizer.json"):
        raise HarnessError(f"{directory / 'tokenizer.json'} is damaged: it holds no tokenizer")
    _check_template(directory)
    if "vision_config" in config:
        _check_image_processor(directory)
    for path in weight_files(directory):
        tensors_in(path)


def _check_template(directory: Path) -> None:
    """A chat template lies in a file of its own or in the tokenizer's configuration."""
    if (directory / TEMPLATE).is_file() or (directory / OLD_TEMPLATE).is_file():
        return
    settings = directory / TOKENIZER
    if not (settings.is_file() and read_json(directory, TOKENIZER).get("chat_template")):
        raise HarnessError(
            f"{directory} has no chat template ({TEMPLATE}, or in {TOKENIZER}); choose an instruct model"
        )


def _check_image_processor(directory: Path) -> None:
    """An image processor is described in a file of its own, or within that of the processor of text and images."""
    if (directory / PROCESSOR).is_file() and "image_processor" in read_json(directory, PROCESSOR):
        return
    read_json(directory, "preprocessor_config.json")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold a model's weights. Raises HarnessError where one is missing or elsewhere."""
    names: list[Any] = [WEIGHTS]
    if (directory / INDEX).is_file():
        names = sorted(set(read_json(directory, INDEX).get("weight_map", {}).values()), key=str)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise HarnessError(f"{directory / INDEX} is damaged: {name!r} is no weight file beside it")
        if not (directory / name).is_file():
            if pickled := next(directory.glob("*.bin"), None):
                raise HarnessError(f"{pickled} may hold code and is not read: save the weights as {WEIGHTS}")
            raise HarnessError(f"{directory} is not a model directory: {name} is missing")
    return [directory / name for name in names]


def tensors_in(path: Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file says of each tensor: ``dtype``, ``shape``, ``data_offsets``.

    Raises HarnessError unless its header can be read and the file is exactly as long as it says.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size:
            raise HarnessError(f"{path} is damaged: its header is cut off")
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise HarnessError(f"{path} is damaged: its header cannot be read") from error
    if size != 8 + length + end:
        raise HarnessError(f"{path} is damaged: {size} bytes instead of {8 + length + end}")
    return tensors


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model directory. Raises HarnessError, naming the file, where there is none."""
    path = directory / name
    if not path.is_file():
        raise HarnessError(f"{directory} is not a model directory: {name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HarnessError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise HarnessError(f"{path} is damaged: it must hold a JSON object")
    return content
