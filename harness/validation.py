"""Data to pydantic models; whatever does not fit becomes one line for the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from harness.contracts import HarnessError, unknown

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], data: Any, where: str) -> Model:
    """Build a pydantic model; its first complaint becomes one line that names the place and the nearest valid name."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place, owner = _locate(model, first["loc"])
        if first["type"] == "extra_forbidden":
            at = ": ".join((where, ".".join(place[:-1]))) if place[:-1] else where
            raise HarnessError(f"{at}: {unknown('setting', place[-1], owner.model_fields)}") from error
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        message = first["msg"].removeprefix("Value error, ")
        at = ": ".join((where, ".".join(place))) if place else where
        raise HarnessError(f"{at}: {message[0].lower()}{message[1:]}{value if len(value) < 60 else ''}") from error


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
