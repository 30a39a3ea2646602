"""Scripted demonstrations: what the embedded policies learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.contracts import AgentEnv, Episode, Prompt, Response, Step, StopReason, Turn, View
from harness.registry import make_env
from harness.skills import analysis_prompt, insert_skill, skill_answer


@dataclass(frozen=True)
class Source:
    """An environment that demonstrations come from.

    Attributes:
        weak: In weakened stages, share of plain demonstrations' actions that are random and imitated as if right;
            chosen so that the result is well under the expert and clearly above a random policy.
        searcher: Options under which the expert knows only what it saw.
    """

    env: str
    options: dict[str, str]
    weak: float
    history: int
    max_steps: int
    searcher: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Environment and options in a few words."""
        return " ".join([self.env, *(f"{name}={value}" for name, value in self.options.items())])


SEARCH = {"expert": "search"}

SOURCES = (
    Source("ALFWorld-v1", {"size": "small"}, 0.4, 2, 20, SEARCH),
    Source("ALFWorld-v1", {"size": "medium"}, 0.4, 2, 30, SEARCH),
    Source("ALFWorld-v1", {"size": "full"}, 0.4, 2, 30, SEARCH),
    Source("ALFWorld-v1", {"size": "full", "rules": "2.1.1"}, 0.4, 2, 30, SEARCH),
    Source("Sokoban-v1", {}, 0.75, 0, 15),
    Source("EZPoints-v1", {}, 0.4, 0, 8),
    Source("WebShop-v1", {}, 0.25, 2, 15),
    Source("SearchQA-v1", {}, 0.4, 4, 4),
)


@dataclass(frozen=True)
class Stage:
    """One stage of building.

    Attributes:
        weakened: Whether plain demonstrations are weakened.
        skilled: Share of episodes demonstrated with the oracle's skill in the prompt (never weakened).
        analysed: Share of rows that are (episode -> skill).
        rows: Rows a step; 16 learn two to three times faster per CPU second than 64.
        searching: Whether plain demonstrations come from the expert that knows only what it saw, where there is one.
        shares: Share of each source in the rows.
    """

    steps: int
    learning_rate: float
    final_rate: float
    weakened: bool
    skilled: float
    analysed: float
    seed: int
    rows: int = 16
    searching: bool = False
    shares: tuple[float, ...] = (0.16, 0.06, 0.04, 0.07, 0.23, 0.14, 0.17, 0.13)


BUFFER = 1536
"""Rows of each source held for shuffling; up to four times as many while analyses are still too few."""

ANALYSIS_TOKENS = 1024


@dataclass
class Demonstrator:
    """Plays one environment's training tasks and turns them into training rows."""

    source: Source
    stage: Stage
    rng: np.random.Generator
    env: AgentEnv = field(init=False)
    plain_env: AgentEnv = field(init=False)
    rows: list[tuple[Prompt, str]] = field(default_factory=list)
    analyses: list[tuple[Prompt, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = make_env(self.source.env, self.source.options)
        blind = self.source.searcher if self.stage.searching else {}
        self.plain_env = make_env(self.source.env, {**self.source.options, **blind}) if blind else self.env
        self.tasks = self.env.panel("demo" if "demo" in self.env.card.panels else "train").tasks

    def draw(self, count_tokens: Callable[[Prompt], int]) -> tuple[Prompt, str]:
        """One random row; the buffers are topped up with fresh episodes as rows are taken."""
        analysed = self.rng.random() < self.stage.analysed
        while min(len(self.rows), 8 * len(self.analyses)) < BUFFER:
            rows, episode = self.demonstrate()
            if len(self.rows) < 4 * BUFFER:
                self.rows += rows
            note = self.env.annotate(episode) if episode.steps else None
            if note:
                prompt, _ = analysis_prompt(episode, "compact", ANALYSIS_TOKENS, count_tokens, self.env.brief)
                if prompt is not None:
                    self.analyses.append((prompt, skill_answer(*note)))
        pool = self.analyses if analysed else self.rows
        index = int(self.rng.integers(len(pool)))
        pool[index], pool[-1] = pool[-1], pool[index]
        return pool.pop()

    def demonstrate(self) -> tuple[list[tuple[Prompt, str]], Episode]:
        """Play one task: what the expert answers at every step, also after blunders that are not imitated."""
        rng = self.rng
        task = self.tasks[int(rng.integers(len(self.tasks)))]
        skilled = rng.random() < self.stage.skilled
        env = self.env if skilled else self.plain_env
        observation, info = env.reset(options={"task": task})
        skill = env.oracle_skill() if skilled else ""
        weak = self.source.weak if self.stage.weakened and not skilled else 0.0
        blunders = float(rng.choice([0.0, 0.15, 0.4]))
        episode = Episode(task, 0, env.task_text(observation))
        rows: list[tuple[Prompt, str]] = []
        turns: list[Turn] = []
        seen: dict[str, None] = {}
        burst = 0
        for number in range(1, self.source.max_steps + 1):
            admissible = info["admissible"]
            history = tuple(turns[-self.source.history :]) if self.source.history else ()
            view = View(episode.task_text, number, history, observation["text"], observation["images"], admissible)
            choices = env.choices(view)
            seen |= dict.fromkeys(choices)
            prompt = insert_skill(env.prompt(view, "compact"), skill)
            target = str(rng.choice(choices)) if rng.random() < weak else env.oracle()
            if choices == admissible and target not in admissible:  # nothing can be mended any more
                break
            answer = env.respond(target, env.thought(target))
            rows.append((prompt, answer))
            action, burst = self._execute(target, blunders, choices, seen, burst)
            observation_before = observation
            observation, reward, terminated, truncated, info = env.step(action)
            response = Response(env.respond(action, env.thought(action)))
            episode.steps.append(Step(observation_before, prompt, response, action, bool(info["valid"]), float(reward)))
            turns.append(Turn(number, observation_before["text"], action))
            episode.score = float(info["score"])
            if terminated:
                episode.stop_reason = StopReason.SUCCESS if info["success"] else StopReason.FAILURE
            if terminated or truncated:
                break
        return rows, episode

    def _execute(
        self, target: str, blunders: float, choices: Sequence[str], seen: dict[str, None], burst: int
    ) -> tuple[str, int]:
        """The action actually taken: the demonstrated one, a random one, or a burst of no longer possible ones.

        "Nothing happens." never occurs in clean demonstrations; a policy that first meets it in a rollout gets stuck.
        """
        rng = self.rng
        impossible = [action for action in seen if action not in choices]
        if burst == 0 and blunders and rng.random() < 0.08:
            burst = int(rng.integers(1, 4))
        if burst and impossible:
            return str(rng.choice(impossible)), burst - 1
        if rng.random() < blunders:
            return str(rng.choice(choices)), burst
        return target, burst


def demonstrations(stage: Stage, count_tokens: Callable[[Prompt], int]) -> Iterator[list[tuple[Prompt, str]]]:
    """Endless batches of rows, mixed by the sources' shares."""
    rng = np.random.default_rng([stage.seed, 0])
    demonstrators = [
        Demonstrator(source, stage, np.random.default_rng([stage.seed, 1 + index]))
        for index, source in enumerate(SOURCES)
    ]
    while True:
        yield [demonstrators[i].draw(count_tokens) for i in rng.choice(len(SOURCES), stage.rows, p=stage.shares)]
