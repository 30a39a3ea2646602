"""The native engine prints what the official one prints; the experts win; the official data is read as it should be.

With ``HARNESS_FULL=1`` the engines are compared on every reference game in both rule versions (about half an hour).
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from envs_text.alfworld.compare import compare_engines, differences, walk
from envs_text.alfworld.engine import Engine
from envs_text.alfworld.experts import SearchExpert, plan, plan_from
from envs_text.alfworld.games import TASK_KINDS, Game, Rules, check_rules, official_split, read_game
from envs_text.alfworld.generator import generate
from envs_text.alfworld.official import OfficialEngine, official_rules
from envs_text.alfworld.world import shown_names
from harness.contracts import HarnessError

FULL = os.environ.get("HARNESS_FULL") == "1"
RULES: tuple[Rules, ...] = ("2.1.1", "current")

# A room made by hand: two cabinets share a location, a mug lies in one of them and on the counter, all doors are shut.
ROOM = """
(define (problem room) (:domain alfred)
(:objects agent1 - agent loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 loc_bar_5 loc_bar_6 - location
Cabinet_bar_1 Cabinet_bar_2 CounterTop_bar_1 Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin - receptacle
SideTable_bar_1 - receptacle
Apple_bar_1 Apple_bar_2 Knife_bar_1 Mug_bar_1 Spoon_bar_1 DeskLamp_bar_1 - object
CabinetType CounterTopType FridgeType MicrowaveType SinkBasinType SinkType SideTableType - rtype
AppleType KnifeType ButterKnifeType MugType SpoonType DeskLampType - otype)
(:init (atLocation agent1 loc_bar_0)
(receptacleType Cabinet_bar_1 CabinetType) (receptacleAtLocation Cabinet_bar_1 loc_bar_1) (openable Cabinet_bar_1)
(receptacleType Cabinet_bar_2 CabinetType) (receptacleAtLocation Cabinet_bar_2 loc_bar_1) (openable Cabinet_bar_2)
(receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_bar_2)
(receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_3) (openable Fridge_bar_1)
(receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_4)
(openable Microwave_bar_1) (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
(receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_5)
(receptacleType SideTable_bar_1 SideTableType) (receptacleAtLocation SideTable_bar_1 loc_bar_6)
(canContain CabinetType MugType) (canContain CabinetType AppleType) (canContain CounterTopType MugType)
(canContain CounterTopType AppleType) (canContain CounterTopType KnifeType) (canContain SideTableType AppleType)
(canContain SideTableType DeskLampType) (canContain FridgeType AppleType) (canContain FridgeType MugType)
(objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Knife_bar_1 KnifeType)
(objectType Mug_bar_1 MugType) (objectType Spoon_bar_1 SpoonType) (objectType DeskLamp_bar_1 DeskLampType)
(inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_bar_2)
(inReceptacle Apple_bar_2 Fridge_bar_1) (objectAtLocation Apple_bar_2 loc_bar_3)
(inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_bar_2)
(inReceptacle Mug_bar_1 Cabinet_bar_1) (inReceptacle Mug_bar_1 CounterTop_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
(inReceptacle Spoon_bar_1 Cabinet_bar_1) (objectAtLocation Spoon_bar_1 loc_bar_1)
(inReceptacle DeskLamp_bar_1 SideTable_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_6)
(isReceptacleObject Mug_bar_1) (inReceptacleObject Spoon_bar_1 Mug_bar_1)
(pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Knife_bar_1) (pickupable Mug_bar_1)
(pickupable DeskLamp_bar_1) (toggleable DeskLamp_bar_1) (sliceable Apple_bar_1) (sliceable Apple_bar_2)
(cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (cleanable Apple_bar_2) (heatable Apple_bar_2)
(cleanable Mug_bar_1) (coolable Mug_bar_1) (isCool Apple_bar_2))
(:goal (and GOAL)))
"""
IN = "(exists (?r - receptacle) (exists (?o - object) (and {} (objectType ?o {}Type) (receptacleType ?r {}Type)"
IN += " (inReceptacle ?o ?r))))"
TWO = (
    "(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 AppleType) (receptacleType ?r {}Type)"
    " (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 AppleType)"
    " (inReceptacle ?o2 ?r))))))"
)
LAMP = (
    "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot DeskLampType)"
    " (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
    " (exists (?o - object ?a - agent) (and (objectType ?o {}Type) (holds ?a ?o)))"
)


def room(goal: str, rules: Rules = "current") -> Game:
    return Game("room", ROOM.replace("GOAL", goal), "put a mug in sidetable.", TASK_KINDS[0], {}, rules)


GOALS = {
    "pick": IN.format("", "Apple", "SideTable"),
    "pick, two places": IN.format("", "Mug", "Fridge"),
    "clean": IN.format("(cleanable ?o) (isClean ?o)", "Mug", "Cabinet"),
    "hot": IN.format("(heatable ?o) (isHot ?o)", "Apple", "Fridge"),
    "cool": IN.format("(coolable ?o) (isCool ?o)", "Apple", "CounterTop"),
    "cool, stays in the other place": IN.format("(coolable ?o) (isCool ?o)", "Mug", "CounterTop"),
    "two": TWO.format("Fridge"),
    "lamp": LAMP.format("Apple"),
}

# ------------------------------------------------------------------------------------------------ the rules, in words

TALE = [  # command, feedback under the current rules
    ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
    ("go to nowhere 1", "Nothing happens."),
    ("go to cabinet 2", "You arrive at cabinet 2. The cabinet 2 is closed."),
    ("look", "You are facing the cabinet 2, and cabinet 1. Next to it, you see nothing."),
    ("open cabinet 2", "You open the cabinet 2. The cabinet 2 is open. In it, you see a mug 1, and a spoon 1."),
    ("take spoon 1 from cabinet 2", "Nothing happens."),
    (" take mug 1 from cabinet 2 ", "You pick up the mug 1 from the cabinet 2."),
    ("Inventory", "Nothing happens."),
    ("inventory", "You are carrying: a mug 1."),
    ("examine mug 1", "This is a normal mug 1. In it, you see a spoon 1."),
    ("open cabinet 1", "You open the cabinet 1. The cabinet 1 is open. In it, you see nothing."),
    ("move mug 1 to cabinet 1", "You move the mug 1 to the cabinet 1."),
    ("look", "You are facing the cabinet 2, and cabinet 1. Next to it, you see a mug 1."),
    ("close cabinet 2", "You close the cabinet 2."),
    ("examine cabinet 2", "The cabinet 2 is closed."),
    (
        "go to countertop 1",
        "You arrive at countertop 1. On the countertop 1, you see a apple 2, a knife 1, and a mug 1.",
    ),
    ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
    ("examine knife 1", "There's nothing special about knife 1."),
    ("slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1."),
    ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
    ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
    ("examine apple 2", "This is a sliced apple 2."),
    ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
    ("cool apple 2 with fridge 1", "You cool the apple 2 using the fridge 1."),
    ("examine apple 2", "This is a cool sliced apple 2."),
    ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
    ("clean apple 2 with sinkbasin 1", "You clean the apple 2 using the sinkbasin 1."),
    ("examine apple 2", "This is a cool and clean sliced apple 2."),
    ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
    ("heat apple 2 with microwave 1", "You heat the apple 2 using the microwave 1."),
    ("examine apple 2", "This is a hot and clean sliced apple 2."),
    ("go to sidetable 1", "You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1."),
    ("use desklamp 1", "You turn on the desklamp 1."),
    ("use desklamp 1", "You turn on the desklamp 1."),
    ("move apple 2 to sidetable 1", "You move the apple 2 to the sidetable 1."),
    ("take desklamp 1 from sidetable 1", "You pick up the desklamp 1 from the sidetable 1."),
    ("examine desklamp 1", "This desklamp 1 is on."),
]


MUG_IN_HAND = ["go to cabinet 2", "open cabinet 2", "take mug 1 from cabinet 2", "go to microwave 1"]


def test_the_native_engine_tells_the_tale() -> None:
    engine = Engine(room(IN.format("", "Mug", "SideTable")))
    assert engine.reset() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a countertop 1, a fridge 1, a microwave 1, a sidetable 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a mug in sidetable."
    )
    for command, feedback in TALE:
        assert (command, engine.step(command)) == (command, feedback)


@pytest.mark.parametrize("rules", RULES)
def test_the_official_engine_tells_the_same(rules: Rules) -> None:
    commands = [command for command, _ in TALE] + ["help"]
    if rules == "2.1.1":
        commands = [c.replace("move", "put").replace(" to ", " in/on ") if c[:4] == "move" else c for c in commands]
    assert differences(room(GOALS["clean"], rules), commands) == []


def test_names_count_down_and_basins_are_named_after_what_they_belong_to() -> None:
    ids = {"apple_bar_a", "apple_bar_b", "sink_bar_1_bar_sinkbasin", "sink_bar_1", "agent1"}
    assert shown_names(ids) == {
        "apple_bar_a": "apple 2",
        "apple_bar_b": "apple 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "sink_bar_1": "sink 1",
        "agent1": "agent1 ",
    }


def test_reset_forgets_and_engines_share_nothing() -> None:
    game = room(GOALS["pick"])
    first, second = Engine(game), Engine(game)
    introduction, admissible = first.reset(), first.admissible()
    for command in plan(game):
        assert not first.won
        first.step(command)
    assert first.won
    assert not second.won
    assert second.admissible() == admissible
    assert (first.reset(), first.admissible(), first.won) == (introduction, admissible, False)


# ------------------------------------------------------------------------------------------- against the official one


def reference_games(root: Path) -> list[Game]:
    """One valid_seen game of every kind, or with HARNESS_FULL=1 all games there are, in both rule versions."""
    trials = [trial for split in ("valid_seen", "train") for trial in official_split(root, split)[0]]
    games = [read_game(trial, rules) for trial in trials for rules in RULES]
    if FULL:
        return games
    return [next(g for g in games[20:] if (g.kind, g.rules) == (kind, rules)) for kind in TASK_KINDS for rules in RULES]


@pytest.mark.slow
def test_engines_agree_on_official_games(alfworld_data: Path) -> None:
    for number, game in enumerate(reference_games(alfworld_data)):
        commands = walk(game, steps=24, seed=number)
        assert differences(game, commands) == []
        if FULL:
            print(f"equal: {game.name} ({game.rules}), {len(commands)} commands", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
def test_engines_agree_on_generated_games(rules: Rules) -> None:
    result = compare_engines([generate(3, "train", "medium", rules)], steps=40)
    assert result["moments"] == 41
    assert result["unequal"] == 0
    assert result["step_ratio"] > 100  # measured: thousands


def test_rules_of_distributed_games_are_rebuilt_exactly(alfworld_data: Path) -> None:
    trial = official_split(alfworld_data, "train")[0][0]
    game, data = read_game(trial), json.loads((trial / "game.tw-pddl").read_text())
    domain, grammar = official_rules("2.1.1")
    assert domain == data["pddl_domain"]
    assert grammar.replace("UNKNOWN GOAL.", game.task) == data["grammar"]


def test_the_official_engine_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    official_rules.cache_clear()
    monkeypatch.setitem(sys.modules, "alfworld.info", None)
    with pytest.raises(HarnessError, match=r"pip install 'seed-harness\[alfworld\]'"):
        official_rules("current")


def test_the_official_engine_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    argv = sys.argv
    OfficialEngine(room(GOALS["pick"])).close()
    assert (sys.argv, os.environ.get("ALFWORLD_DATA")) == (argv, None)


def test_the_official_engine_refuses_what_has_no_solution() -> None:
    with pytest.raises(HarnessError, match="cannot load room: it has no solution"):
        OfficialEngine(room(IN.format("", "Knife", "Fridge")))


# ------------------------------------------------------------------------------------------------------- the experts


@pytest.mark.parametrize("opening", [[], ["go to countertop 1", "take knife 1 from countertop 1"], MUG_IN_HAND])
@pytest.mark.parametrize("goal", GOALS.values(), ids=GOALS.keys())
def test_plans_are_shortest(goal: str, opening: list[str]) -> None:
    engine = Engine(room(goal))
    for command in opening:
        engine.step(command)
    commands = plan_from(engine)
    assert len(commands) == shortest(engine)
    for command in commands:
        assert not engine.won
        assert command in engine.admissible()
        engine.step(command)
    assert engine.won
    assert plan_from(engine) == []


def shortest(engine: Engine) -> int:
    """Length of a shortest solution, by trying everything that changes anything."""
    idle = ("look", "inventory", "help", "examine", "close", "slice")
    start = engine.state.copy()
    frontier, seen, depth = [start], set[str](), 0
    while True:
        following = []
        for state in frontier:
            engine.restore(state)
            if engine.won:
                engine.restore(start)
                return depth
            for command in engine.admissible():
                if not command.startswith(idle):
                    engine.restore(state)
                    engine.step(command)
                    if (key := fingerprint(engine)) not in seen:
                        seen.add(key)
                        following.append(engine.state.copy())
        frontier, depth = following, depth + 1


def fingerprint(engine: Engine) -> str:
    state = engine.state
    inside = {r: sorted(objects) for r, objects in state.inside.items() if objects}
    sets = [sorted(part) for part in (state.opened, state.clean, state.hot, state.cool, state.toggled)]
    return repr((state.location, state.held, inside, sets))


def test_plans_start_anywhere() -> None:
    rng = random.Random(0)
    for goal in GOALS.values():
        engine = Engine(room(goal))
        for _ in range(20):
            for _ in range(rng.randrange(25)):
                engine.step(rng.choice(engine.admissible()))
            for command in plan_from(engine):
                assert command in engine.admissible()
                engine.step(command)
            assert engine.won
            engine.reset()


def test_a_game_without_solution_has_no_plan() -> None:
    with pytest.raises(HarnessError, match="no solution"):
        plan(room(IN.format("", "Knife", "Fridge")))


def search(game: Game, limit: int, choose: Callable[[str, Engine], str] = lambda command, _: command) -> bool:
    """Whether the search expert wins within a number of commands; ``choose`` may override its commands."""
    engine = Engine(game)
    expert = SearchExpert(engine.reset())
    for _ in range(limit):
        wish = expert.act(engine.admissible())
        assert wish in engine.admissible()
        command = choose(wish, engine)
        expert.observe(command, engine.step(command))
        if engine.won:
            return True
    return False


def test_experts_win_official_games(alfworld_data: Path) -> None:
    games = [read_game(t) for split in ("valid_seen", "train") for t in official_split(alfworld_data, split)[0]]
    for game in games:
        engine = Engine(game)
        for command in plan(game):
            engine.step(command)
        assert engine.won
    assert sum(search(game, 30) for game in games) >= 0.97 * len(games)


def test_search_recovers_from_other_peoples_commands() -> None:
    rng = random.Random(0)

    def meddle(command: str, engine: Engine) -> str:
        return rng.choice(["dance", rng.choice(engine.admissible())]) if rng.random() < 0.3 else command

    games = [generate(seed, "train", "medium", "current") for seed in range(60)]
    assert all(search(game, 100, meddle) for game in games)


# -------------------------------------------------------------------------------------------------- the official data


def test_official_splits_are_read_like_the_package_reads_them(alfworld_data: Path) -> None:
    trials, notes = official_split(alfworld_data, "valid_seen")
    assert len(trials) == 140
    assert trials == sorted(trials)
    assert notes == (
        "left out: 34 with a movable receptacle",
        "left out: 30 with sliced objects",
        "left out: 47 without a solution",
    )
    assert official_split(alfworld_data, "train")[1] == ("200 playable games; the full train split has 3553",)
    game = read_game(trials[0])
    assert game.name == f"valid_seen/{trials[0].parent.name}/{trials[0].name}"
    assert (game.rules, read_game(trials[0], "current").rules) == ("2.1.1", "current")
    assert game.task.endswith(".")


def test_bad_data_is_named_in_one_line(tmp_path: Path) -> None:
    def message(call: Callable[[], object]) -> str:
        with pytest.raises(HarnessError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "expected a directory json_2.1.1" in message(lambda: official_split(tmp_path, "train"))
    trial = tmp_path / "json_2.1.1" / "valid_seen" / "pick_and_place_simple-Mug-None-Desk-1" / "trial_1"
    trial.mkdir(parents=True)
    assert "did you mean 'valid_seen'?" in message(lambda: official_split(tmp_path, "valid_sen"))
    assert "no playable game" in message(lambda: official_split(tmp_path, "valid_seen"))
    (trial / "traj_data.json").write_text('{"task_type": "pick_and_place_simple", "pddl_params": {}}')
    assert "no playable game (1 left out)" in message(lambda: official_split(tmp_path, "valid_seen"))
    assert "game.tw-pddl: No such file" in message(lambda: read_game(trial))
    (trial / "game.tw-pddl").write_text('{"solvable": tr')
    assert f"{trial / 'game.tw-pddl'} is not valid JSON" in message(lambda: official_split(tmp_path, "valid_seen"))
    (trial / "game.tw-pddl").write_text('{"solvable": true, "pddl_problem": "", "grammar": ""}')
    assert "states no task" in message(lambda: read_game(trial))
    assert "did you mean 'current'?" in message(lambda: check_rules("curent"))
    assert "cannot load ALFWorld game room" in message(lambda: Engine(room("(forall (?o - object) (isClean ?o))")))
