"""Recipes: find one by name or path, apply ``key=value`` overrides, expand it into cells. No model is loaded here.

The settings of a cell are the recipe's shared ones, overlaid by its environment's, overlaid by what that environment
says about its method. What cannot influence a cell (stage 1 of a method without one, a teacher nobody asks) is left
out of its configuration, so that it does not enter the cell's hash either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from harness.config import (
    AnalysisConfig,
    CellConfig,
    EnvConfig,
    EnvPlan,
    EvalConfig,
    Recipe,
    Stage1Config,
    TrainConfig,
)
from harness.contracts import HarnessError, unknown
from harness.methods import Method, get_method
from harness.registry import make_env

SECTIONS = ("train", "stage1", "analysis", "eval")
"""Settings that a recipe shares between its cells and that environments and methods may override."""

AXES = ("advantage", "teacher", "signal")
"""Parts of a method that a recipe may override."""

Model = TypeVar("Model", bound=BaseModel)

# ------------------------------------------------------------------------------------------------- loading


def packaged() -> dict[str, Path]:
    """The recipes that come with the harness, by name."""
    folder = Path(str(files("harness"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, packaged or from a ``.yaml`` file, and apply ``key=value`` overrides.

    Raises HarnessError, one line with file, setting and nearest valid value, for anything that does not fit.
    """
    known = packaged()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise HarnessError(f"no such recipe file: {name}") if path.suffix else unknown("recipe", name, known)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise HarnessError(f"{path} does not hold a recipe: expected settings such as 'methods:' and 'envs:'")
    validate(Recipe, data, str(path))
    for override in overrides:
        data = apply_override(data, override)
        validate(Recipe, data, f"override {override!r}")
    return validate(Recipe, data, str(path))


def apply_override(data: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A recipe's data with one ``key=value`` applied; values are YAML.

    ``train.updates=3`` holds for every cell: environments and methods lose their own value of that setting.
    ``envs.Sokoban-v1.train.updates=3`` holds for one environment; ``envs=[Sokoban-v1]`` selects environments.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise HarnessError(f"override {override!r} is not of the form key=value, e.g. train.updates=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HarnessError(f"override {override!r}: {text!r} is not a YAML value") from error
    path = key.split(".")
    result: dict[str, Any] = deep_copy(data)
    if path == ["envs"] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        result["envs"] = [_plan(result["envs"], env_id) for env_id in value]
        return result
    if path[0] in SECTIONS:
        for plan in result["envs"]:
            for overlay in (plan, *plan.get("methods", {}).values()):
                _discard(overlay, path)
    node: Any = result
    for part in path[:-1]:
        node = _plan(node, part) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise HarnessError(f"override {override!r}: {part!r} has no settings of its own")
    if not isinstance(node, dict):
        raise HarnessError(
            f"override {override!r}: name a setting of one of the {path[-2]}, e.g. {key}.train.updates=3"
        )
    node[path[-1]] = value
    return result


def _plan(plans: list[dict[str, Any]], env_id: str) -> dict[str, Any]:
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
    """Copy nested dicts and lists."""
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


def validate(model: type[Model], data: Any, where: str) -> Model:
    """Build a pydantic model; its first complaint becomes one line that names the place and the nearest valid name."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            at = ": ".join((where, ".".join(place[:-1]))) if place[:-1] else where
            owner = _model_at(model, first["loc"][:-1])
            raise HarnessError(f"{at}: {unknown('setting', place[-1], owner.model_fields)}") from error
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        message = first["msg"].removeprefix("Value error, ")
        at = ": ".join((where, ".".join(place))) if place else where
        raise HarnessError(f"{at}: {message[0].lower()}{message[1:]}{value if len(value) < 60 else ''}") from error


def _model_at(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """The model that a location of a validation error points into."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models(model.model_fields[part].annotation), model)
    return model


def _models(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


# ----------------------------------------------------------------------------------------------- expansion


def expand(recipe: Recipe) -> list[CellConfig]:
    """All cells of a recipe: baselines and the base policy (evaluation only), then every method, for every seed.

    Environments are built and panels, methods, policies and options checked, so that a bad recipe fails here.
    """
    fingerprint = cache(_fingerprint)
    cells: list[CellConfig] = []
    for plan in recipe.envs:
        where = f"recipe {recipe.name}: envs.{plan.env.id}"
        shared = {section: _section(recipe, plan, section, where) for section in SECTIONS}
        settings = {
            name: _method_settings(plan, name, where) for name in dict.fromkeys([*recipe.methods, *plan.methods])
        }
        measured = validate(EvalConfig, shared["eval"], f"{where}.eval")
        env = resolve_env(plan.env, measured.panel)
        for policy in dict.fromkeys([*recipe.baselines, recipe.policy]):
            cells += [evaluation(env, policy, fingerprint(policy), seed, measured) for seed in recipe.seeds]
        for name in recipe.methods:
            method, overlay = settings[name]
            at = f"{where}.methods.{name}"
            sections = deep_merge(shared, {key: overlay[key] for key in overlay if key in SECTIONS})
            external = method.teacher is not None and method.teacher.weights == "external"
            _require_model(recipe.policy, "trained")
            if external:
                _require_model(recipe.teacher, "a teacher")
            cell = CellConfig(
                env=resolve_env(plan.env, validate(EvalConfig, sections["eval"], f"{at}.eval").panel),
                policy=recipe.policy,
                policy_fingerprint=fingerprint(recipe.policy),
                method=method,
                teacher=recipe.teacher if external else "",
                teacher_fingerprint=fingerprint(recipe.teacher) if external else "",
                train=validate(TrainConfig, sections["train"], f"{at}.train"),
                stage1=validate(Stage1Config, sections["stage1"], f"{at}.stage1") if _has_stage1(method) else None,
                analysis=validate(AnalysisConfig, sections["analysis"], f"{at}.analysis")
                if _analyses(method)
                else None,
                eval=validate(EvalConfig, sections["eval"], f"{at}.eval"),
            )
            cells += [cell.model_copy(update={"seed": seed}) for seed in recipe.seeds]
    unique = {cell.hash: cell for cell in cells}
    if not unique:
        raise HarnessError(f"recipe {recipe.name} has no cells: it needs environments and seeds")
    return list(unique.values())


def evaluation(env: EnvConfig, policy: str, fingerprint: str, seed: int, settings: EvalConfig) -> CellConfig:
    """A cell that plays a panel without training. ``eval.every`` means nothing there and keeps its default."""
    once = settings.model_copy(update={"every": EvalConfig.model_fields["every"].default})
    return CellConfig(env=env, policy=policy, policy_fingerprint=fingerprint, seed=seed, eval=once)


def resolve_env(config: EnvConfig, panel: str) -> EnvConfig:
    """Check an environment, its options, data and panel; fill in the protocol values its card states."""
    with closing(make_env(config.id, config.options)) as env:
        if panel not in env.card.panels:
            raise unknown(f"panel of {config.id}", panel, env.card.panels)
        env.panel(panel, 1)  # its data are there
        history = env.card.history if config.history is None else config.history
        max_steps = env.card.max_steps if config.max_steps is None else config.max_steps
    return config.model_copy(update={"history": history, "max_steps": max_steps})


def _require_model(spec: str, purpose: str) -> None:
    from harness.policy.load import trainable

    if not trainable(spec):
        raise HarnessError(f"policy {spec!r} cannot be {purpose}: name tiny, a model directory or a hub id")


def _fingerprint(policy: str) -> str:
    from harness.policy.load import check_policy_spec

    return check_policy_spec(policy)


def _section(recipe: Recipe, plan: EnvPlan, section: str, where: str) -> dict[str, Any]:
    shared: BaseModel = getattr(recipe, section)
    merged = deep_merge(shared.model_dump(), getattr(plan, section))
    validate(type(shared), merged, f"{where}.{section}")
    return merged


def _has_stage1(method: Method) -> bool:
    return method.start == "hindsight_sft"


def _analyses(method: Method) -> bool:
    """Stage 1 trains on analysis prompts too, whether or not the method goes on to write skills."""
    return method.writes_skills or _has_stage1(method)


def _method_settings(plan: EnvPlan, name: str, where: str) -> tuple[Method, Mapping[str, Any]]:
    """A registered method with the recipe's overrides, and its overrides of the shared sections."""
    method = get_method(name)
    overlay = plan.methods.get(name, {})
    allowed = {"train", "eval", *AXES} | ({"stage1"} if _has_stage1(method) else set())
    allowed |= {"analysis"} if _analyses(method) else set()
    for key, value in overlay.items():
        if key not in allowed:
            raise HarnessError(f"{where}.methods.{name}: {unknown('setting', key, allowed)}")
        if key in SECTIONS and not isinstance(value, dict):
            raise HarnessError(f"{where}.methods.{name}.{key}: expected settings, got {value!r}")
    axes = {key: overlay[key] for key in AXES if key in overlay}
    return validate(Method, deep_merge(method.model_dump(), axes), f"{where}.methods.{name}"), overlay
