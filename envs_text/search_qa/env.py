"""The ``SearchQA-v1`` environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from envs_text.search_qa import encyclopedia, hindsight, prompts
from envs_text.search_qa.client import Ahead
from envs_text.search_qa.em import exact_match, normalise
from envs_text.search_qa.prompts import read_action
from envs_text.search_qa.questions import (
    GENERATED_SETS,
    SETS,
    Question,
    balanced,
    generated,
    read_panels,
    read_questions,
)
from envs_text.search_qa.retrieval import BM25, HTTPRetriever, Passage, Retriever, open_retriever
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

STYLES = ("paper", "compact")
DEFAULT_SIZES = {"train": 2000, "eval": 128, "demo": 2000}
"""Tasks of a generated panel unless a size is given; panels of question files hold all their questions."""
ADMISSIBLE = ("search[<your query>]", "answer[<your answer>]")

_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_OPENING = re.compile(r"<(search|answer)>", re.IGNORECASE)


class SearchQA(AgentEnv):
    """Questions to answer with the help of a search engine.

    Options:
        data: empty for generated questions, else a directory or a JSONL file of questions of the field's sets.
        retriever: empty for the generated encyclopedia, else a JSONL corpus or the address of a retrieval server.
        sets: the sets to ask from, separated by commas; empty for all there are. Training questions come from those
            of them that have any.
        top: documents shown after a search.
        max_steps: turns after which an episode is truncated.
    """

    option_names: ClassVar[tuple[str, ...]] = ("data", "retriever", "sets", "top", "max_steps")
    phrases: ClassVar[tuple[str, ...]] = prompts.PHRASES

    def __init__(self, data: str = "", retriever: str = "", sets: str = "", top: int = 3, max_steps: int = 4) -> None:
        for name, value in (("top", top), ("max_steps", max_steps)):
            if not (isinstance(value, int) and 1 <= value <= 100):
                raise HarnessError(f"SearchQA-v1 option {name}={value!r} is no whole number from 1 to 100")
        for name, text in (("data", data), ("retriever", retriever), ("sets", sets)):
            if not isinstance(text, str):
                raise HarnessError(f"SearchQA-v1 option {name}={text!r} is no text")
        if data and not retriever:
            raise HarnessError(
                "SearchQA-v1: questions from files need the option retriever, a corpus file or the address of a server"
            )
        self._data = str(Path(data).expanduser().resolve()) if data else ""
        self._sets = tuple(name.strip() for name in sets.split(",")) if sets else ()
        for name in self._sets:
            known = SETS if data else GENERATED_SETS
            if name not in known:
                raise unknown("question set of SearchQA-v1", name, known)
        self._retriever_spec = retriever
        self._top = top
        self._question: Question | None = None
        self.card = EnvCard(
            id="SearchQA-v1",
            modality="text",
            max_steps=max_steps,
            history=4,
            success="The answer equals one of the accepted answers: lower case, ASCII punctuation deleted, articles and"
            " extra blanks ignored.",
            reward="1 on success, else 0; the first answer ends the episode.",
            invalid_action="A response with neither a search nor an answer does nothing and costs a turn; one with"
            " several is flagged invalid, and its first search (else its first answer) is carried out.",
            engine="native-1",
            data=f"questions {'of files' if data else encyclopedia.VERSION}, {_source(retriever)}, top {top}",
            parser="search-answer-1",
            panels=("train", "eval", "test") if data else tuple(DEFAULT_SIZES),
        )
        self.action_space = FreeText(ADMISSIBLE)

    # ------------------------------------------------------------------------------------------------ tasks

    def panel(self, name: str, size: int | None = None) -> Panel:
        """See `AgentEnv.panel`; the sets take turns, so that the first tasks are mixed evenly."""
        questions, notes = self._questions(name)
        if size is None:
            size = len(questions) if self._data else min(DEFAULT_SIZES[name], len(questions))
        if not 1 <= size <= len(questions):
            raise HarnessError(f"panel {name!r} of SearchQA-v1 has 1 to {len(questions)} tasks, not {size}")
        split = "test" if self._data and name == "eval" else name
        return Panel(name, tuple(self._task(split, question) for question in questions[:size]), notes)

    def _questions(self, name: str) -> tuple[tuple[Question, ...], tuple[str, ...]]:
        """All questions of a panel in order, and notes."""
        if name not in self.card.panels:
            raise unknown("panel of SearchQA-v1", name, self.card.panels)
        everything, notes = _filed(self._data, name == "train") if self._data else (generated()[name], ())
        there = {question.source for question in everything}
        wanted = self._sets or tuple(there)
        missing = [source for source in wanted if source not in there]
        if len(missing) == len(wanted) or (missing and name != "train"):
            sets = ", ".join(missing) or "any set"
            raise HarnessError(f"panel {name!r} of SearchQA-v1 has no questions of {sets} at {self._data}")
        return tuple(question for question in everything if question.source in wanted), notes

    def _task(self, split: str, question: Question) -> Task:
        spec = {
            "id": question.id,
            "source": question.source,
            "question": question.text,
            "answers": list(question.answers),
            "chain": list(question.chain),
        }
        fingerprint = digest(
            {
                "engine": 1,
                "question": question.text,
                "answers": question.answers,
                "retriever": self._retriever.version,
            }
        )
        id = f"{split}/{question.source}/{question.id}"
        return Task(id, self.card.id, split, question.source, spec, fingerprint)

    @property
    def _retriever(self) -> Retriever:
        return _retriever(self._retriever_spec)

    # ----------------------------------------------------------------------------------------------- playing

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {}).get("task") or self._draw()
        spec = task.spec
        self._question = Question(
            spec["id"], spec["source"], spec["question"], tuple(spec["answers"]), tuple(spec["chain"])
        )
        self._steps = 0
        self._seen: list[str] = []
        return self._observe(self._question.text, valid=True)

    def _draw(self) -> Task:
        questions, _ = self._questions("train")
        return self._task("train", questions[int(self.np_random.integers(len(questions)))])

    def foresee(self, actions: Sequence[str]) -> None:
        """Ask a retrieval server for all searches at once."""
        if isinstance(self._retriever, Ahead):
            done = (read_action(action) for action in actions)
            self._retriever.fetch([read[1] for read in done if read and read[0] == "search"], self._top)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out a search or an answer. Raises HarnessError where a retrieval server fails."""
        question = self._asked()
        self._steps += 1
        last = self._steps >= self.card.max_steps
        done = read_action(action)
        answered = done is not None and done[0] == "answer"
        if done is None:
            text = prompts.UNREADABLE
        elif answered:
            text = prompts.ANSWERED
        elif last:
            text = prompts.NOT_SEARCHED
        else:
            text = prompts.show_documents(self._retriever.search([done[1]], self._top)[0])
        self._seen.append(text)
        won = answered and done is not None and exact_match(done[1], question.answers)
        observation, info = self._observe(text, valid=done is not None, won=won)
        return observation, float(won), answered, last and not answered, info

    def _asked(self) -> Question:
        if self._question is None:
            raise HarnessError("SearchQA-v1: call reset() first")
        return self._question

    def _observe(self, text: str, valid: bool, won: bool = False) -> tuple[Observation, dict[str, Any]]:
        info = {"valid": valid, "success": won, "score": float(won), "admissible": ADMISSIBLE}
        return {"text": text, "images": ()}, info

    # ---------------------------------------------------------------------------------------- text interface

    def task_text(self, observation: Observation) -> str:
        return observation["text"]

    def prompt(self, view: View, style: str) -> Prompt:
        if style not in STYLES:
            raise unknown("prompt style", style, STYLES)
        text = prompts.paper(view) if style == "paper" else prompts.compact(view, self.card.max_steps)
        return Prompt(text.strip())

    def parse(self, response: str) -> tuple[str, bool]:
        """The first search of a response, else its first answer, as an action; ``""`` where there is neither.

        A response is read up to its first lower-case ``</search>``, else ``</answer>``; it is valid if all of it holds
        exactly one opening tag.
        """
        valid = len(_OPENING.findall(response)) == 1
        for closing in ("</search>", "</answer>"):
            if closing in response:
                response = response[: response.index(closing) + len(closing)]
                break
        for verb, pattern in (("search", _SEARCH), ("answer", _ANSWER)):
            if match := pattern.search(response):
                return f"{verb}[{match.group(1).strip()}]", valid
        return "", False

    def respond(self, action: str, thought: str = "") -> str:
        """The blank before the argument makes names the same words as inside sentences; ``parse`` drops it."""
        done = read_action(action)
        return f"<think>{thought}</think>" + (f"<{done[0]}> {done[1]}</{done[0]}>" if done else "")

    def choices(self, view: View) -> tuple[str, ...]:
        return prompts.choices(view)

    # ----------------------------------------------------------------------------------- experts and hindsight

    def oracle(self) -> str:
        """Search what the question's way leads through, as far as not seen, then the answer; the answer at once where
        no way is known (questions from files) or no turn is left."""
        question = self._asked()
        titles = {title for seen in self._seen for title, _ in prompts.read_documents(seen)}
        missing = [name for name in question.chain[:-1] if name not in titles]
        if missing and self._steps + 1 < self.card.max_steps:
            return f"search[{missing[0]}]"
        return f"answer[{question.answers[0]}]"

    def thought(self, action: str) -> str:
        """See `envs_text.search_qa.hindsight.thought`."""
        return hindsight.thought(self._asked().text, self._seen, action)

    def oracle_skill(self) -> str:
        """The question's way and its answer."""
        question = self._asked()
        return hindsight.told(question.chain[:-1], question.answers[0])

    def secrets(self) -> tuple[str, ...]:
        """The accepted answers that the question does not name itself."""
        question = self._asked()
        return tuple(answer for answer in question.answers if not mentions(question.text, answer))

    def brief(self, text: str) -> str:
        return prompts.brief(text)

    def annotate(self, episode: Episode) -> tuple[str, str] | None:
        """See `envs_text.search_qa.hindsight`; None for an episode without steps and for failures at questions in free
        words."""
        if not episode.steps:
            return None
        observations = [step.observation["text"] for step in episode.steps]
        return hindsight.describe(
            episode.task_text, observations, [step.action for step in episode.steps], episode.success
        )


def _source(retriever: str) -> str:
    """Where documents come from, in the words of the card; fingerprints pin their version."""
    if not retriever:
        return encyclopedia.VERSION
    return "retrieval server" if retriever.startswith("http") else f"corpus {Path(retriever).name}"


@lru_cache(maxsize=4)
def _retriever(spec: str) -> Retriever:
    """One retriever for all instances of a process; servers are asked ahead."""
    if spec:
        retriever = open_retriever(spec)
        return Ahead(retriever) if isinstance(retriever, HTTPRetriever) else retriever
    passages = [Passage(entry.name, entry.name, entry.text) for entry in encyclopedia.entries().values()]
    return BM25(passages, f"{encyclopedia.VERSION} {digest([passage.contents for passage in passages])[:16]}")


@lru_cache(maxsize=4)
def _filed(data: str, training: bool) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    """Training or evaluation questions of a path in order, and notes; no training question is one of evaluation."""
    files = read_panels(Path(data))
    evaluation = read_questions(files["eval"])
    if not training:
        return balanced(evaluation), ()
    if not files["train"]:
        raise HarnessError(f"no training questions: {data} holds no train*.jsonl")
    asked = {normalise(question.text) for question in evaluation}
    found = read_questions(files["train"])
    kept = [question for question in found if normalise(question.text) not in asked]
    left_out = Counter(question.source for question in found) - Counter(question.source for question in kept)
    notes = tuple(
        f"{count} questions of {source} are left out: also in evaluation" for source, count in left_out.items()
    )
    return balanced(kept), notes
