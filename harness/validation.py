"""Data to pydantic models; whatever does not fit becomes one line for the user."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from harness.contracts import HarnessError, unknown
from harness.inert import one_line

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], data: Any, where: str) -> Model:
    """Build a pydantic model; its first complaint becomes one line that names the place and the nearest valid name.

    What a file of ours cannot hold though YAML can spell it, such as half of a surrogate pair, is refused too.
    """
    try:
        made = model.model_validate(data)
        json.dumps(made.model_dump(mode="json"), ensure_ascii=False).encode()
        return made
    except ValidationError as error:
        first = error.errors()[0]
        place, owner = _locate(model, first["loc"])
        if first["type"] == "extra_forbidden":
            at = ": ".join((where, ".".join(place[:-1]))) if place[:-1] else where
            raise HarnessError(f"{at}: {unknown('setting', place[-1], owner.model_fields)}") from error
        value = "" if first["type"] == "missing" else _shown(first["input"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            message = f"expected settings: {', '.join(list(owner.model_fields)[:3])}, ..."
        at = ": ".join((where, ".".join(place))) if place else where
        raise HarnessError(f"{at}: {message[0].lower()}{message[1:]}{value}") from error
    except ValueError as error:  # half a surrogate pair, a number of thousands of digits, a list within itself
        raise HarnessError(f"{where}: a value that no file can hold: {one_line(str(error))}") from error


def _shown(value: Any) -> str:
    """A value for an error message; nothing where it is long."""
    try:
        text = f" (got {value!r})"
    except ValueError:  # Python does not print numbers of thousands of digits
        return ""
    return text if len(text) < 60 else ""


def require_extra(setting: str, package: str, extra: str) -> None:
    """Raise HarnessError, with the command that helps, where a setting needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise HarnessError(f"{setting} needs {package}: pip install 'seed-harness[{extra}]'")


def read_yaml(text: str, complaint: str) -> Any:
    """A YAML value, by the safe loader. Raises HarnessError, ``complaint`` and the reason, where the text is none."""
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise HarnessError(f"{complaint}: nested too deep") from error
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # the last two: odd dates
        raise HarnessError(f"{complaint}: {one_line(str(error))}") from error


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], type[BaseModel]]:
    """The settings that lead to a validation error, and the model that holds the last of them.

    Where a setting may be one of several models, pydantic puts the chosen one's ``kind`` into the location; it is not
    a setting.
    """
    place: list[str] = []
    members = [model]
    for part in location:
        chosen = [m for m in members if "kind" in m.model_fields and m.model_fields["kind"].default == part]
        if chosen and len(members) > 1:
            members = chosen
            continue
        place.append(str(part))
        field = members[0].model_fields.get(part) if isinstance(part, str) else None
        members = list(_models(field.annotation) if field else ()) or members
    return place, members[0]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
