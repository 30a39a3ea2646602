"""What an episode teaches, in one short regular language: the scripted analyzer and the words of demonstrations.

A skill is one of two sentences::

    Find mug 1 in cabinet 2, clean it with sinkbasin 1, then put it in desk 1.
    Not in desk 1, shelf 2: look in cabinet 1 or drawer 1 next.

The first says where the object was at the start and in which order the sub-goals come; the second, for an episode that
never saw the object, where it was not and where it is most likely to be. Both use only what the agent saw.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from envs_text.alfworld import house
from envs_text.alfworld.generator import SENTENCES

MAX_MISSES = 6
"""How many fruitless places a skill names (it stays within 25 words)."""

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heat", "microwave"),
    "pick_cool_then_place_in_recep": ("cool", "fridge"),
}
"""Task type -> (verb, receptacle type that does it)."""

_HABITS = {thing.lower(): {p.lower(): w for p, w in places.items()} for thing, places in house.PLACES.items()}
_WORDINGS = [
    (kind, re.compile(re.escape(wording + ".").replace(r"\{obj\}", r"(\w+)").replace(r"\{place\}", r"(\w+)")))
    for kind, wordings in SENTENCES.items()
    for wording in wordings
]
_INTRO = re.compile(r"you see (.*?)\.\n\nYour task is to: ", re.DOTALL)
_CONTENT = re.compile(r"(?:On the (\w+ \d+), you see|The (\w+ \d+) is open\. In it, you see) (.*?)\.", re.DOTALL)
_NAMES = re.compile(r"\ba (\w+ \d+)")
_TAKE = re.compile(r"take (\w+ \d+) from (\w+ \d+)")
_PUT = re.compile(r"(?:move|put) (\w+ \d+) (?:to|in/on) (\w+ \d+)")
_TREAT = re.compile(r"(clean|heat|cool) (\w+ \d+) with (\w+ \d+)")


@dataclass(frozen=True)
class Wish:
    """A task sentence taken apart: ``place`` is the type of the target receptacle, or of the lamp."""

    kind: str
    obj: str
    place: str

    @property
    def count(self) -> int:
        """How many objects have to be brought."""
        return 2 if self.kind == "pick_two_obj_and_place" else 1


def read_task(sentence: str) -> Wish:
    """Take an official task sentence apart. Raises ValueError for any other sentence."""
    for kind, wording in _WORDINGS:
        if match := wording.fullmatch(sentence):
            return Wish(kind, match[1], match[2])
    raise ValueError(f"not an ALFWorld task: {sentence!r}")


@dataclass
class Trail:
    """What an agent knows from the texts it saw and the commands that worked."""

    receptacles: list[str] = field(default_factory=list)
    """All receptacles of the room, as the introduction lists them."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where each object was first seen, in the order of discovery."""
    inspected: list[str] = field(default_factory=list)
    """Receptacles whose content was seen, in order."""
    taken: list[str] = field(default_factory=list)
    put: list[tuple[str, str]] = field(default_factory=list)
    """(object, receptacle) of every object put down, in order."""
    treated: dict[str, str] = field(default_factory=dict)
    """Object -> the receptacle that last cleaned, heated or cooled it."""
    lamp: str = ""
    """The lamp used last."""
    held: str = ""
    here: str = ""
    """The receptacle gone to last."""

    def see(self, text: str) -> None:
        """Take in an observation."""
        if intro := _INTRO.search(text):
            self.receptacles = _NAMES.findall(intro[1])
        for surface, inside, content in _CONTENT.findall(text):
            place = surface or inside
            if place not in self.inspected:
                self.inspected.append(place)
            for thing in _NAMES.findall(content):
                self.origin.setdefault(thing, place)

    def do(self, command: str, feedback: str | None) -> None:
        """Take in a command; ``feedback`` is None for the one that ended the episode in success."""
        if feedback is not None and not feedback.startswith("You "):
            return
        command = command.strip()
        if match := _TAKE.fullmatch(command):
            self.held = match[1]
            self.taken.append(match[1])
            self.origin.setdefault(match[1], match[2])
        elif match := _PUT.fullmatch(command):
            self.held = ""
            self.put.append((match[1], match[2]))
        elif match := _TREAT.fullmatch(command):
            self.treated[match[2]] = match[3]
        elif command.startswith("go to "):
            self.here = command.removeprefix("go to ")
        elif command.startswith("use "):
            self.lamp = command.removeprefix("use ")
            self.origin.setdefault(self.lamp, self.here)  # it may stand on a neighbour that was never looked at


def follow(observations: Sequence[str], actions: Sequence[str], success: bool) -> Trail:
    """The trail of an episode: observation i was seen before action i; the text after the last action is unknown."""
    trail = Trail()
    for i, (text, action) in enumerate(zip(observations, actions, strict=True)):
        trail.see(text)
        if i + 1 < len(actions):
            trail.do(action, observations[i + 1])
        elif success:
            trail.do(action, None)
    return trail


def describe(trail: Trail, wish: Wish, success: bool) -> tuple[str, str]:
    """Summary and skill of the episode that left this trail."""
    finds = _finds(trail, wish)
    if success:
        return f"Solved: brought {finds[0]} from {trail.origin[finds[0]]}.", _workflow(trail, wish, finds)
    if finds:
        return f"Failed: found {finds[-1]} but did not finish.", _workflow(trail, wish, finds)
    misses = ", ".join(trail.inspected[:MAX_MISSES])
    look = f"ook in {_likely(trail, wish.obj)}"
    return f"Failed: found no {wish.obj}.", f"Not in {misses}: l{look} next." if misses else f"L{look} first."


def _workflow(trail: Trail, wish: Wish, finds: Sequence[str]) -> str:
    """From where to where the objects have to go, and what has to be done on the way."""
    skill = "Find " + " and ".join(f"{thing} in {trail.origin[thing]}" for thing in finds)
    if wish.kind == "look_at_obj_in_light":
        lamp = trail.lamp or next(_of_type(trail.origin, wish.place), "")
        if not lamp:
            return f"{skill}, then find a {wish.place} in {_likely(trail, wish.place)}."
        return f"{skill}, then use {lamp} at {trail.origin[lamp]}."
    if wish.count > len(finds):
        skill += f" and another in {_likely(trail, wish.obj)}"
    if wish.kind in TREATMENTS:
        verb, tool = TREATMENTS[wish.kind]
        skill += f", {verb} it with {_first([trail.treated.get(finds[0], ''), *trail.receptacles[::-1]], tool)}"
    put = [place for thing, place in reversed(trail.put) if thing in finds]
    target = _first([*put, *trail.receptacles[::-1]], wish.place)
    return f"{skill}, then put {'both' if wish.count > 1 else 'it'} in {target}."


def _finds(trail: Trail, wish: Wish) -> list[str]:
    """The wished objects the agent knows of, in the order to fetch them, at most as many as wished.

    Objects put down last come before objects that were only taken, and these before objects that were only seen.
    """
    known = [*(thing for thing, _ in reversed(trail.put)), *reversed(trail.taken), *trail.origin]
    return list(reversed(list(dict.fromkeys(_of_type(known, wish.obj)))[: wish.count]))


def _likely(trail: Trail, thing: str) -> str:
    """The two places, not seen into yet, where a thing of this type is most often found."""
    habits = _HABITS.get(thing, {})
    left = [place.split() for place in trail.receptacles if place not in trail.inspected]
    ranked = sorted(left, key=lambda place: (-habits.get(place[0], 0), place[0], int(place[1])))
    return " or ".join(" ".join(place) for place in ranked[:2]) or "every place again"


def _of_type(names: Iterable[str], kind: str) -> Iterator[str]:
    return (name for name in names if name.startswith(f"{kind} "))


def _first(names: Iterable[str], kind: str) -> str:
    return next(_of_type(names, kind), f"{kind} 1")


def thought(trail: Trail, wish: Wish, action: str) -> str:
    """The sub-goal an action serves, in one word: find, take, clean, heat, cool, use or place."""
    if not trail.held:
        return "take" if action.startswith("take ") else "find"
    if wish.kind == "look_at_obj_in_light":
        return "use"
    verb, tool = TREATMENTS.get(wish.kind, ("place", ""))
    return "place" if trail.treated.get(trail.held, "").startswith(tool) else verb
