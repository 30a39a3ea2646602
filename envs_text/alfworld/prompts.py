"""Step prompts: the full one for pretrained models and the compact one for the embedded tiny policy."""

from __future__ import annotations

from harness.contracts import View

TASK = "Your task is to: "
"""Introduces the task, in the game's own texts too; skills are inserted behind the line that holds it."""

ROLE = "You are a robot that does chores in a household, which you know and change by text commands alone."
THINK = "First think about where you are, what is still missing and what comes next, between <think> and </think>."
ACT = "Then choose one command from the list and write it, exactly as listed, between <action> and </action>."


def task_in(text: str) -> str:
    """The task stated in a text: what follows the first "Your task is to: ", without outer blanks."""
    return text.partition(TASK)[2].strip()


def paper(view: View) -> str:
    """The full prompt, in the field order of the paper's code (section 4.1).

    Without history - in the first step, and with a history window of 0 - it has a layout of its own, in which the task
    is the last line of the observation.
    """
    commands = "\n".join(f"'{command}'" for command in view.admissible)
    closing = f"Commands you can give now: [\n{commands}\n]\n\nIt is your turn. {THINK} {ACT}"
    if not view.history:
        stated = "" if TASK in view.observation else f"\n\n{TASK}{view.task}"
        return f"{ROLE}\nWhat you observe now: {view.observation}{stated}\n{closing}"
    past = "\n".join(f"[Step {t.number}: observed '{t.observation}', gave '{t.action}']" for t in view.history)
    return (
        f"{ROLE} {TASK}{view.task}\n"
        f"You have taken {view.step - 1} step(s). The last {len(view.history)}, oldest first:\n{past}\n"
        f"You are now at step {view.step} and observe: {view.observation}\n"
        f"{closing}"
    )


def compact(view: View) -> str:
    """The same facts for a policy that knows nothing else: task, last turns, current text, commands, one per line."""
    past = "".join(f"\n{_brief(turn.observation)}\n> {turn.action}" for turn in view.history)
    return f"{TASK}{view.task}{past}\n{_brief(view.observation)}\n" + "\n".join(view.admissible)


def _brief(observation: str) -> str:
    """An observation without the welcome and the task, which the prompt states already."""
    return observation.removeprefix("-= Welcome to TextWorld, ALFRED! =-").partition(TASK)[0].strip()


PHRASES: tuple[str, ...] = (
    # frame
    TASK,
    "\n\n" + TASK,
    "\n> ",
    "<think>",
    "</think><action>",
    "</action>",
    # texts of the game
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see",
    "You are in the middle of a room. Looking quickly around you, you see",
    " nothing.",
    ", and a",
    ", a",
    "You arrive at",
    ". On the",
    "On the",
    ". The",
    "The",
    ", you see",
    " is open. In it, you see",
    " is closed.",
    "You open the",
    "You close the",
    "You pick up the",
    "You move the",
    "You put the",
    " from the",
    " to the",
    " in/on the",
    "You heat the",
    "You cool the",
    "You clean the",
    " using the",
    "You turn on the",
    "You sliced the",
    " with the",
    "You are facing the",
    ". Next to it, you see nothing.",
    "You are carrying: a",
    "You are not carrying anything.",
    "There's nothing special about",
    "Nothing happens.",
    # commands, at the start of an answer and of a line of the list
    *(
        f"{start}{verb}"
        for verb in (
            "go to",
            "open",
            "close",
            "take",
            "move",
            "put",
            "clean",
            "heat",
            "cool",
            "slice",
            "examine",
            "inventory",
            "look",
            "use desklamp",
            "use floorlamp",
        )
        for start in ("", "\n")
    ),
    # the words above inside a sentence, so that they are not cut out of it
    *(f" {word}" for word in ("put", "clean", "heat", "cool", "look", "take", "use", "open")),
    # thoughts and skills
    "find",
    "place",
    "Find",
    " in",
    " and",
    " it with",
    ", then put it in",
    ", then put both in",
    ", then use",
    " at",
    ", then find a",
    " and another in",
    "Not in",
    ": look in",
    "Look in",
    " or",
    " next.",
    " first.",
    "Solved: brought",
    "Failed: found",
    "Failed: found no",
    " but did not finish.",
)
"""Fixed pieces that become single tokens of the tiny policy; names of things stay words."""
