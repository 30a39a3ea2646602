"""Recipes: find one by name or path, apply ``key=value`` overrides, expand it into cells. No model is loaded here.

A recipe may extend another and say only what differs.

The settings of a cell are the recipe's shared ones, overlaid by its environment's, overlaid by what that environment
says about its method. What cannot influence a cell (stage 1 of a method without one, a teacher nobody asks) is left
out of its configuration, so that it does not enter the cell's hash either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.annotators import SCRIPTED, check_annotator
from harness.config import (
    AnalysisConfig,
    CellConfig,
    EngineConfig,
    EnvConfig,
    EnvPlan,
    EvalConfig,
    ImitationConfig,
    Recipe,
    Stage1Config,
    TrainConfig,
)
from harness.contracts import AgentEnv, HarnessError, unknown
from harness.library import fingerprint_of, load_library
from harness.methods import Method, get_method
from harness.overlays import SECTIONS, apply_override, deep_merge, extend
from harness.registry import METHODS, env_class, find_file, make_env, packaged_files, registered
from harness.validation import read_yaml, require_extra, validate

AXES = ("start", "rollout", "evaluation", "advantage", "teacher", "signal", "rehearsal")
"""Parts of a method that a recipe may override."""

VARIANT = ("of", "summary", *AXES, *SECTIONS)
"""What a recipe may say about a method of its own."""

# ------------------------------------------------------------------------------------------------- loading


def packaged() -> dict[str, Path]:
    """The recipes that come with the harness, by name."""
    return packaged_files("recipes", ".yaml")


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, packaged or from a ``.yaml`` file, and apply ``key=value`` overrides.

    Raises HarnessError, one line with file, setting and nearest valid value, for anything that does not fit.
    """
    path = find_file("recipe", name, packaged())
    data = read_recipe(path)
    validate(Recipe, data, str(path))
    for override in overrides:
        data = apply_override(data, override)
        validate(Recipe, data, f"override {override!r}")
    return validate(Recipe, data, str(path))


def read_recipe(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's data, laid over those of the recipe that it ``extends``: a packaged one, or a file beside it.

    ``below`` are the recipes that extend this one. Raises HarnessError as ``load_recipe``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path} is not YAML: {error}") from error
    data = read_yaml(text, f"{path} is not YAML")
    if not isinstance(data, dict):
        raise HarnessError(f"{path} does not hold a recipe: expected settings such as 'methods:' and 'envs:'")
    name = data.pop("extends", None)
    if name is None:
        return data
    if not isinstance(name, str):
        raise HarnessError(f"{path}: extends: expected the name or file of a recipe, got {name!r}")
    beside = path.parent / name
    base = beside if beside.is_file() else find_file("recipe", name, packaged())
    chain = (*below, path.resolve())
    if base.resolve() in chain:
        raise HarnessError(f"{path} extends {name}, which extends it in turn")
    if "name" not in data:
        raise HarnessError(f"{path}: a recipe that extends another has a name of its own: name: ...")
    extended = read_recipe(base, chain)
    validate(Recipe, extended, str(base))
    return extend(extended, data, str(path))


# ----------------------------------------------------------------------------------------------- expansion


@dataclass(frozen=True)
class Lookup:
    """How expansion finds out about what a recipe only names; each raises HarnessError where it is not as it should be.

    Attributes:
        fingerprint: Hash of a policy's weights.
        env: An environment whose data hold a panel, with the protocol values that its card states.
        skills: That the library of an environment's cells has a skill wherever they read one.
    """

    fingerprint: Callable[[str], str]
    env: Callable[[EnvConfig, str], EnvConfig]
    skills: Callable[[Sequence[CellConfig]], None]


def lookup() -> Lookup:
    """What a run needs: weights are at hand, or downloaded, and data are there."""
    return Lookup(_fingerprint, resolve_env, require_skills)


def expand(recipe: Recipe, found: Lookup | None = None) -> list[CellConfig]:
    """All cells of a recipe: baselines and the base policy (evaluation only), then every method, for every seed.

    Environments are built and panels, methods, policies, libraries and options checked, so that a bad recipe fails
    here. A recipe with the method ``vanilla`` has the base policy in it under that name.
    """
    found = found or lookup()
    found = replace(found, fingerprint=cache(found.fingerprint))  # weights are hashed once
    cells = [_computed(recipe, cell) for plan in recipe.envs for cell in _plan_cells(recipe, plan, found)]
    unique = {cell.hash: cell for cell in cells}
    if not unique:
        raise HarnessError(f"recipe {recipe.name} has no cells: it needs environments and seeds")
    return list(unique.values())


def _computed(recipe: Recipe, cell: CellConfig) -> CellConfig:
    """A cell with the recipe's precision and engine, as far as they can influence it."""
    from harness.policy.load import trainable

    if not trainable(cell.policy):
        return cell
    engine, method = recipe.engine, cell.method
    if method is None or not method.learns:  # there is no gradient to correct
        usual = EngineConfig()
        engine = engine.model_copy(update={"correction": usual.correction, "cap": usual.cap})
    if engine.kind == "vllm":
        for section in ("train", "stage1", "eval"):
            heat = getattr(getattr(cell, section), "temperature", 0)
            if not (heat == 0 or 0.01 <= heat <= 2):
                where = f"recipe {recipe.name}: {section}.temperature {heat:g}"
                raise HarnessError(f"{where}: vLLM samples at 0 or from 0.01 to 2; use engine.kind local")
    return cell.model_copy(update={"precision": recipe.precision, "engine": engine})


def _plan_cells(recipe: Recipe, plan: EnvPlan, found: Lookup) -> list[CellConfig]:
    """The cells of one environment."""
    where = f"recipe {recipe.name}: envs.{plan.env.id}"
    shared = {section: _section(recipe, plan, section, where) for section in SECTIONS}
    names = dict.fromkeys([*recipe.methods, *plan.methods, *recipe.variants])
    settings = {name: _method_settings(recipe, plan, name, where) for name in names}
    measured = validate(EvalConfig, shared["eval"], f"{where}.eval")
    env = found.env(plan.env, measured.panel)
    untrained = [name for name in recipe.methods if settings[name][0] == get_method("vanilla")]
    alone = [*recipe.baselines, *([] if untrained else [recipe.policy])]
    cells = [
        evaluation(env, policy, found.fingerprint(policy), seed, measured)
        for policy in dict.fromkeys(alone)
        for seed in recipe.seeds
    ]
    for name in recipe.methods:
        method, overlay = settings[name]
        sections = deep_merge(shared, {key: overlay[key] for key in overlay if key in SECTIONS})
        cell = _method_cell(recipe, plan, method, sections, found, f"{where}.methods.{name}")
        cells += [cell.model_copy(update={"seed": seed}) for seed in recipe.seeds]
    found.skills([cell for cell in cells if cell.library])
    return cells


def _method_cell(
    recipe: Recipe,
    plan: EnvPlan,
    method: Method,
    sections: Mapping[str, Any],
    found: Lookup,
    where: str,
) -> CellConfig:
    """The cell of a method in one environment; what cannot influence it is left out."""
    measured = validate(EvalConfig, sections["eval"], f"{where}.eval")
    env = found.env(plan.env, measured.panel)
    external = method.start == "teacher_sft" or (method.teacher is not None and method.teacher.weights == "external")
    if method.trains:
        _require_model(recipe.policy, "trained")
    if external:
        _require_model(recipe.teacher, "a teacher")
    if method.teacher and method.teacher.context == "oracle_skill":
        _require_override(env, "oracle_skill", "writes no oracle skill for the context oracle_skill", where)
    train = validate(TrainConfig, sections["train"], f"{where}.train")
    if method.trains and train.lora:
        require_extra(f"{where}.train.lora", "peft", "lora")
    if not method.learns:
        train = train.model_copy(update={"updates": 0})
    return CellConfig(
        env=env,
        policy=recipe.policy,
        policy_fingerprint=found.fingerprint(recipe.policy),
        method=method,
        teacher=recipe.teacher if external else "",
        teacher_fingerprint=found.fingerprint(recipe.teacher) if external else "",
        library=recipe.library if method.reads_library else "",
        library_fingerprint=fingerprint_of(recipe.library) if method.reads_library else "",
        train=train if method.trains else None,
        stage1=_stage1(method, env, sections["stage1"], f"{where}.stage1"),
        imitation=validate(ImitationConfig, sections["imitation"], f"{where}.imitation")
        if method.start == "teacher_sft"
        else None,
        analysis=_analysis(method, env, sections["analysis"], f"{where}.analysis"),
        eval=measured if method.trains else _once(measured),
    )


def _stage1(method: Method, env: EnvConfig, given: Mapping[str, Any], where: str) -> Stage1Config | None:
    if not _has_stage1(method):
        return None
    stage1 = validate(Stage1Config, given, where)
    _check_annotator(stage1.annotator, env, f"{where}.annotator")
    return stage1


def _check_annotator(annotator: str, env: EnvConfig, where: str) -> None:
    check_annotator(annotator)
    if annotator == SCRIPTED:
        _require_override(env, "annotate", "has no scripted annotator; name an endpoint, MODEL@BASE_URL", where)


def _analysis(method: Method, env: EnvConfig, given: Mapping[str, Any], where: str) -> AnalysisConfig | None:
    """Settings of the analyses; the annotator only where the method asks one."""
    if not _analyses(method):
        return None
    analysis = validate(AnalysisConfig, given, where)
    if method.teacher is None or method.teacher.analyzer != "external":
        return analysis.model_copy(update={"annotator": ""})
    if not analysis.annotator:
        raise HarnessError(f"{where}.annotator: an external analyzer is named here: scripted, or MODEL@BASE_URL")
    _check_annotator(analysis.annotator, env, f"{where}.annotator")
    return analysis


def _require_override(env: EnvConfig, name: str, lacks: str, where: str) -> None:
    """Raise HarnessError where an environment leaves an optional part of the contract out."""
    if getattr(env_class(env.id), name) is getattr(AgentEnv, name):
        raise HarnessError(f"{where}: {env.id} {lacks}")


def require_skills(cells: Sequence[CellConfig]) -> None:
    """Raise HarnessError unless the library of an environment's cells has a skill wherever they read one."""
    if not cells:
        return
    panels = {
        ("train", cell.train.panel_size)
        for cell in cells
        if cell.train and cell.method and cell.method.trains_on_library
    }
    panels |= {
        (cell.eval.panel, cell.eval.panel_size) for cell in cells if cell.method and "library" in cell.method.evaluation
    }
    library, env = load_library(cells[0].library), cells[0].env
    with closing(make_env(env.id, env.options)) as made:
        for panel, size in sorted(panels, key=str):
            library.require(env.id, made.panel(panel, size))


def _once(settings: EvalConfig) -> EvalConfig:
    """Settings of a single evaluation, where ``every`` means nothing."""
    return settings.model_copy(update={"every": EvalConfig.model_fields["every"].default})


def evaluation(env: EnvConfig, policy: str, fingerprint: str, seed: int, settings: EvalConfig) -> CellConfig:
    """A cell that plays a panel without training."""
    return CellConfig(env=env, policy=policy, policy_fingerprint=fingerprint, seed=seed, eval=_once(settings))


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


def _method_settings(recipe: Recipe, plan: EnvPlan, name: str, where: str) -> tuple[Method, Mapping[str, Any]]:
    """A method or variant under what this environment overrides, and its overrides of the shared sections."""
    method, overlay = _named(recipe, name)
    own = plan.methods.get(name, {})
    at = f"{where}.methods.{name}"
    method = vary(method, own, at)
    allowed = {"eval", *AXES} | ({"train"} if method.trains else set())
    allowed |= {"stage1"} if _has_stage1(method) else set()
    allowed |= {"analysis"} if _analyses(method) else set()
    allowed |= {"imitation"} if method.start == "teacher_sft" else set()
    overlay = deep_merge(overlay, {key: own[key] for key in own if key in SECTIONS})
    for key in [*own, *overlay]:
        if key in SECTIONS and key not in allowed:
            raise HarnessError(f"{at}: {key} means nothing to this method")
        if key not in allowed:
            raise HarnessError(f"{at}: {unknown('setting', key, allowed)}")
        if key in SECTIONS and not isinstance(overlay[key], Mapping):
            raise HarnessError(f"{at}.{key}: expected settings, got {overlay[key]!r}")
    if "annotator" in overlay.get("analysis", {}) and not (method.teacher and method.teacher.analyzer == "external"):
        raise HarnessError(f"{at}.analysis.annotator: nobody asks it; that is for teacher.analyzer external")
    return method, overlay


def _named(recipe: Recipe, name: str) -> tuple[Method, Mapping[str, Any]]:
    """A registered method, or a variant of this recipe with its overrides of the shared sections."""
    if name not in recipe.variants:
        if name in registered(METHODS) or not recipe.variants:
            return get_method(name), {}
        raise unknown("method or variant", name, [*registered(METHODS), *recipe.variants])
    given, where = recipe.variants[name], f"recipe {recipe.name}: variants.{name}"
    if name in registered(METHODS):
        raise HarnessError(f"{where}: a registered method has this name already; choose another")
    for key in given:
        if key not in VARIANT:
            raise HarnessError(f"{where}: {unknown('setting', key, VARIANT)}")
    if "of" not in given:
        raise HarnessError(f"{where}: say of which method it is a variant, e.g. of: seed")
    method, overlay = _named(recipe.model_copy(update={"variants": {}}), str(given["of"]))
    method = vary(method, given, where)
    summary = str(given.get("summary", f"variant of {method.name}"))
    sections = {key: given[key] for key in given if key in SECTIONS}
    return method.model_copy(update={"name": name, "summary": summary}), deep_merge(overlay, sections)


def vary(method: Method, changes: Mapping[str, Any], where: str) -> Method:
    """A method with some of its axes changed; a signal of another kind replaces the method's, it is not merged."""
    data = method.model_dump()
    for axis in AXES:
        if axis in changes:
            change, kind = changes[axis], (data["signal"] or {}).get("kind")
            other = axis == "signal" and isinstance(change, Mapping) and change.get("kind", kind) != kind
            data = {**data, axis: change} if other else deep_merge(data, {axis: change})
    return validate(Method, data, where)
