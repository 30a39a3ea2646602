"""``harness check ENV``: the contract of an environment, one executable rule after the other.

A rule is a function of a :class:`Subject` that returns what it saw in a few words and raises :class:`Broken` where the
contract is broken. Any other exception breaks the rule too: environments are third-party code.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check
from rich.table import Table
from rich.text import Text

from harness.contracts import AgentEnv, HarnessError, Panel, Task, mentions
from harness.registry import make_env
from harness.traces import Choose, Moment, Trace, episode, play, random_chooser, solved, start, step, views

STYLES = ("paper", "compact")
ORACLE_SOLVES = 0.9
GARBAGE = ("", " ", "\x00", "<think>", "</action><action>", '{"action": ', "[]", "<image>", "动作", "a" * 5000)


class Broken(Exception):
    """The contract is broken; the text says how."""


@dataclass(frozen=True)
class Result:
    """One rule's outcome: what was seen, or how it is broken."""

    rule: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Subject:
    """The environment under test, and plays of its first evaluation tasks that several rules look at."""

    spec: str
    options: Mapping[str, Any]
    size: int

    def make(self) -> AgentEnv:
        return make_env(self.spec, self.options)

    def panel(self, name: str) -> Panel:
        """The first ``size`` tasks of a panel, or all if it has fewer."""
        with closing(self.make()) as env:
            try:
                return env.panel(name, self.size)
            except HarnessError:
                return env.panel(name)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return self.panel("eval").tasks

    @cached_property
    def expert(self) -> list[Trace]:
        return self.play(lambda number: lambda env, trace: env.oracle())

    @cached_property
    def random(self) -> list[Trace]:
        return self.play(random_chooser)

    @cached_property
    def idle(self) -> list[Trace]:
        """Answers that cannot be read, until the step limit."""
        return self.play(lambda number: lambda env, trace: env.parse("")[0], limit=3)

    def play(self, chooser: Callable[[int], Choose], limit: int | None = None) -> list[Trace]:
        with closing(self.make()) as env:
            return [play(env, task, chooser(number)) for number, task in enumerate(self.tasks[:limit])]


def require(condition: bool, message: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(message)


def require_equal(ours: Sequence[Moment], theirs: Sequence[Moment], when: str) -> None:
    """Raise Broken where two traces differ in anything an agent or the harness can see."""
    require(len(ours) == len(theirs), f"{len(ours)} and {len(theirs)} moments {when}")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("action", "reward", "terminated", "truncated"):
            require(getattr(a, name) == getattr(b, name), f"{name} differs at step {number} {when}")
        require(a.observation["text"] == b.observation["text"], f"text differs at step {number} {when}")
        images = (a.observation["images"], b.observation["images"])
        same = len(images[0]) == len(images[1]) and all(map(np.array_equal, *images))
        require(same, f"images differ at step {number} {when}")
        for key in ("valid", "success", "score", "admissible"):
            require(a.info[key] == b.info[key], f"info[{key!r}] differs at step {number} {when}")


# --------------------------------------------------------------------------------------------------- rules


def gymnasium_api(subject: Subject) -> str:
    """gymnasium's own environment checker accepts it"""
    with closing(subject.make()) as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gymnasium_check(env, skip_render_check=True)
    return "check_env passes"


def card(subject: Subject) -> str:
    """the card is complete and names train and eval"""
    with closing(subject.make()) as env:
        found = env.card
        require(":" in subject.spec or found.id == subject.spec, f"card.id is {found.id!r}")
        require(found.modality in ("text", "vision"), f"modality is {found.modality!r}, not 'text' or 'vision'")
        require({"train", "eval"} <= set(found.panels), f"panels {found.panels} lack 'train' or 'eval'")
        require(found.max_steps >= 1 and found.history >= 0, "max_steps < 1 or history < 0")
        for name in ("success", "reward", "invalid_action", "engine", "data", "parser"):
            require(bool(getattr(found, name).strip()), f"{name} is empty")
        require(all(env.phrases) and len(set(env.phrases)) == len(env.phrases), "phrases are empty or repeated")
        return f"{found.modality}, {found.max_steps} steps, history {found.history}"


def options(subject: Subject) -> str:
    """options have defaults; unknown ones and unknown panels are refused"""
    with closing(subject.make()) as env:
        parameters = inspect.signature(type(env)).parameters
        for name in env.option_names:
            require(name in parameters, f"option_names has {name!r}, which the constructor lacks")
            require(parameters[name].default is not inspect.Parameter.empty, f"option {name!r} has no default")
        require_refused(lambda: env.panel("no-such-panel", 1), "panel 'no-such-panel'")
    require_refused(lambda: make_env(subject.spec, {"no_such_option": 1}), "option 'no_such_option'")
    return ", ".join(env.option_names) or "no options"


def require_refused(attempt: Callable[[], Any], what: str) -> None:
    """Raise Broken unless the attempt raises HarnessError."""
    try:
        attempt()
    except HarnessError:
        return
    raise Broken(f"{what} is accepted")


def panels(subject: Subject) -> str:
    """a smaller panel is the start of a larger one, task ids are unique, train and eval have no task in common"""
    with closing(subject.make()) as env:
        train, evaluation = env.panel("train"), env.panel("eval")
        for panel in (train, evaluation):
            require(len(panel) > 0, f"panel {panel.name!r} is empty")
            few = min(len(panel), 5)
            require(env.panel(panel.name, few).tasks == panel.tasks[:few], f"{panel.name!r} of size {few} is no prefix")
            require(len({task.id for task in panel}) == len(panel), f"task ids of {panel.name!r} are not unique")
    prints = [{task.fingerprint for task in panel} for panel in (train, evaluation)]
    require(not prints[0] & prints[1], f"{len(prints[0] & prints[1])} tasks are in both train and eval")
    sizes = zip(("train", "eval"), (train, evaluation), prints, strict=True)
    return ", ".join(f"{name} {len(panel)} tasks, {len(distinct)} distinct" for name, panel, distinct in sizes)


def second_process(subject: Subject) -> str:
    """panels have the same hash in a second process with another PYTHONHASHSEED"""
    ours = panel_hashes(subject)
    code = "import sys, json, harness.check as c; print(c.panel_hashes(c.Subject(*json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([subject.spec, dict(subject.options), subject.size])],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    require(done.returncode == 0, f"the second process failed: {last}")
    require(done.stdout.strip() == ours, f"{ours} here, {done.stdout.strip()} there")
    return ours


def panel_hashes(subject: Subject) -> str:
    """Hashes of the first tasks of ``train`` and ``eval``, as one word."""
    return "/".join(subject.panel(name).hash for name in ("train", "eval"))


def information(subject: Subject) -> str:
    """observations and info have the promised fields and types"""
    moments = [moment for trace in (*subject.expert, *subject.random) for moment in trace]
    for moment in moments:
        text, images, info = moment.observation["text"], moment.observation["images"], moment.info
        require(isinstance(text, str), f"observation text is {type(text).__name__}")
        require(isinstance(images, tuple), f"observation images are {type(images).__name__}, not tuple")
        for image in images:
            fits = image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
            require(fits, f"an image is {image.dtype} {image.shape}, not uint8 (H, W, 3)")
        for key, kind in (("valid", bool), ("success", bool), ("score", float), ("admissible", tuple)):
            require(isinstance(info.get(key), kind), f"info[{key!r}] is {info.get(key)!r}, not {kind.__name__}")
        require(0 <= info["score"] <= 1, f"score {info['score']} is outside [0, 1]")
        require(all(isinstance(action, str) for action in info["admissible"]), "an admissible action is not text")
    require(all(trace[0].info["valid"] for trace in subject.expert), "info['valid'] is not True after reset")
    return f"{len(moments)} moments"


def deterministic(subject: Subject) -> str:
    """the same task and actions, and the same seed, give the same episode"""
    actions = [[moment.action for moment in trace[1:]] for trace in subject.random]
    with closing(subject.make()) as env:
        for task, taken, first in zip(subject.tasks, actions, subject.random, strict=True):
            again = [start(env, task), *(step(env, action) for action in taken)]
            require_equal(first, again, f"when {task.id} is played again")
        seeded = [env.reset(seed=seed) for seed in (11, 12, 11)]
        texts = [
            (observation["text"], [image.tobytes() for image in observation["images"]]) for observation, _ in seeded
        ]
        require(texts[0] == texts[2], "reset(seed=11) gives two different tasks")
    return f"{len(actions)} episodes played twice"


def independent(subject: Subject) -> str:
    """two instances played in turn do not influence each other"""
    a, b = subject.random[0], subject.random[-1]
    with closing(subject.make()) as one, closing(subject.make()) as two:
        first, second = [start(one, subject.tasks[0])], [start(two, subject.tasks[-1])]
        for number in range(1, max(len(a), len(b))):
            first += [step(one, a[number].action)] if number < len(a) else []
            second += [step(two, b[number].action)] if number < len(b) else []
    require_equal(a, first, "when two instances are played in turn")
    require_equal(b, second, "when two instances are played in turn")
    return f"{len(a) + len(b)} moments in turn"


def oracle(subject: Subject) -> str:
    """the scripted expert solves at least 90 % of the first eval tasks"""
    rate = solved(subject.expert)
    require(rate >= ORACLE_SOLVES, f"the oracle solves {rate:.1%} of {len(subject.expert)} tasks")
    return f"{rate:.1%} of {len(subject.expert)}"


def random_below_oracle(subject: Subject) -> str:
    """random choices solve fewer tasks than the expert"""
    rate, best = solved(subject.random), solved(subject.expert)
    require(rate < best, f"random solves {rate:.1%}, the oracle {best:.1%}")
    return f"{rate:.1%} of {len(subject.random)}"


def truncation(subject: Subject) -> str:
    """success ends the episode, and an episode that was cut short or did nothing is no success"""
    for trace in (*subject.expert, *subject.random, *subject.idle):
        for moment in trace:
            won = moment.info["success"]
            require(not (won and moment.truncated and not moment.terminated), "a truncated episode is a success")
            require(not won or moment.terminated, "success is reported but the episode goes on")
    require(solved(subject.idle) == 0, "unreadable answers alone reach the goal")
    return f"{len(subject.idle)} idle episodes of up to {max(map(len, subject.idle)) - 1} steps"


def parser(subject: Subject) -> str:
    """parse(respond(action)) gives the action back, and no answer makes the parser raise"""
    traces = (*subject.expert, *subject.random)
    actions = dict.fromkeys(action for trace in traces for moment in trace for action in moment.info["admissible"])
    actions |= dict.fromkeys(moment.action for trace in subject.expert for moment in trace[1:])
    with closing(subject.make()) as env:
        for action in actions:
            for thought in ("", "because"):
                read = env.parse(env.respond(action, thought))
                require(read == (action, True), f"{action!r} is read back as {read}")
        for text in GARBAGE:
            action, valid = env.parse(text)
            require(isinstance(action, str) and isinstance(valid, bool), f"parse({text[:20]!r}) is not (str, bool)")
        require(not env.parse("")[1], "an empty answer counts as valid")
    return f"{len(actions)} actions, {len(GARBAGE)} malformed answers"


def prompts(subject: Subject) -> str:
    """every prompt shows its images, one placeholder each, and has no white space at its ends"""
    count = 0
    with closing(subject.make()) as env:
        for trace in subject.expert[:4]:
            for view in views(env, trace[:-1]):
                for style in STYLES:
                    prompt = env.prompt(view, style)  # Prompt itself refuses a wrong number of placeholders
                    seen = f"{style} prompt of step {view.step}"
                    require(len(prompt.images) == len(view.images), f"{seen} lacks images")
                    require(bool(prompt.text) and prompt.text == prompt.text.strip(), f"{seen} has loose white space")
                    require(env.prompt(view, style).text == prompt.text, f"{seen} changes when rendered again")
                    count += 1
    return f"{count} prompts"


def annotation(subject: Subject) -> str:
    """the scripted analysis, where there is one, reads any finished episode"""
    written = 0
    episodes = list(zip((*subject.tasks, *subject.tasks), (*subject.expert, *subject.random), strict=True))
    with closing(subject.make()) as env:
        for task, trace in episodes:
            note = env.annotate(episode(env, task, trace))
            if note is not None:
                require(len(note) == 2 and all(map(str.strip, note)), f"annotation of {task.id} has an empty part")
                written += 1
    return f"{written} of {len(episodes)} episodes annotated"


def hidden(subject: Subject) -> str:
    """the first observation of a task holds none of its secrets"""
    count = 0
    with closing(subject.make()) as env:
        for task in subject.tasks:
            text = start(env, task).observation["text"]
            for secret in env.secrets():
                require(bool(secret.strip()), f"a secret of {task.id} is blank")
                require(not mentions(text, secret), f"the first observation of {task.id} holds its secret {secret!r}")
                count += 1
    return f"{count} secrets of {len(subject.tasks)} tasks"


def closing_releases(subject: Subject) -> str:
    """close() may be called twice and leaves no file, process or thread behind"""
    holding = []
    for _ in range(2):  # the first round also loads what stays for good, such as modules
        env = subject.make()
        play(env, subject.tasks[0], random_chooser(0))
        env.close()
        env.close()
        holding.append(resources())
    for name, count in holding[1].items():
        require(count <= holding[0][name], f"each instance leaves {count - holding[0][name]} {name} behind")
    return "nothing left"


def resources() -> dict[str, int]:
    """What this process holds: open files (where the system tells), child processes and threads."""
    descriptors = Path("/proc/self/fd")
    return {
        "open files": len(list(descriptors.iterdir())) if descriptors.is_dir() else 0,
        "processes": len(multiprocessing.active_children()),
        "threads": threading.active_count(),
    }


RULES: tuple[Callable[[Subject], str], ...] = (
    card,
    options,
    panels,
    second_process,
    gymnasium_api,
    information,
    deterministic,
    independent,
    oracle,
    random_below_oracle,
    truncation,
    parser,
    prompts,
    annotation,
    hidden,
    closing_releases,
)


def check(spec: str, options: Mapping[str, Any] | None = None, size: int = 32) -> list[Result]:
    """Apply every rule to an environment, a registered id or ``"package.module:Class"``.

    Raises HarnessError if it cannot be built at all.
    """
    subject = Subject(spec, options or {}, size)
    subject.make().close()
    return [apply(rule, subject) for rule in RULES]


def apply(rule: Callable[[Subject], str], subject: Subject) -> Result:
    """Apply one rule."""
    name = (rule.__doc__ or rule.__name__).strip()
    try:
        return Result(name, True, rule(subject))
    except Broken as broken:
        return Result(name, False, str(broken))
    except Exception as error:  # third-party code may fail in any way; the reader needs to know which rule met it
        text = (str(error).splitlines() or [""])[0]
        return Result(name, False, f"{type(error).__name__}: {text}")


def results_table(spec: str, results: Sequence[Result]) -> Table:
    """The results for the terminal."""
    table = Table("", "rule", "seen", title=f"contract of {spec}", title_justify="left", box=None)
    for result in results:
        mark = Text("✓", "green") if result.passed else Text("✗", "red")
        table.add_row(mark, Text(result.rule), Text(result.detail))
    return table
