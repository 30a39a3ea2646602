"""The ``ALFWorld-v1`` environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from envs_text.alfworld import generator, prompts
from envs_text.alfworld.compare import compare_engines
from envs_text.alfworld.engine import Engine
from envs_text.alfworld.experts import SearchExpert, plan_from
from envs_text.alfworld.games import LAYOUT, Game, Rules, check_rules, official_split, read_game
from envs_text.alfworld.hindsight import Trail, describe, follow, read_task, thought
from envs_text.alfworld.official import OfficialEngine, check_installed
from envs_text.alfworld.official_experts import HandcodedExpert, Planner
from harness.contracts import (
    AgentEnv,
    DataMissing,
    EnvCard,
    Episode,
    FreeText,
    HarnessError,
    Observation,
    Panel,
    Prompt,
    Speed,
    Task,
    View,
    digest,
    unknown,
)
from harness.parsers import parse_tags, write_tags

WIN_REWARD = 10.0

GENERATED_PANELS = {"train": (2000, 100_000), "eval": (128, 1024), "demo": (2000, 100_000)}
"""Panel of generated games -> (tasks by default, most tasks)."""

UNSEEN = {"small": "medium", "medium": "full"}
"""Size of the rooms trained in -> size of those in the panel ``unseen``, which holds evaluation games of that size."""

OFFICIAL_PANELS = {"train": "train", "eval": "valid_seen", "valid_seen": "valid_seen", "valid_unseen": "valid_unseen"}
"""Panel of official games -> split."""

STYLES = {"paper": prompts.paper, "compact": prompts.compact}
ENGINES = ("native", "textworld")
OFFICIAL_EXPERTS: dict[str, type[HandcodedExpert | Planner]] = {"handcoded": HandcodedExpert, "planner": Planner}
EXPERTS = ("plan", "search", *OFFICIAL_EXPERTS)


class ALFWorld(AgentEnv):
    """Household tasks: find an object, perhaps clean, heat or cool it, bring it somewhere.

    Options:
        engine: ``"native"``, or ``"textworld"`` for the official packages; they behave identically.
        data: empty for generated games, else the directory of the official ones (the one that holds ``json_2.1.1``);
            ``"official"`` takes it from the environment variable ``ALFWORLD_DATA``.
        size: of generated games: ``"small"``, ``"medium"`` or ``"full"``.
        rules: ``"current"`` or ``"2.1.1"``; empty means current for generated games, and for official ones the
            version that the game file carries.
        expert: ``"plan"`` knows where everything is and goes the shortest way, ``"search"`` knows only what it saw;
            with the engine ``"textworld"`` also the package's own: ``"handcoded"`` rules, and its ``"planner"``.
        max_steps: steps after which an episode is truncated.
    """

    option_names: ClassVar[tuple[str, ...]] = ("engine", "data", "size", "rules", "expert", "max_steps")
    phrases: ClassVar[tuple[str, ...]] = prompts.PHRASES

    def __init__(
        self,
        engine: str = "native",
        data: str = "",
        size: str = "small",
        rules: str = "",
        expert: str = "plan",
        max_steps: int = 30,
    ) -> None:
        for what, name, known in (
            ("ALFWorld engine", engine, ENGINES),
            ("size of generated games", size, generator.SIZES),
            ("ALFWorld expert", expert, EXPERTS),
        ):
            if name not in known:
                raise unknown(what, name, known)
        if expert in OFFICIAL_EXPERTS and engine != "textworld":
            raise HarnessError(f"ALFWorld expert {expert!r} belongs to the official engine: set engine=textworld")
        if engine == "textworld":
            check_installed()
        if max_steps < 1:
            raise HarnessError(f"ALFWorld max_steps must be at least 1, not {max_steps}")
        self._root = _data_root(data)
        self._rules: Rules | None = check_rules(rules) if rules else None if self._root else "current"
        self._size = size
        self._engine_name = engine
        self._expert_name = expert
        self._max_steps = max_steps
        self._engine: Engine | OfficialEngine | None = None
        self._expert: SearchExpert | HandcodedExpert | Planner | None = None  # none for "plan", which has no memory
        self._native: Engine  # the engine played, or its native twin, whose state the experts read
        self.card = EnvCard(
            id="ALFWorld-v1",
            modality="text",
            max_steps=max_steps,
            history=5,
            success="The goal holds after a step: the object, in the asked state, is in a receptacle of the asked type"
            " (two objects: in the same one), or is held where a lamp of the asked type was turned on.",
            reward=f"{WIN_REWARD:g} on success, which ends the episode, else 0.",
            invalid_action="A command that is not admissible does nothing ('Nothing happens.') and costs a step; an"
            " answer without the asked tags is flagged invalid and its last 30 characters are the command.",
            engine=f"{engine}-1 (rules {self._rules or 'of the game files'})",
            data=f"official {LAYOUT}" if self._root else f"{generator.VERSION}-{size}",
            parser="tags-1",
            panels=tuple(OFFICIAL_PANELS if self._root else _generated_panels(size)),
        )
        self.action_space = FreeText(("look", "inventory"))

    # ------------------------------------------------------------------------------------------------ tasks

    def panel(self, name: str, size: int | None = None) -> Panel:
        """See `AgentEnv.panel`; official panels come in an order drawn by name, so that the first tasks are mixed."""
        if name not in self.card.panels:
            raise unknown("panel of ALFWorld-v1", name, self.card.panels)
        if self._root:
            trials, notes = _trials(self._root, OFFICIAL_PANELS[name])
            default = most = len(trials)
        else:
            default, most = _generated_panels(self._size)[name]
        size = default if size is None else size
        if not 1 <= size <= most:
            raise HarnessError(f"panel {name!r} of ALFWorld-v1 has 1 to {most} tasks, not {size}")
        if self._root:
            return Panel(name, tuple(self._official(trial) for trial in trials[:size]), notes)
        return Panel(name, tuple(self._generated(name, number) for number in range(size)))

    def _generated(self, panel: str, number: int) -> Task:
        split, size = ("eval", UNSEEN[self._size]) if panel == "unseen" else (panel, self._size)
        return self._task(panel, {"split": split, "number": number, "size": size, "rules": self._rules})

    def _official(self, trial: Path) -> Task:
        return self._task(trial.parts[-3], {"trial": "/".join(trial.parts[-3:]), "rules": self._rules})

    def _task(self, split: str, spec: Mapping[str, Any]) -> Task:
        game = self._game(spec)
        fingerprint = digest(
            {
                "engine": 1,  # one number for both engines: they behave identically
                "rules": game.rules,
                "problem": game.problem,
                "task": game.task,
                "observation": Engine(game).reset(),
            }
        )
        return Task(id=game.name, env=self.card.id, split=split, kind=game.kind, spec=spec, fingerprint=fingerprint)

    def _game(self, spec: Mapping[str, Any]) -> Game:
        if "trial" not in spec:
            return generator.generate(spec["number"], spec["split"], spec["size"], spec["rules"])
        if self._root is None:
            raise HarnessError(f"{spec['trial']} is an official game: give ALFWorld-v1 the option data")
        return read_game(self._root / LAYOUT / spec["trial"], spec["rules"])

    # ----------------------------------------------------------------------------------------------- playing

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {}).get("task") or self._draw()
        self.close()
        game = self._game(task.spec)
        self._native = Engine(game)
        official = OFFICIAL_EXPERTS.get(self._expert_name)
        if self._engine_name == "textworld":
            self._engine = OfficialEngine(game, official.NEEDS if official else ())
        else:
            self._engine = self._native
        self._steps = 0
        self._trail = Trail()
        text = self._engine.reset()
        if official and isinstance(self._engine, OfficialEngine):
            self._expert = official(self._engine)
        else:
            self._expert = SearchExpert(text) if self._expert_name == "search" else None
        return self._observe(text)

    def _draw(self) -> Task:
        if self._root is None:
            return self._generated("train", int(self.np_random.integers(GENERATED_PANELS["train"][0])))
        trials, _ = _trials(self._root, "train")
        return self._official(trials[int(self.np_random.integers(len(trials)))])

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        engine = self._playing()
        text = engine.step(action)
        if engine is not self._native:
            self._native.step(action)
        self._steps += 1
        self._trail.do(action, text)
        if self._expert:
            self._expert.observe(action.strip(), text)
        observation, info = self._observe(text)
        won = info["success"]
        return observation, WIN_REWARD * won, won, not won and self._steps >= self._max_steps, info

    def _playing(self) -> Engine | OfficialEngine:
        if self._engine is None:
            raise HarnessError("ALFWorld-v1: call reset() first")
        return self._engine

    def _observe(self, text: str) -> tuple[Observation, dict[str, Any]]:
        engine = self._playing()
        self._trail.see(text)
        info = {
            "valid": True,  # any text is a command, though most do nothing
            "success": engine.won,
            "score": float(engine.won),
            "admissible": tuple(command for command in engine.admissible() if command != "help"),
        }
        return {"text": text, "images": ()}, info

    def close(self) -> None:
        """Release the official engine's planner library."""
        if isinstance(self._engine, OfficialEngine):
            self._engine.close()
        self._engine = None

    # ---------------------------------------------------------------------------------------- text interface

    def task_text(self, observation: Observation) -> str:
        return prompts.task_in(observation["text"])

    def prompt(self, view: View, style: str) -> Prompt:
        if style not in STYLES:
            raise unknown("prompt style", style, STYLES)
        return Prompt(STYLES[style](view).strip())

    def parse(self, response: str) -> tuple[str, bool]:
        return parse_tags(response)

    def respond(self, action: str, thought: str = "") -> str:
        return write_tags(action, thought)

    # ----------------------------------------------------------------------------------- experts and hindsight

    def oracle(self) -> str:
        """The chosen expert's next command; ``"look"`` once the goal is reached."""
        admissible = self._playing().admissible()
        if self._expert:
            return self._expert.act(admissible)
        return next(iter(plan_from(self._native)), "look")

    def thought(self, action: str) -> str:
        """The sub-goal that an action serves in the current state, in one word: the thought of demonstrations."""
        return thought(self._trail, read_task(self._native.game.task), action)

    def oracle_skill(self) -> str:
        """The skill that the shortest solution of the current task teaches (knows the hidden state)."""
        engine = Engine(self._native.game)
        actions = plan_from(engine)
        observations = [engine.reset()] + [engine.step(action) for action in actions[:-1]]
        trail = follow(observations, actions, success=True)
        return describe(trail, read_task(engine.game.task), success=True)[1]

    def secrets(self) -> tuple[str, ...]:
        """Names of the objects that the task asks for, e.g. ``"mug 2"``: an agent reads one where it finds it."""
        self._playing()
        world = self._native.world
        things = {o for inside in world.start.inside.values() for o in inside if world.kind[o] == world.goal.object}
        return tuple(sorted(world.name[o] for o in things))

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """See `envs_text.alfworld.hindsight`; None for an episode without steps or with a task in free words."""
        try:
            wish = read_task(episode.task_text)
        except ValueError:
            return None
        if not episode.steps:
            return None
        observations = [step.observation["text"] for step in episode.steps]
        trail = follow(observations, [step.action for step in episode.steps], episode.success)
        return describe(trail, wish, episode.success)

    def benchmark(self) -> tuple[Speed, ...]:
        """The native engine against the official one on the same games and commands, whose texts must be equal."""
        games = [self._game(task.spec) for task in self.panel("train", 6)]
        found = compare_engines(games, steps=60)
        if found["unequal"]:
            raise HarnessError(f"the engines differ in {found['unequal']} of {found['moments']} moments")
        return (
            Speed("steps", 1 / found["native_step_s"], 1 / found["official_step_s"], goal=1000),
            Speed("loads and resets", 1 / found["native_load_s"], 1 / found["official_load_s"], goal=300),
        )


def _generated_panels(size: str) -> Mapping[str, tuple[int, int]]:
    """Panels of games generated at a size; there is no size above the largest to be unseen."""
    return GENERATED_PANELS | ({"unseen": GENERATED_PANELS["eval"]} if size in UNSEEN else {})


def _data_root(data: str) -> Path | None:
    """Directory of the official games; None for generated ones."""
    if data != "official":
        root = Path(data).expanduser() if data else None
    elif "ALFWORLD_DATA" in os.environ:
        root = Path(os.environ["ALFWORLD_DATA"]).expanduser()
    else:
        raise DataMissing("data=official needs the environment variable ALFWORLD_DATA (see alfworld-download)")
    if root and not (root / LAYOUT).is_dir():
        raise DataMissing(f"no official ALFWorld games at {root}: expected a directory {LAYOUT}")
    return root


@lru_cache(maxsize=8)
def _trials(root: Path, split: str) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The playable trials of a split, in an order that depends on nothing but their names, and notes on the others."""
    trials, notes = official_split(root, split)
    return tuple(sorted(trials, key=lambda trial: digest("/".join(trial.parts[-3:])))), notes
