"""EZPoints' rules as pure functions: cards, formula, rewards (PAPER 4.5), the shortest way to win."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

TARGET = 12
ACTIONS = (*map(str, range(1, 11)), "+", "*", "=")
LONGEST = 6
"""A formula of this many entries takes no further action, "=" included."""
REWARD = 10.0
RANKS = {2: "2", 3: "3", 4: "4", 5: "5", 6: "6", 7: "7", 8: "8", 9: "9", 10: "T", 11: "J", 12: "Q", 13: "K"}
SUITS = "SHDC"


@dataclass(frozen=True)
class Card:
    """A playing card: rank 2..13 (11, 12 and 13 are the faces) and suit, one of "SHDC"."""

    rank: int
    suit: str

    @property
    def value(self) -> int:
        """Faces count ten."""
        return min(self.rank, 10)

    def __str__(self) -> str:
        return RANKS[self.rank] + self.suit


def parse_cards(text: str) -> tuple[Card, Card]:
    """Read ``"TS 2H"``."""
    ranks = {letter: rank for rank, letter in RANKS.items()}
    first, second = (Card(ranks[word[0]], word[1]) for word in text.split())
    return first, second


@dataclass(frozen=True)
class State:
    """Values of the two cards and the formula so far, entry by entry."""

    cards: tuple[int, int]
    formula: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the formula, in its order."""
        return tuple(int(entry) for entry in self.formula if entry.isdigit())


@dataclass(frozen=True)
class Outcome:
    """What one action led to. ``stuck``: the formula was full, the action did nothing."""

    state: State
    reward: float = 0.0
    done: bool = False
    won: bool = False
    stuck: bool = False


def step(state: State, action: str) -> Outcome:
    """One action. Numbers that are not (or no longer) on the cards, and anything that is no action, do nothing.

    "=" ends the game: 10 if the formula makes 12 out of both cards, else 0.
    """
    if action not in ACTIONS:
        return Outcome(state)
    if len(state.formula) >= LONGEST:
        return Outcome(state, stuck=True)
    if action == "=":
        won = sorted(state.used) == sorted(state.cards) and evaluate(state.formula) == TARGET
        return Outcome(state, REWARD if won else 0.0, done=True, won=won)
    if action.isdigit() and not (Counter(state.cards) - Counter(state.used))[int(action)]:
        return Outcome(state)
    return Outcome(replace(state, formula=(*state.formula, action)))


def evaluate(formula: tuple[str, ...]) -> int | None:
    """Value of a formula as Python reads it (leading + is a sign, ** a power, 1 2 is 12); None where it cannot be read.

    A formula holds nothing but numbers, + and *, so ``eval`` is plain arithmetic.
    """
    try:
        return int(eval("".join(formula), {"__builtins__": {}}))
    except SyntaxError:
        return None


@lru_cache(maxsize=4096)
def solve(state: State) -> tuple[str, ...] | None:
    """The shortest actions that win, numbers in the order of the cards first; None where the game is lost."""
    choices = (*map(str, state.cards), "*", "+")
    queue: deque[tuple[State, tuple[str, ...]]] = deque([(state, ())])
    while queue:
        here, path = queue.popleft()
        if step(here, "=").won:
            return (*path, "=")
        for action in choices:
            after = step(here, action).state
            if after != here and len(after.formula) < LONGEST:
                queue.append((after, (*path, action)))
    return None


def draw_ranks(rng: np.random.Generator) -> tuple[int, int]:
    """The ranks of two cards, as the official generator draws them.

    The first is uniform over 2..13; the value of the second makes 12 with it by a product (half of the time, where one
    exists) or by a sum, and a ten may be a face; then the two change places half of the time.
    """
    rank = int(rng.integers(2, 14))
    value = min(rank, 10)
    partners = [TARGET - value]
    if TARGET % value == 0:
        partners.append(TARGET // value)
    other = partners[rng.integers(len(partners))]
    if other == 10:
        other = int(rng.integers(10, 14))
    return (rank, other) if rng.random() < 0.5 else (other, rank)


def draw_suits(rng: np.random.Generator, ranks: tuple[int, int]) -> tuple[Card, Card]:
    """Two different cards of the given ranks."""
    while True:
        first, second = (Card(rank, SUITS[rng.integers(4)]) for rank in ranks)
        if first != second:
            return first, second
