"""Methods side by side: groups evaluations into settings and arms.

A *setting* is an environment under one protocol card; an *arm* is all seeds of one method in one setting. Only arms of
one setting are compared, and averages over environments take one setting per environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from harness.cards import ProtocolCard
from harness.config import CellConfig
from harness.contracts import unknown
from harness.reporting import statistics as st
from harness.reporting.differences import Paired, paired, pooled_seed_variance
from harness.reporting.frames import STAR, Cell
from harness.reporting.statistics import Estimate, Floats, Outcomes


@dataclass(frozen=True)
class Budget:
    """A quantity that training spends: its name on an axis and in a table, the ledger's fields that add up to it."""

    label: str
    short: str
    fields: tuple[str, ...]


TOKENS = ("sampled_tokens", "analyzer_tokens", "rescored_tokens", "trained_tokens")
"""Of the policy and its teachers; an annotator behind an endpoint is another model with another price."""
EXTERNAL = ("external_prompt_tokens", "external_answer_tokens")

BUDGETS = {
    "updates": Budget("Updates", "updates", ()),
    "episodes": Budget("Training episodes", "episodes", ("episodes",)),
    "env_steps": Budget("Environment steps", "steps", ("env_steps",)),
    "sampled_tokens": Budget("Sampled tokens (acting + analysis)", "sampled tokens", TOKENS[:2]),
    "all_tokens": Budget("All tokens (acting + analysis + re-scored + trained)", "all tokens", TOKENS),
    "acting_tokens": Budget("Sampled tokens (acting only)", "acting tokens", TOKENS[:1]),
    "analyzer_tokens": Budget("Sampled tokens (analysis only)", "analysis tokens", TOKENS[1:2]),
    "rescored_tokens": Budget("Re-scored tokens", "re-scored tokens", TOKENS[2:3]),
    "trained_tokens": Budget("Trained tokens", "trained tokens", TOKENS[3:]),
    "external_prompt_tokens": Budget("Prompt tokens of an external annotator", "external prompts", EXTERNAL[:1]),
    "external_answer_tokens": Budget("Answer tokens of an external annotator", "external answers", EXTERNAL[1:]),
    "external_tokens": Budget("Tokens of an external annotator", "external tokens", EXTERNAL),
    "optimizer_steps": Budget("Optimizer steps", "optimizer steps", ("optimizer_steps",)),
    "wall_seconds": Budget("Wall-clock seconds", "wall s", ("wall_seconds",)),
    "cpu_seconds": Budget("CPU seconds", "CPU s", ("cpu_seconds",)),
    "flops": Budget("Estimated FLOPs", "FLOPs", ("flops",)),
}
"""What success can be compared at, by name: every column of the ledger, sums of its tokens, and the updates."""


def check_budget(name: str) -> str:
    """The name, if it is one of :data:`BUDGETS`; else HarnessError with the nearest one."""
    if name not in BUDGETS:
        raise unknown("budget", name, BUDGETS)
    return name


REFERENCES = ("grpo", "seed")
"""The method others are compared with: the first of these that was run beside another one."""
UNTRAINED = "vanilla"
"""The untrained start, which trained methods are compared with too; ``base (POLICY)`` is its evaluation alone."""
FAMILIES = (
    "random",
    "untrained",
    "imitation",
    "reinforcement learning",
    "skills in prompts",
    "teacher distillation",
    "self-distillation",
    "seed",
    "other policies",
    "oracle",
)
"""Row order of the tables."""


@dataclass(frozen=True)
class Setting:
    """An environment under one protocol card, with the panel's tasks and their kinds in order."""

    name: str
    env: str
    card: ProtocolCard
    card_id: str
    """The card's digest, as in the ``card`` column of the frames."""
    main: bool
    """Whether this is the environment's setting with the most cells; averages over environments use it."""
    tasks: tuple[str, ...]
    kinds: tuple[str, ...]

    @cached_property
    def task_draws(self) -> Floats:
        """(B, T) bootstrap draws of the tasks, shared by all arms: this is what pairs them."""
        return st.task_draws(self.kinds, f"tasks of {self.name}")


@dataclass(frozen=True)
class Arm:
    """All seeds of one method in one setting. U evaluations x S seeds x T tasks, sums over the counted episodes."""

    setting: Setting
    method: str
    """Name of its row; with a star where skills are in the prompt at evaluation."""
    config: CellConfig
    """Of one of its seeds; the others differ in the seed alone."""
    trained: bool
    """Whether the policy's weights were changed."""
    seeds: tuple[int, ...]
    updates: tuple[int, ...]
    success: Floats
    score: Floats
    count: Floats
    excluded: int
    """Episodes of the last evaluation that crashed and enter no score."""
    ledgers: dict[str, Floats]
    """(U, S) training budget spent at each evaluation, per ledger field."""

    def outcomes(self, evaluation: int = -1) -> Outcomes:
        """Success at one evaluation, by default the last."""
        return Outcomes(self.success[evaluation], self.count[evaluation], self.setting.kinds)

    @property
    def scores(self) -> Outcomes:
        """The environment's score at the last evaluation."""
        return Outcomes(self.score[-1], self.count[-1], self.setting.kinds)

    @cached_property
    def seed_draws(self) -> Floats:
        """(B, S) bootstrap draws of the seeds; independent of every other arm's."""
        return st.seed_draws(len(self.seeds), f"seeds of {self.method} in {self.setting.name}")

    def replicates(self, outcomes: Outcomes) -> Floats:
        """(B,) bootstrap draws of the micro average."""
        return st.micro_replicates(outcomes, self.seed_draws, self.setting.task_draws)

    @cached_property
    def curve(self) -> list[Estimate]:
        """Success at every evaluation with its interval over seeds and tasks."""
        measured = [self.outcomes(evaluation) for evaluation in range(len(self.updates))]
        return [st.success_interval(st.micro(o), self.replicates(o), o.played) for o in measured]

    @property
    def final(self) -> Estimate:
        """Success at the last evaluation with its interval."""
        return self.curve[-1]

    def spent(self, budget: str) -> Floats:
        """(U, S) budget spent at each evaluation."""
        if not BUDGETS[budget].fields:
            return np.repeat(np.array(self.updates, dtype=float)[:, None], len(self.seeds), axis=1)
        spent: Floats = np.sum([self.ledgers[name] for name in BUDGETS[budget].fields], axis=0)
        return spent

    @property
    def n(self) -> str:
        crashed = f" ({self.excluded} excluded)" if self.excluded else ""
        return f"{len(self.seeds)} × {self.outcomes().played}{crashed}"


Measure = Callable[[Arm], Outcomes | None]
"""What a method is judged by, e.g. ``Arm.outcomes``; None where a method has no such outcomes."""


@dataclass(frozen=True)
class Comparison:
    """Every setting, and every arm by (setting name, method)."""

    settings: tuple[Setting, ...]
    arms: dict[tuple[str, str], Arm]

    @property
    def methods(self) -> list[str]:
        """Row order of the tables: by family; in it the untrained start, the reference or seed first."""
        first = (UNTRAINED, *REFERENCES)
        configs = {method: arm.config for (_, method), arm in self.arms.items()}
        return sorted(configs, key=lambda m: (family(m, configs[m]), m.rstrip(STAR) not in first, m))

    @property
    def reference(self) -> str | None:
        """What the other methods are compared with; None where neither GRPO nor SEED stands beside another training."""
        trained = {arm.method for arm in self.arms.values() if arm.trained}
        return next((name for name in REFERENCES if name in trained and len(trained) > 1), None)

    def arms_of(self, setting: Setting, trained_only: bool = False) -> list[Arm]:
        """The arms of a setting in row order."""
        found = [self.arms[setting.name, method] for method in self.methods if (setting.name, method) in self.arms]
        return [arm for arm in found if arm.trained or not trained_only]

    def trainings(self, setting: Setting) -> dict[str, Arm]:
        """The trained arms of a setting by plain name; of a training measured in two contexts the plain arm."""
        arms = self.arms_of(setting, trained_only=True)
        starred_first = sorted(arms, key=lambda arm: not arm.method.endswith(STAR))
        return {arm.method.removesuffix(STAR): arm for arm in starred_first}

    def contrast(self, ours: Arm, theirs: Arm, measure: Measure = Arm.outcomes) -> Paired:
        """Ours minus theirs in one setting; ``measure`` says in what, by default in final success."""
        peers = [measure(arm) for arm in self.trainings(ours.setting).values()]
        pooled = pooled_seed_variance([outcomes for outcomes in peers if outcomes])
        a, b = measure(ours), measure(theirs)
        if a is None or b is None:
            raise ValueError(f"{ours.method} and {theirs.method} were not both measured")
        return paired(a, b, pooled, (ours.trained, theirs.trained))

    @property
    def cards(self) -> tuple[tuple[str, ProtocolCard], ...]:
        return tuple((setting.name, setting.card) for setting in self.settings)

    @property
    def card_notes(self) -> tuple[str, ...]:
        """One line per setting that must not be compared with its environment's main one, naming the differences."""
        main = {setting.env: setting for setting in self.settings if setting.main}
        return tuple(
            f"{s.name} is not comparable with {main[s.env].name}; their protocols differ in: "
            + ", ".join(
                f"{name} ({getattr(main[s.env].card, name)} / {getattr(s.card, name)})"
                for name in main[s.env].card.differences(s.card)
            )
            + "."
            for s in self.settings
            if not s.main
        )


def family(name: str, config: CellConfig) -> int:
    """Place of a row's family in :data:`FAMILIES`, read from what the method does."""
    method = config.method
    if method is None:
        base = name.startswith("base (")
        return FAMILIES.index(name if name in ("random", "oracle") else "untrained" if base else "other policies")
    of_episodes = method.teacher is not None and method.teacher.context not in ("plain", "library")
    if method.name == "seed" or method.name.startswith("seed-") or of_episodes:
        return FAMILIES.index("seed")
    if not method.trains:
        return FAMILIES.index("untrained")
    if not method.learns:
        return FAMILIES.index("imitation")
    if method.teacher is None:
        return FAMILIES.index("skills in prompts" if method.rollout == "library" else "reinforcement learning")
    return FAMILIES.index("teacher distillation" if method.teacher.weights == "external" else "self-distillation")


# ------------------------------------------------------------------------------------------------ grouping


def compare(cells: Sequence[Cell], evaluations: pd.DataFrame) -> Comparison:
    """Group cells and their evaluations (of :func:`harness.reporting.frames.evaluations_of`) by setting and method."""
    cards = {(cell.key["env"], cell.key["card"]): cell.protocol for cell in cells}
    sizes = pd.Series([(cell.key["env"], cell.key["card"]) for cell in cells]).value_counts()
    order = sorted(cards, key=lambda key: (key[0], -int(sizes[key]), key[1]))
    settings: list[Setting] = []
    arms: dict[tuple[str, str], Arm] = {}
    examples = {(cell.method, cell.key["card"]): cell for cell in cells}
    for env, card in order:
        rows = evaluations[(evaluations["env"] == env) & (evaluations["card"] == card)]
        if rows.empty:
            continue
        rank = sum(setting.env == env for setting in settings)
        tasks = rows.drop_duplicates("task")
        name = env if rank == 0 else f"{env} (protocol {rank + 1})"
        kinds = tuple(tasks["kind"].astype(str))
        setting = Setting(name, env, cards[env, card], card, rank == 0, tuple(tasks["task"]), kinds)
        settings.append(setting)
        for method, part in rows.groupby("method"):
            example = examples[str(method).removesuffix(STAR), card]
            arms[name, str(method)] = _arm(setting, str(method), example, part)
    return Comparison(tuple(settings), arms)


def _arm(setting: Setting, method: str, example: Cell, rows: pd.DataFrame) -> Arm:
    """Tensors of one arm; evaluations that not all seeds have are left out."""
    seeds = sorted(rows["seed"].unique())
    per_seed = [set(rows.loc[rows["seed"] == seed, "update"]) for seed in seeds]
    updates = sorted(set.intersection(*per_seed))
    rows = rows[rows["update"].isin(updates)]
    counted = rows[rows["counted"]]
    axes = {"update": updates, "seed": seeds, "task": setting.tasks}
    places = tuple(pd.Index(labels).get_indexer(pd.Index(counted[column])) for column, labels in axes.items())

    def table(values: pd.Series) -> Floats:
        out = np.zeros([len(labels) for labels in axes.values()])
        np.add.at(out, places, values.to_numpy(dtype=float))
        return out

    spent = rows.drop_duplicates(["update", "seed"]).set_index(["update", "seed"])
    names = [column for column in rows.columns if column.startswith("ledger/")]
    return Arm(
        setting=setting,
        method=method,
        config=example.config,
        trained=example.trained,
        seeds=tuple(int(seed) for seed in seeds),
        updates=tuple(int(update) for update in updates),
        success=table(counted["success"]),
        score=table(counted["score"]),
        count=table(counted["counted"]),
        excluded=int((~rows.loc[rows["update"] == updates[-1], "counted"]).sum()),
        ledgers={
            name.removeprefix("ledger/"): spent[name].unstack("seed").loc[updates, seeds].to_numpy(dtype=float)
            for name in names
        },
    )
