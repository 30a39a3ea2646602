"""EZPoints as an agent environment: panels, prompts, parser, expert, scripted analysis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded

from envs_vision.ezpoints.drawing import SIDE, draw_table
from envs_vision.ezpoints.rules import (
    ACTIONS,
    TARGET,
    Card,
    State,
    draw_ranks,
    draw_suits,
    parse_cards,
    solve,
    step,
)
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
    observations,
    unknown,
)

NOTHING = "none"
"""The action an unreadable response gives: the formula stays as it is."""
KEY = '"action":'
SEEDS = {"train": range(2**16), "eval": range(2**16, 2**17)}
SIZES = {"train": 2000, "eval": 128}

PAPER_PROMPT = """\
<image>
You are an expert card player. The picture shows two playing cards and the formula you have built so far.
Make a formula that uses both cards and equals 12, one entry at a time. Possible actions: {actions}.
A card from 2 to 9 counts what it shows; T, J, Q and K count 10. Each card can be used once.
Every action adds one number or operator to the end of the formula; a number that is not on an unused card is ignored. \
The action = ends the game and evaluates the formula.
Reward: 10 if the formula equals 12 when you play =, otherwise 0.
The current formula is: {formula}
Choose the next entry of the formula.
Answer with a JSON object of two fields. The first is "thoughts": which cards you see and how they make 12.
The second is "action": exactly one of the possible actions. Example of the form: \
{{"thoughts": "...", "action": "..."}}"""


class EZPoints(AgentEnv):
    """Make 12 from two cards, entry by entry (PAPER 4.5).

    Args:
        max_steps: Step limit; five entries and "=" are enough for every deal.
    """

    option_names = ("max_steps",)
    phrases = (
        "\nformula:",
        '{"thoughts": "',
        '", "action": "',
        '"}',
        "The cards are",
        ": play",
        "made 12.",
        "did not make 12.",
        "was not finished.",
        "No formula was built.",
    )

    def __init__(self, max_steps: int = 8) -> None:
        if not (isinstance(max_steps, int) and 1 <= max_steps <= 1000):
            raise HarnessError(f"EZPoints-v1 option max_steps={max_steps!r} is no whole number from 1 to 1000")
        self._cards: tuple[Card, Card] | None = None
        self._state = State((0, 0))
        self._steps = 0
        self.action_space = FreeText(ACTIONS)
        self.observation_space = observations(SIDE)
        self.card = EnvCard(
            id="EZPoints-v1",
            modality="vision",
            max_steps=max_steps,
            history=0,
            success="the formula uses both cards and equals 12 when = is played",
            reward="10 at success, otherwise 0",
            invalid_action="the formula stays as it is (reward 0) and the step is spent",
            engine="native-1",
            data="deals-1",
            parser="json-action-1",
            panels=tuple(SEEDS),
        )

    # ------------------------------------------------------------------------------------------ tasks

    def panel(self, name: str, size: int | None = None) -> Panel:
        if name not in SEEDS:
            raise unknown("panel of EZPoints-v1", name, SEEDS)
        return _panel(name, SIZES[name] if size is None else size)

    def task_text(self, observation: Observation) -> str:
        return f"make {TARGET} from the two cards."

    # ---------------------------------------------------------------------------------------- playing

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        task: Task | None = (options or {}).get("task")
        if task is None:
            train = self.panel("train", 64)
            task = train.tasks[self.np_random.integers(len(train))]
        self._cards = parse_cards(task.spec["cards"])
        self._state, self._steps = _start(self._cards), 0
        return self._observation(), _info(won=False, valid=True)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._dealt()
        outcome = step(self._state, action)
        self._state = outcome.state
        self._steps += 1
        truncated = self._steps >= self.card.max_steps and not outcome.done
        return (
            self._observation(),
            outcome.reward,
            outcome.done,
            truncated,
            _info(outcome.won, valid=action in ACTIONS),
        )

    def render(self) -> Any:
        """The current picture."""
        return draw_table(self._dealt(), self._state.formula)

    def _dealt(self) -> tuple[Card, Card]:
        if self._cards is None:
            raise ResetNeeded("call reset() before the first step")
        return self._cards

    def _observation(self) -> Observation:
        formula = self._state.formula
        return {"text": " ".join(formula), "images": (draw_table(self._dealt(), formula),)}

    # -------------------------------------------------------------------------------------- languages

    def prompt(self, view: View, style: str) -> Prompt:
        if style == "compact":
            return Prompt(f"<image>\nformula: {view.observation}".rstrip(), view.images)
        formula = view.observation.replace(" ", "")
        return Prompt(PAPER_PROMPT.format(actions=", ".join(ACTIONS), formula=formula), view.images)

    def parse(self, response: str) -> tuple[str, bool]:
        """The one legal action behind the first ``"action":``; of a response without it, in the last character.

        Everything behind the key is searched, 10 before 1; it is unreadable where there is no action or more than one.
        """
        text = response.lower()
        place = text.find(KEY)
        tail = text[-1:] if place < 0 else text[place + len(KEY) :]
        found = ["10"] if "10" in tail else []
        tail = tail.replace("10", "")
        found += [action for action in ACTIONS if action != "10" and action in tail]
        return (found[0], True) if len(found) == 1 else (NOTHING, False)

    def respond(self, action: str, thought: str = "") -> str:
        return json.dumps({"thoughts": thought, "action": action}, ensure_ascii=False)

    # ----------------------------------------------------------------------------------------- expert

    def plan(self) -> tuple[str, ...] | None:
        """The shortest winning actions from the current state; None where the formula is lost."""
        self._dealt()
        return solve(self._state)

    def oracle(self) -> str:
        """The first action of the plan; "=" where the formula is lost."""
        return (self.plan() or ("=",))[0]

    def thought(self, action: str) -> str:
        """The values of the cards, in order, whatever the action: reading them is what thinking is needed for."""
        first, second = self._dealt()
        return f"{first.value} {second.value}"

    def oracle_skill(self) -> str:
        """What :meth:`annotate` says about the current deal."""
        return _skill(self._dealt())

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """What the formula came to, and the formula that wins; the first picture shows all that is needed."""
        cards = parse_cards(episode.task.spec["cards"])
        state = _start(cards)
        for past in episode.steps:
            state = step(state, past.action).state
        formula = " ".join(state.formula)
        if not formula:
            summary = "No formula was built."
        elif episode.steps[-1].action == "=":
            summary = f"{formula} {'made' if episode.success else 'did not make'} {TARGET}."
        else:
            summary = f"{formula} was not finished."
        return summary, _skill(cards)


def _start(cards: tuple[Card, Card]) -> State:
    return State((cards[0].value, cards[1].value))


def _skill(cards: tuple[Card, Card]) -> str:
    """E.g. "The cards are 10 and 2: play 10 + 2 =."."""
    plan = solve(_start(cards)) or ()
    return f"The cards are {cards[0].value} and {cards[1].value}: play {' '.join(plan)}."


def _info(won: bool, valid: bool) -> dict[str, Any]:
    return {"valid": valid, "success": won, "score": float(won), "admissible": ACTIONS}


# ------------------------------------------------------------------------------------------------------ panels


@lru_cache
def _panel(name: str, size: int) -> Panel:
    if size > len(SEEDS[name]):
        raise HarnessError(f"panel {name!r} of EZPoints-v1 has {len(SEEDS[name])} tasks, not {size}")
    tasks = tuple(islice(_tasks(name), size))
    distinct = len({task.fingerprint for task in tasks})
    return Panel(name, tasks, (f"{len(tasks)} deals drawn like the official generator's, {distinct} of them distinct",))


def _tasks(name: str) -> Iterator[Task]:
    """Deals by seed. The two cards themselves decide on which side of the split they fall (by their fingerprint), so
    that no deal is ever in both panels; suits are drawn again until the side is right, ranks are not, so their
    frequencies are the official ones."""
    side = 0 if name == "train" else 1
    for seed in SEEDS[name]:
        rng = np.random.default_rng(seed)
        ranks = draw_ranks(rng)
        while True:
            cards = draw_suits(rng, ranks)
            spec = {"cards": f"{cards[0]} {cards[1]}"}
            fingerprint = digest({"env": "EZPoints-v1", "engine": "native-1", **spec})
            if int(fingerprint[-1], 16) % 2 == side:
                break
        kind = "multiply" if cards[0].value * cards[1].value == TARGET else "add"
        yield Task(f"{name}/{seed:06d}", "EZPoints-v1", name, kind, spec, fingerprint)
