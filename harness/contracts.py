"""The vocabulary every part of the harness shares: tasks, panels, episodes, skills, cards and the environment contract.

This module imports neither torch nor transformers: environment workers load it in every process.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypedDict

import gymnasium
import numpy as np
from numpy.typing import NDArray

from harness.inert import readable

Image = NDArray[np.uint8]
"""An RGB picture, shape (height, width, 3), dtype uint8."""

IMAGE_PLACEHOLDER = "<image>"
"""Marks where a picture stands in a prompt's text; there are as many as there are images."""


class HarnessError(Exception):
    """A problem the user can mend. Its text is one line; the command line prints it and exits with code 2."""


class DataMissing(HarnessError):
    """An environment's data are not where its options say. What the options themselves say may be right."""


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value in canonical form: sorted keys, no white space, UTF-8."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Half a surrogate pair, which a foreign text may hold, is no reason to fail: its bytes differ from all others.
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def plain(text: str) -> str:
    """Foreign text as a prompt may quote it: no placeholder stands for a picture, every character can be encoded."""
    return readable(text).replace(IMAGE_PLACEHOLDER, "(image)")


# ---------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """One problem instance. Its id and kind, which name it in files, are made readable.

    Attributes:
        id: Stable name, unique within the environment, e.g. ``"train/000017"`` or ``"valid_seen/pick_.../trial_..."``.
        env: Id of the environment, e.g. ``"Sokoban-v1"``.
        split: Name of the split the task belongs to.
        kind: Category that scores are broken down by, e.g. ALFWorld's six task types.
        spec: JSON-able data from which the environment rebuilds the instance (a seed, a path, ...).
        fingerprint: SHA-256 of what defines the instance: initial observation, goal, hidden reward data, engine and
            data version. Two tasks with one fingerprint are the same problem.
    """

    id: str
    env: str
    split: str
    kind: str
    spec: Mapping[str, Any]
    fingerprint: str

    def __post_init__(self) -> None:
        for name in ("id", "kind"):
            object.__setattr__(self, name, readable(getattr(self, name)))


@dataclass(frozen=True)
class Panel:
    """An ordered list of tasks, pinned by the hash of their fingerprints."""

    name: str
    tasks: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know about this panel, e.g. which games of the full split are missing."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over the ordered fingerprints."""
        return digest([task.fingerprint for task in self.tasks])[:16]


# ------------------------------------------------------------------------------------------------- episodes


class StopReason(StrEnum):
    """Why an episode ended. Only SUCCESS is a success; a truncated episode never is."""

    SUCCESS = "success"
    """The environment ended the episode and says the goal was reached."""
    FAILURE = "failure"
    """The environment ended the episode and the goal was not reached."""
    MAX_STEPS = "max_steps"
    """The step limit of the protocol was reached."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The prompt did not fit even without any history; the episode gets no training weight."""
    ENV_ERROR = "env_error"
    """The environment or its worker crashed; the episode is excluded from scores and counted."""
    POLICY_ERROR = "policy_error"
    """The policy's endpoint gave no answer after all retries; the episode is excluded from scores and counted."""


UNCOUNTED = (StopReason.ENV_ERROR, StopReason.POLICY_ERROR)
"""Episodes that ended like this enter no score."""


class Observation(TypedDict):
    """What an environment shows: text (may be empty) and images (may be none)."""

    text: str
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Turn:
    """One past step as later prompts quote it: 1-based step number, the text seen and the parsed action taken.

    Both texts are made :func:`plain`.
    """

    number: int
    observation: str
    action: str

    def __post_init__(self) -> None:
        for name in ("observation", "action"):
            object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True)
class View:
    """Everything a step prompt may be built from. Texts are made :func:`plain` here, so that no environment has to.

    Attributes:
        task: The task in words, e.g. ``"put a clean mug in desk."``; empty where the environment states none.
        step: 1-based number of the step about to be taken.
        history: The last k turns, oldest first (k = history window; over-long prompts may carry fewer).
        observation: The current observation's text.
        images: The current observation's images.
        admissible: Admissible actions in the environment's order.
    """

    task: str
    step: int
    history: tuple[Turn, ...]
    observation: str
    images: tuple[Image, ...]
    admissible: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("task", "observation"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        object.__setattr__(self, "admissible", tuple(map(plain, self.admissible)))


@dataclass(frozen=True)
class Prompt:
    """One user message: text with one ``<image>`` placeholder for each of ``images``."""

    text: str
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.text.count(IMAGE_PLACEHOLDER) != len(self.images):
            raise ValueError(
                f"prompt has {self.text.count(IMAGE_PLACEHOLDER)} image placeholders but {len(self.images)} images"
            )


@dataclass(frozen=True)
class Response:
    """What a policy answered to one prompt.

    Attributes:
        text: The decoded answer without special tokens.
        token_ids: The sampled ids, end-of-sequence token included; empty for scripted policies. They are the only
            source for scoring and training: text is never re-tokenised.
        logprobs: Log-probability of each sampled token under the distribution it was drawn from (temperature applied,
            banned tokens excluded; greedy answers: temperature 1), same length as ``token_ids``.
        finished: False where the token limit cut the answer.
        usage: (prompt tokens, answer tokens) as an endpoint counted them; zeros from every other policy.
        failure: Why there is no answer, which ends the episode: POLICY_ERROR, or CONTEXT_OVERFLOW where the endpoint
            found the prompt too long; None where there is one.
        error: What happened, one line, where there is no answer.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finished: bool = True
    usage: tuple[int, int] = (0, 0)
    failure: StopReason | None = None
    error: str = ""

    @property
    def tokens(self) -> int:
        """Length of the answer in tokens, as sampled or as an endpoint counted them."""
        return len(self.token_ids) or self.usage[1]


@dataclass(frozen=True)
class Step:
    """One decision: what was shown, what was answered, what came of it."""

    observation: Observation
    prompt: Prompt
    response: Response
    action: str
    valid: bool
    """False where the answer could not be read as an action of this environment."""
    reward: float
    dropped_turns: int = 0
    """History turns left out because the prompt was too long."""


@dataclass(frozen=True)
class Skill:
    """Hindsight text about one finished episode, with its provenance.

    Attributes:
        text: The policy-facing skill; empty where the answer was malformed (the episode then gets no distillation).
        summary: The episode in a sentence.
        author: Who wrote it, e.g. ``"policy"``, ``"scripted"`` or an endpoint's model name.
        update: Training update at which it was written; -1 in stage 1.
        raw: The author's unparsed answer.
    """

    text: str
    summary: str
    author: str
    update: int
    raw: str

    @property
    def usable(self) -> bool:
        """Whether the skill can be inserted into a prompt (v_tau of the paper)."""
        return bool(self.text.strip())


@dataclass
class Episode:
    """One finished attempt at a task."""

    task: Task
    attempt: int
    """0-based number of the attempt within the task's group."""
    task_text: str
    steps: list[Step] = field(default_factory=list)
    stop_reason: StopReason = StopReason.MAX_STEPS
    score: float = 0.0
    """The environment's own score in [0, 1]; 1 is a success unless the environment's card says otherwise."""
    error: str = ""
    """For ENV_ERROR and POLICY_ERROR: what happened, one line."""
    traceback: str = ""
    """For ENV_ERROR: where in the environment, as far as that is known."""

    @property
    def success(self) -> bool:
        return self.stop_reason is StopReason.SUCCESS

    @property
    def counted(self) -> bool:
        """Whether the episode enters scores; crashes of environment or endpoint do not."""
        return self.stop_reason not in UNCOUNTED

    @property
    def reward(self) -> float:
        """Undiscounted return: the sum of the step rewards."""
        return float(sum(step.reward for step in self.steps))


# ---------------------------------------------------------------------------------------------------- cards


@dataclass(frozen=True)
class EnvCard:
    """What a reader needs to know about an environment to read a number from it."""

    id: str
    modality: str
    """``"text"`` or ``"vision"``."""
    max_steps: int
    history: int
    """Default history window k: how many past turns a prompt quotes."""
    success: str
    """Definition of success, one sentence."""
    reward: str
    """Definition of the reward, one sentence."""
    invalid_action: str
    """What happens to an answer that cannot be read as an action, one sentence."""
    engine: str
    """Engine and version, e.g. ``"native-1 (rules 2.1.1)"``."""
    data: str
    """Data source and version, e.g. ``"generated-1"``."""
    parser: str
    """Version of the action parser, e.g. ``"tags-1"``."""
    panels: tuple[str, ...]
    """Names that ``panel()`` accepts; ``"train"`` and ``"eval"`` are always among them."""


# ---------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class Speed:
    """What an environment's own engine does in a CPU second, beside the engine that it replaces and equals."""

    what: str
    """The piece of work in a few words, e.g. ``"steps"``."""
    ours: float
    reference: float
    goal: float
    """``ours / reference`` should be at least this."""


class FreeText(gymnasium.Space[str]):
    """Any text. ``sample()`` draws one of ``examples``, so that random gymnasium tools get past the parser."""

    def __init__(self, examples: Sequence[str] = ("",)) -> None:
        super().__init__(shape=None, dtype=str)
        self.examples = tuple(examples)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        return self.examples[int(self.np_random.integers(len(self.examples)))]

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FreeText) and self.examples == other.examples

    def __repr__(self) -> str:
        return f"FreeText(examples={self.examples!r})"


def observations(side: int = 1) -> gymnasium.Space[Observation]:
    """The space of texts with any number of square pictures, ``side`` pixels wide."""
    picture = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)
    return gymnasium.spaces.Dict(text=FreeText(), images=gymnasium.spaces.Sequence(picture))  # type: ignore[return-value]


class AgentEnv(gymnasium.Env[Observation, str]):
    """An environment for language agents: a `gymnasium.Env` whose actions are strings.

    ``reset(seed=, options={"task": Task})`` starts a task; without a task one of the ``train`` panel is drawn with
    the seed. ``step(action)`` takes a *parsed* action. Both return an ``info`` with at least::

        valid       bool              the action could be read as an action of this environment (True after reset)
        success     bool              the goal has been reached
        score       float             the environment's own score so far, in [0, 1]
        admissible  tuple[str, ...]   admissible actions, in the environment's order

    Everything except ``reset``/``step``/``oracle`` is a pure function of its arguments and the constructor options.
    """

    card: EnvCard
    observation_space = observations()
    """Environments with pictures set ``observations(side)``; in those of text there never is one."""
    option_names: ClassVar[tuple[str, ...]] = ()
    """Keyword options the constructor accepts (all JSON-able, all with defaults)."""
    phrases: ClassVar[tuple[str, ...]] = ()
    """Fixed pieces of the compact prompts, observations and responses, each of which becomes one token of the tiny
    policy's vocabulary; leave empty if the environment does not train the tiny policy."""

    @abstractmethod
    def panel(self, name: str, size: int | None = None) -> Panel:
        """The pinned panel ``name``, or its first ``size`` tasks.

        The same name and size give the same tasks in the same order in every process. Raises HarnessError for an
        unknown name or a size the panel cannot fill.
        """

    @abstractmethod
    def task_text(self, observation: Observation) -> str:
        """The task in words, read from the first observation; what ``View.task`` holds."""

    @abstractmethod
    def prompt(self, view: View, style: str) -> Prompt:
        """The user message for one step.

        ``style`` is ``"paper"`` (the full prompt a pretrained model needs) or ``"compact"`` (same facts under short
        headings, for the embedded tiny policy). The text neither starts nor ends with white space.
        """

    @abstractmethod
    def parse(self, response: str) -> tuple[str, bool]:
        """Read a response: (action, valid). Never raises; an unreadable response gives an action that does nothing."""

    @abstractmethod
    def respond(self, action: str, thought: str = "") -> str:
        """The response a policy would write to take ``action``: ``parse(respond(a)) == (a, True)``."""

    def choices(self, view: View) -> tuple[str, ...]:
        """Concrete actions that the random policy and the blunders of demonstrations draw from; to be overridden where
        the admissible list holds templates such as ``search[<your query>]``."""
        return view.admissible

    def foresee(self, actions: Sequence[str]) -> None:
        """Called with the actions that environments of this process are about to take, one each: the place to ask a
        server for all that they need in one request. Must not raise; ``step`` says what went wrong."""
        return

    @abstractmethod
    def oracle(self) -> str:
        """The scripted expert's next action from the current state."""

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """Scripted analysis of a finished episode: (summary, skill), from what the agent saw only; None if unable."""
        return None

    def brief(self, text: str) -> str:
        """How a compact analysis prompt quotes an observation or an action; by default as it is."""
        return text

    def oracle_skill(self) -> str:
        """A skill for the current task by someone who knows its hidden state, in the words of ``annotate``; for
        demonstrations and diagnosis only. Empty where the environment offers none."""
        return ""

    def secrets(self) -> tuple[str, ...]:
        """Words of the current task's hidden state, none of which is in its first observation: an accepted answer, the
        code of the wanted product. A skill that has one which its episode never showed tells more than was seen."""
        return ()

    def thought(self, action: str) -> str:
        """The expert's one- or two-word thought before ``action``, for demonstrations; may be empty."""
        return ""

    def benchmark(self) -> tuple[Speed, ...]:
        """Measure an engine of our own against the one it replaces, for ``harness perf``; empty where there is none.

        Raises HarnessError where the other engine is not installed.
        """
        return ()


def mentions(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase as whole words, in whatever case; an empty phrase is nowhere."""
    return bool(phrase) and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def unknown(what: str, name: str, known: Iterable[str]) -> HarnessError:
    """The error for a name that does not exist, with the nearest one that does."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.0)
    hint = next((n for n in names if near and n.lower() == near[0]), None)
    tail = f"; did you mean {hint!r}?" if hint else "; none is registered"
    return HarnessError(f"unknown {what} {name!r}{tail}")
