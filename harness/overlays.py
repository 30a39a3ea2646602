"""A recipe's data before it is checked: laid over another recipe's, changed by ``key=value`` from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.contracts import HarnessError, unknown
from harness.validation import read_yaml

SECTIONS = ("train", "stage1", "imitation", "analysis", "eval")
"""Settings that a recipe shares between its cells and that environments, variants and methods may override."""


def extend(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The data of a recipe that says only what differs from ``base``.

    Settings are merged; methods, seeds and whatever else is not a mapping replace the base's. In ``envs`` an id selects
    an environment of the base, a plan with the id of one says what differs in it, any other plan stands for itself.
    Raises HarnessError for the id of no environment of the base; ``where`` names the recipe in it.
    """
    merged = deep_merge(base, own)
    plans, envs = base.get("envs"), own.get("envs")
    if isinstance(plans, list) and isinstance(envs, list):
        merged["envs"] = [_extended_plan(plans, entry, where) for entry in envs]
    return merged


def _extended_plan(plans: list[dict[str, Any]], entry: Any, where: str) -> Any:
    if isinstance(entry, str):
        try:
            return plan_of(plans, entry)
        except HarnessError as error:
            raise HarnessError(f"{where}: envs: {error}") from error
    env = entry.get("env") if isinstance(entry, Mapping) else None
    env_id = env.get("id") if isinstance(env, Mapping) else None
    return next((deep_merge(plan, entry) for plan in plans if plan["env"]["id"] == env_id), entry)


def apply_override(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A recipe's data with one ``key=value`` applied; values are YAML.

    ``train.updates=3`` holds for every cell: environments and methods lose their own value of that setting. Variants
    keep theirs, which is what makes them variants; ``variants.grpo-20.train.updates=3`` changes one.
    ``envs.Sokoban-v1.train.updates=3`` holds for one environment; ``envs=[Sokoban-v1]`` selects environments.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise HarnessError(f"override {override!r} is not of the form key=value, e.g. train.updates=3")
    value = read_yaml(text, f"override {override!r}: {text!r} is not a YAML value")
    path = key.split(".")
    result: dict[str, Any] = deep_copy(data)
    if path == ["envs"] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        result["envs"] = [plan_of(result["envs"], env_id) for env_id in value]
        return result
    if path[0] in SECTIONS:
        for plan in result["envs"]:
            for overlay in (plan, *plan.get("methods", {}).values()):
                _discard(overlay, path)
    node: Any = result
    for part in path[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else plan_of(node, part)
        if not isinstance(node, dict) and node is not result["envs"]:
            raise HarnessError(f"override {override!r}: {part!r} has no settings of its own")
    if not isinstance(node, dict):
        raise HarnessError(
            f"override {override!r}: name a setting of one of the {path[-2]}, e.g. {key}.train.updates=3"
        )
    node[path[-1]] = value
    return result


def plan_of(plans: list[dict[str, Any]], env_id: str) -> dict[str, Any]:
    found = {plan["env"]["id"]: plan for plan in plans}
    if env_id not in found:
        raise unknown("environment of this recipe", env_id, found)
    return found[env_id]


def _discard(node: Any, path: Sequence[str]) -> None:
    for part in path[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)


def deep_copy(value: Any) -> Any:
    """Copy nested dicts and lists; what YAML aliases share comes apart, so that changing one changes no other."""
    if isinstance(value, Mapping):
        return {key: deep_copy(item) for key, item in value.items()}
    return [deep_copy(item) for item in value] if isinstance(value, list) else value


def deep_merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` overlaid by ``overlay``, dict by dict; any other value replaces."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(below, value) if nested else value  # type: ignore[arg-type]
    return merged
