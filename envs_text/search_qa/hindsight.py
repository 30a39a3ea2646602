"""What an episode teaches, in one regular sentence: the scripted analyzer and the words of demonstrations.

A skill is one of three sentences, whose searches are those of the question's way through the encyclopedia::

    Search Arlo Vensby, then Morhaven, and answer Kestria.
    Search Arlo Vensby, then Morhaven next.
    Search Arlo Vensby first.

They say how far the documents seen lead: to the answer, to the thing to search next, or nowhere yet. For questions in
free words, whose way is not known, a success is told as it was done and a failure teaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envs_text.search_qa.encyclopedia import RELATIONS, read_facts
from envs_text.search_qa.prompts import read_action, read_documents
from envs_text.search_qa.questions import read_question


def follow(question: str, observations: Iterable[str]) -> tuple[str, ...]:
    """The way of a generated question as far as the documents seen lead: subject, next thing, ..., answer."""
    read = read_question(question)
    if read is None:
        return ()
    subject, relations = read
    facts = {title: read_facts(text) for seen in observations for title, text in read_documents(seen)}
    way = [subject]
    for relation in relations:
        if relation not in facts.get(way[-1], {}):
            break
        way.append(facts[way[-1]][relation])
    return tuple(way)


def skill(way: Sequence[str], hops: int) -> str:
    """The sentence for a way that was followed so far; ``hops`` relations lead to the answer."""
    if len(way) > hops:
        return told(way[:-1], way[-1])
    return _searches(way) + (" first." if len(way) == 1 else " next.")


def told(searches: Sequence[str], answer: str) -> str:
    """Searches and answer, as a skill."""
    return f"{_searches(searches)}, and answer {answer}." if searches else f"Answer {answer}."


def _searches(names: Sequence[str]) -> str:
    return f"Search {', then '.join(names)}"


def describe(
    question: str, observations: Sequence[str], actions: Sequence[str], success: bool
) -> tuple[str, str] | None:
    """(summary, skill) of an episode, from what the agent saw; None where nothing can be said."""
    done = [pair for action in actions if (pair := read_action(action))]
    answer = next((text for verb, text in done if verb == "answer"), None)
    read = read_question(question)
    if read is not None:
        way = follow(question, observations)
        if success and answer is not None:  # a lucky guess also ends the way
            way = (*way[: len(read[1])], answer)
            lesson = told(way[:-1], answer)
        else:
            lesson = skill(way, len(read[1]))
    elif success and answer is not None:
        lesson = told(list(dict.fromkeys(text for verb, text in done if verb == "search")), answer)
    else:
        return None
    return summary(answer, success), lesson


def summary(answer: str | None, success: bool) -> str:
    """The outcome in a sentence."""
    if answer is None:
        return "Gave no answer."
    return f"Answered {answer}, which is {'right' if success else 'wrong'}."


def thought(question: str, observations: Iterable[str], action: str) -> str:
    """What a policy needs to work out before an action: whom to look for, or the fact that names the next thing."""
    done = read_action(action)
    if done is None:
        return ""
    verb, text = done
    read = read_question(question)
    way = follow(question, observations)
    if read is not None and text in way[1:]:
        return f"{RELATIONS[read[1][way.index(text) - 1]].brief} {text}"
    return f"{'find' if verb == 'search' else 'guess'} {text}"
