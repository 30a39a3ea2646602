"""The ``WebShop-v1`` environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, ClassVar

from envs_text.webshop import generator, prompts
from envs_text.webshop.catalogue import Goal, Shop
from envs_text.webshop.engine import PREVIOUS, SEARCH_BAR, WINDOW, Visit
from envs_text.webshop.hindsight import describe, follow, read_request, searches, workflow
from envs_text.webshop.official import open_shop
from envs_text.webshop.rewards import score
from envs_text.webshop.shop import MemoryShop
from harness.contracts import (
    AgentEnv,
    EnvCard,
    Episode,
    FreeText,
    HarnessError,
    Observation,
    Panel,
    Prompt,
    Task,
    View,
    digest,
    mentions,
    unknown,
)
from harness.parsers import parse_tags, write_tags

WIN_REWARD = 10.0
TEST_GOALS = 500
"""Goals at the head of the global order that are for evaluation."""
DEFAULT_SIZES = {"train": 2000, "eval": 128, "test": TEST_GOALS, "demo": 2000}
FALLBACK_CHARS = 20

STYLES = {"paper": prompts.paper, "compact": prompts.compact}
GOALS = ("synthetic", "human")
REWARDS = ("fixed", "official")


class WebShop(AgentEnv):
    """Buy what a request asks for: search, open a product, choose options, buy.

    Options:
        data: empty for the generated catalogue, else the directory of the official files.
        goals: ``"synthetic"`` (made from the catalogue) or ``"human"`` (people's requests).
        size: products of the generated catalogue.
        reward: ``"fixed"``, or ``"official"`` for the original's score with its defect.
        max_steps: steps after which an episode is truncated.
    """

    option_names: ClassVar[tuple[str, ...]] = ("data", "goals", "size", "reward", "max_steps")
    phrases: ClassVar[tuple[str, ...]] = prompts.PHRASES

    def __init__(
        self, data: str = "", goals: str = "synthetic", size: int = 1000, reward: str = "fixed", max_steps: int = 15
    ) -> None:
        for what, name, known in (("kind of WebShop goals", goals, GOALS), ("WebShop reward", reward, REWARDS)):
            if name not in known:
                raise unknown(what, name, known)
        if max_steps < 1:
            raise HarnessError(f"WebShop max_steps must be at least 1, not {max_steps}")
        self._shop = _official_shop(data) if data else _generated_shop(size)
        self._official_data = bool(data)
        self._kind = goals
        self._official_reward = reward == "official"
        self._max_steps = max_steps
        self._search = lru_cache(maxsize=4096)(self._shop.search)
        self._visit: Visit | None = None
        self.card = EnvCard(
            id="WebShop-v1",
            modality="text",
            max_steps=max_steps,
            history=2,
            success="The product bought has score 1: right type, wanted attributes and options, price within the cap.",
            reward=f"{WIN_REWARD:g} if a product with score 1 is bought, else 0; the score itself is in [0, 1]"
            f" ({reward} rules) and 0 until something is bought, which ends the episode.",
            invalid_action="What the page does not offer changes nothing, is flagged invalid and costs a step;"
            f" so is an answer without the asked tags, whose last {FALLBACK_CHARS} characters are the action.",
            engine="native-1",
            data=f"{self._shop.version} ({goals} goals)",
            parser=f"tags-1 (fallback {FALLBACK_CHARS})",
            panels=("train", "eval", "test") if data else ("train", "eval", "demo"),
        )
        self.action_space = FreeText(("search[jacket]", "click[next >]", "click[back to search]"))

    # ------------------------------------------------------------------------------------------------ tasks

    def panel(self, name: str, size: int | None = None) -> Panel:
        """See `AgentEnv.panel`. The head of the one global order of goals is for evaluation, the rest for training; a
        request that stands in an earlier part is left out of a later one."""
        if name not in self.card.panels:
            raise unknown("panel of WebShop-v1", name, self.card.panels)
        default = TEST_GOALS if self._official_data and name == "eval" else DEFAULT_SIZES[name]
        wanted = default if size is None else max(size, 0)
        tasks = tuple(self._task(name, number, goal) for number, goal in islice(self._fresh(name), wanted))
        if size is not None and not 0 < size == len(tasks):
            most = sum(1 for _ in self._fresh(name))
            raise HarnessError(f"panel {name!r} of WebShop-v1 has 1 to {most} tasks, not {size}")
        return Panel(name, tasks, self._notes)

    @cached_property
    def _goals(self) -> Sequence[Goal]:
        """Goals in the one global order."""
        return self._shop.goals(self._kind)

    @cached_property
    def _parts(self) -> Mapping[str, range]:
        """Where in the global order the goals of each panel stand."""
        count = len(self._goals)
        test = min(TEST_GOALS, count // 4)
        if self._official_data:
            return {"eval": range(test), "test": range(test), "train": range(test, count)}
        demo = test + (count - test) // 3
        return {"eval": range(test), "demo": range(test, demo), "train": range(demo, count)}

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        if not self._official_data or len(self._parts["eval"]) == TEST_GOALS:
            return ()
        return (f"the data holds {len(self._goals)} goals only: a quarter of them is for evaluation",)

    def _fresh(self, name: str) -> Iterator[tuple[int, Goal]]:
        """Numbers and goals of a panel, without requests that stood before; the evaluation part is kept whole."""
        numbers = self._parts[name]
        if numbers.start == 0:
            yield from enumerate(self._goals[: numbers.stop])
            return
        seen = set(self._held_out) if name == "train" else {g.instruction for g in self._goals[: numbers.start]}
        for number in numbers:
            goal = self._goals[number]
            if goal.instruction not in seen:
                seen.add(goal.instruction)
                yield number, goal

    @cached_property
    def _held_out(self) -> frozenset[str]:
        """Requests that are not for training."""
        return frozenset(goal.instruction for goal in self._goals[: self._parts["train"].start])

    def _task(self, panel: str, number: int, goal: Goal) -> Task:
        split = "test" if self._official_data and panel == "eval" else panel
        content = {f.name: getattr(goal, f.name) for f in fields(Goal)}
        content["options"] = dict(goal.options) if isinstance(goal.options, Mapping) else goal.options
        page = self._start(goal).text
        fingerprint = digest({"engine": 1, "data": self._shop.version, "goal": content, "observation": page})
        spec = {"number": number, "goal": goal.id}
        return Task(f"{split}/{goal.id}", self.card.id, split, goal.category, spec, fingerprint)

    # ----------------------------------------------------------------------------------------------- playing

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {}).get("task")
        self._visit = self._start(self._goal(task) if task else self._draw())
        self._steps, self._score = 0, 0.0
        self._fitting: dict[str, bool] = {}
        return self._observe(valid=True)

    def _goal(self, task: Task) -> Goal:
        number: int = task.spec["number"]
        goal = self._goals[number] if number < len(self._goals) else None
        if goal is None or goal.id != task.spec["goal"]:
            raise HarnessError(f"{task.id} is no {self._kind} goal of WebShop data {self._shop.version!r}")
        return goal

    def _draw(self) -> Goal:
        numbers = self._parts["train"]
        while True:
            goal = self._goals[numbers[int(self.np_random.integers(len(numbers)))]]
            if goal.instruction not in self._held_out:
                return goal

    def _start(self, goal: Goal) -> Visit:
        return Visit(goal, self._search, self._shop.product)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        visit = self._playing
        valid = visit.act(action)
        self._steps += 1
        bought = visit.page == "bought"
        if bought:
            product = visit.product
            self._score = score(visit.goal, product, product.price, visit.chosen, self._official_reward).total
        observation, info = self._observe(valid)
        return observation, WIN_REWARD * info["success"], bought, not bought and self._steps >= self._max_steps, info

    @property
    def _playing(self) -> Visit:
        if self._visit is None:
            raise HarnessError("WebShop-v1: call reset() first")
        return self._visit

    def _observe(self, valid: bool) -> tuple[Observation, dict[str, Any]]:
        visit = self._playing
        info = {
            "valid": valid,
            "success": self._score == 1.0,
            "score": self._score,
            "admissible": visit.admissible,
        }
        return {"text": visit.text, "images": ()}, info

    def close(self) -> None:
        self._visit = None

    # ---------------------------------------------------------------------------------------- text interface

    def task_text(self, observation: Observation) -> str:
        return prompts.task_in(observation["text"])

    def prompt(self, view: View, style: str) -> Prompt:
        if style not in STYLES:
            raise unknown("prompt style", style, STYLES)
        return Prompt(STYLES[style](view).strip())

    def parse(self, response: str) -> tuple[str, bool]:
        return parse_tags(response, FALLBACK_CHARS)

    def respond(self, action: str, thought: str = "") -> str:
        return write_tags(action, thought)

    def choices(self, view: View) -> tuple[str, ...]:
        """On the search page the searches that the request suggests, elsewhere what can be clicked."""
        if SEARCH_BAR in view.admissible:
            return tuple(f"search[{query}]" for query in searches(view.task))
        return view.admissible

    # ----------------------------------------------------------------------------------- expert and hindsight

    def oracle(self) -> str:
        """The next action on the way to buying the first product in the list that can win."""
        visit = self._playing
        if visit.page == "search":
            return f"search[{self._query()}]"
        if visit.page == "item" and self._will_do(visit.asin):
            return f"click[{next(iter(self._missing()), 'buy now')}]"
        if visit.page in ("results", "item"):
            target = self._target(visit.results)
            if target is None:
                return "click[back to search]"
            place = list(visit.results).index(target) // WINDOW + 1
            if visit.page == "results" and place >= visit.number:
                return f"click[{target.lower()}]" if place == visit.number else "click[next >]"
        return f"click[{PREVIOUS.lower()}]"

    def _target(self, results: Sequence[str]) -> str | None:
        """The first of some products that can win; if none can, the one that the goal was made from, if it is there."""
        asin = self._playing.goal.asin
        return next(filter(self._fits, results), asin if asin in results else None)

    def _will_do(self, asin: str) -> bool:
        return self._fits(asin) or asin == self._target(self._playing.results)

    def _fits(self, asin: str) -> bool:
        """Whether the product wins if the wanted options are chosen."""
        if asin not in self._fitting:
            goal, product = self._playing.goal, self._shop.product(asin)
            bought = _wanted(goal, product.options)
            self._fitting[asin] = score(goal, product, product.price, bought, self._official_reward).total == 1
        return self._fitting[asin]

    def _query(self) -> str:
        """Attributes and type as the request words them, or the product's title where that finds nothing that wins."""
        goal = self._playing.goal
        query = read_request(goal.instruction).query
        found = self._target(self._search(query)) is not None
        return query if found else self._shop.product(goal.asin).title.lower()

    def _missing(self) -> list[str]:
        """Wanted option values that the product looked at offers and that are not chosen, in page order."""
        visit = self._playing
        wanted = _wanted(visit.goal, visit.product.options)
        return [value for name, value in wanted.items() if visit.chosen.get(name) != value]

    def thought(self, action: str) -> str:
        """What matters on this page: the kind of thing, what tells the wanted product apart, or the next option."""
        visit = self._playing
        request = read_request(visit.goal.instruction)
        if visit.page == "search":
            return visit.goal.query if visit.goal.query in request.query else " ".join(request.words[-1:])
        if visit.page == "results":
            return " ".join((*visit.goal.attributes, *(("under", request.cap_text) if request.cap_text else ())))
        if visit.page == "item" and self._will_do(visit.asin):
            return next(iter(self._missing()), "buy")
        return "other" if visit.page == "item" else "back"

    def oracle_skill(self) -> str:
        """The skill of the shortest purchase for the current goal (knows the hidden state)."""
        goal, query = self._playing.goal, self._query()
        asin = self._target(self._search(query)) or goal.asin
        options = _wanted(goal, self._shop.product(asin).options)
        return workflow(query, asin.lower(), tuple(options.values()))

    def secrets(self) -> tuple[str, ...]:
        """Code and title of the product that the goal was made from, unless the request names them itself."""
        goal = self._playing.goal
        words = (goal.asin.lower(), self._shop.product(goal.asin).title)
        return tuple(word for word in words if not mentions(goal.instruction, word))

    def brief(self, text: str) -> str:
        return prompts.brief(text)

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """See `envs_text.webshop.hindsight`; None for an episode without steps."""
        if not episode.steps:
            return None
        observations = [step.observation["text"] for step in episode.steps]
        trail = follow(observations, [step.action for step in episode.steps])
        return describe(trail, read_request(episode.task_text), episode.success)


def _wanted(goal: Goal, offered: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Option name -> value to choose, among the options of a product, in page order."""
    wanted = goal.options
    if isinstance(wanted, Mapping):
        return {name: wanted[name] for name, values in offered.items() if wanted.get(name) in values}
    return {
        name: next(value for value in values if value in wanted)
        for name, values in offered.items()
        if any(value in wanted for value in values)
    }


@lru_cache(maxsize=4)
def _generated_shop(size: int) -> Shop:
    catalogue = generator.products(size)
    return MemoryShop(catalogue, generator.human_goals(catalogue), f"{generator.VERSION}-{size}")


@lru_cache(maxsize=2)
def _official_shop(directory: str) -> Shop:
    return open_shop(directory)
