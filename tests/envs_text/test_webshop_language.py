"""WebShop-v1 in words: parser, prompts, requests, skills."""

import random
import re
from dataclasses import replace

import pytest
from plays import oracle, play, wander
from webshop_visits import goal_of, script, view_of, visit

from envs_text.webshop import WebShop, prompts
from envs_text.webshop.engine import SEPARATOR
from envs_text.webshop.hindsight import read_request, searches
from harness.contracts import Episode, Response, Step, StopReason, Turn, View
from harness.parsers import parse_tags
from harness.skills import insert_skill


@pytest.fixture(scope="module")
def env():
    return WebShop()


# ---------------------------------------------------------------------------------------------- parser and prompts


def test_parser_agrees_with_the_official_one(golden):
    for case in golden("action_parsers")["webshop"]:
        expected = case["expected"]
        assert WebShop().parse(case["input"]) == (expected["action"], bool(expected["valid"])), case["id"]
        relaxed = parse_tags(case["input"], 20, require_think=False)
        assert relaxed == (expected["action"], bool(expected["valid_without_think_rule"])), case["id"]


def view_at(step, history):
    """The view of a made-up episode at a step: observation i is "seen i", action i is "done i"."""
    first = max(1, step - history)
    turns = tuple(Turn(i, f"seen {i}", f"done {i}") for i in range(first, step)) if history else ()
    return View("buy a red lamp", step, turns, f"seen {step}", (), (f"click[offer {step}]", "click[buy now]"))


def test_paper_prompt_has_the_official_structure(env, golden):
    for case in golden("prompts_structure")["cases"]:
        if case["environment"] != "webshop":
            continue
        for expected in case["steps"]:
            step = expected["step"]
            text = env.prompt(view_at(step, case["history_length"]), "paper").text
            markers = {
                "role": prompts.ROLE,
                "task": prompts.TASK,
                "steps_taken": f"You have taken {expected['stated_steps_taken']} step",
                "history": f"The last {expected['stated_history_length']}, oldest first",
                "current_step_number": f"now at step {expected['stated_current_step']}",
                "current_observation": f"observe: seen {step}"
                if step > 1 and expected["history_item_numbers"]
                else "seen",
                "admissible_actions": f"'click[offer {step}]'\n'click[buy now]'",
                "turn_sentence": "It is your turn.",
                "think_instruction": prompts.THINK,
                "action_instruction": prompts.ACT,
            }
            found = sorted((name for name in markers if markers[name] in text), key=lambda n: text.index(markers[n]))
            assert found == expected["field_order"], (case["id"], step)
            assert [f"Step {i}: observed 'seen {i}'" in text for i in range(1, step)] == [
                i in expected["history_item_numbers"] for i in range(1, step)
            ]
            assert [f"took 'done {i}'" in text for i in range(1, step)] == [
                i in expected["history_action_indices"] for i in range(1, step)
            ]


def test_pages_tasks_and_actions_are_quoted_as_officially(env, golden):
    structure = golden("prompts_structure")
    for case in structure["webshop_page_format"]:
        assert prompts.without_task(case["raw"], "buy a red lamp") == case["expected"]
    for case in structure["webshop_task"]:
        assert env.task_text({"text": case["raw"], "images": ()}) == case["expected"]
    first, listed, *_ = structure["webshop_admissible"]
    shop = visit(env)
    assert list(shop.admissible) == first["expected"]
    shop.act("search[jacket]")
    assert list(shop.admissible[:2]) == listed["expected"][:2]


def test_a_paper_prompt_that_is_too_long_leaves_its_history_out(env):
    view = view_at(3, 2)
    long = replace(view, history=(Turn(1, "x" * prompts.MOST_CHARACTERS, "done 1"), view.history[1]))
    assert env.prompt(long, "paper") == env.prompt(replace(view, history=()), "paper")


@pytest.mark.parametrize("style", ["paper", "compact"])
def test_skills_stand_behind_the_task(env, style):
    for view in (view_at(1, 2), view_at(4, 2), view_at(4, 0)):
        view = replace(
            view, observation="Instruction: [SEP] buy a red lamp [SEP] Back to Search [SEP] < Prev [SEP] seen"
        )
        text = insert_skill(env.prompt(view, style), "Look twice.").text
        assert f"{prompts.TASK}buy a red lamp\n\n" in text
        assert text.index(prompts.TASK) < text.index("[Look twice.]") < text.index("offer")


def test_compact_prompts_state_the_page_in_brief(env):
    task = next(t for t in env.panel("eval") if len(goal_of(env, t).options) == 2)
    episode = play(env, task, oracle)
    search, results, item, *_ = (step.prompt.text for step in episode.steps)
    request = episode.task_text
    assert search == f"Your task is: {request}\nsearch[<your query>]"
    lines = results.split("\n")
    assert lines[:3] == [f"Your task is: {request}", f"> {episode.steps[0].action}", "page 1 of 5"]
    assert all(re.fullmatch(r"click\[b0\d{8}\] [a-z ]+ \$[\d.]+( to \$[\d.]+)?", line) for line in lines[3:13])
    assert lines[13:] == ["click[back to search]", "click[next >]"]
    named = goal_of(env, task).options
    lines = item.split("\n")
    assert lines[1:3] == [f"> {step.action}" for step in episode.steps[:2]]
    assert lines[3].startswith("item: ")
    for line, (name, value) in zip(lines[4:6], sorted(named.items()), strict=True):
        assert line.startswith(f"{name}: click[")
        assert f" click[{value}]" in line
    assert lines[-1] == "click[buy now]"


def test_compact_prompts_tell_every_action_and_are_plain_ascii(env):
    for number, task in enumerate(env.panel("eval", 30)):
        observation, info = env.reset(options={"task": task})
        rng = random.Random(number)
        for _ in range(12):
            view = view_of(env, observation, info)
            text = env.prompt(view, "compact").text
            assert text.isascii()
            assert all(action in text for action in view.admissible if action != "click[search]")
            observation, *_, info = env.step(rng.choice(env.choices(view)))
            if not info["admissible"]:
                break


def test_analyses_quote_pages_in_brief_and_without_the_request(env):
    episode = play(env, env.panel("eval", 1).tasks[0], oracle)
    search, results, item, *_ = (env.brief(step.observation["text"]) for step in episode.steps)
    assert search == "search"
    assert results.split("\n") == episode.steps[1].prompt.text.split("\n")[2:13]
    assert item.startswith("item: ")
    assert all(value in item.split() for value in goal_of(env, episode.task).options.values())
    assert env.brief("click[< prev]") == "click[< prev]"


def test_phrases_are_distinct_ascii_and_occur(env):
    assert len(set(env.phrases)) == len(env.phrases)
    assert all(phrase and phrase.isascii() for phrase in env.phrases)


def test_choices_on_the_search_page_are_searches(env):
    request = "Find me gentle, silky lotion with scent: citrus, and volume: travel, and price lower than 80.00 dollars"
    assert searches(request) == ("gentle", "silky", "lotion", "citrus", "travel", "gentle silky lotion citrus travel")
    view = View(request, 1, (), "", (), ("search[<your query>]", "click[search]"))
    assert env.choices(view)[0] == "search[gentle]"
    assert env.choices(replace(view, admissible=("click[< prev]",))) == ("click[< prev]",)


# ------------------------------------------------------------------------------------------------------- hindsight


def test_requests_are_taken_apart():
    found = read_request(
        "Find me slim fit, machine wash men's dress shirts with long sleeve with color: navy | grey, and size: 16 neck"
        ", and price lower than 60.00 dollars"
    )
    assert found.query == "slim fit machine wash men's dress shirts long sleeve"
    assert found.options == ("navy | grey", "16 neck")
    assert (found.cap, found.cap_text) == (60.0, "60.00 dollars")
    free = read_request("i need a long clip-in hair extension which is natural looking")
    assert (free.query, free.options, free.cap) == ("long clip-in hair extension natural", (), None)


def test_success_teaches_the_workflow(env):
    for task in env.panel("eval", 30):
        episode = play(env, task, oracle)
        summary, skill = env.annotate(episode)
        env.reset(options={"task": task})
        assert skill == env.oracle_skill()
        asin = next(step.action for step in episode.steps if step.action.startswith("click[b0"))[6:-1]
        assert summary == f"Bought {asin}, which fits."
        assert re.fullmatch(rf"Search [a-z ]+, open {asin}(, choose \w+( and \w+)?)?, then buy\.", skill)


def test_a_failure_that_saw_the_product_teaches_it_and_one_that_did_not_teaches_the_search(env):
    task = next(t for t in env.panel("eval") if len(goal_of(env, t).options) == 2)
    env.reset(options={"task": task})
    workflow, query = env.oracle_skill(), env.oracle()
    asin = re.search("open (b0[0-9]+)", workflow)[1]
    request = read_request(env.task_text(env.reset(options={"task": task})[0]))
    hasty = play(env, task, script(query, f"click[{asin}]", "click[buy now]"))
    assert env.annotate(hasty) == (f"Bought {asin}, which does not fit.", workflow)
    blind = play(env, task, script("search[qqq]"))
    assert env.annotate(blind) == ("Bought nothing.", f"Search {request.query} first.")


def test_a_product_that_lacks_an_option_or_is_too_dear_is_not_recommended(env):
    task = next(t for t in env.panel("eval") if goal_of(env, t).options)
    request = goal_of(env, task).instruction
    cap, values = read_request(request).cap, read_request(request).options

    def page(*parts):
        return SEPARATOR.join(("Instruction:", request, "Back to Search", *parts))

    title = f"brand {read_request(request).query}"
    list_page = page(
        "Page 1 (Total results: 3)", "B01", title, f"${cap + 5}", "B02", title, "$1.0", "B03", title, "$2.0"
    )
    item_page = page("< Prev", "color", "plaid", title, "Price: $1.0", "Rating: N.A.")
    item_page += SEPARATOR + SEPARATOR.join(("Description", "Features", "Reviews", "Attributes", "Buy Now"))
    steps = [
        Step({"text": text, "images": ()}, prompts_of(text), Response(""), action, True, 0.0)
        for text, action in ((list_page, "click[b02]"), (item_page, "click[buy now]"))
    ]
    episode = Episode(task, 0, request, steps, StopReason.FAILURE)
    assert ", open b03, choose " + " and ".join(values) in env.annotate(episode)[1]


def prompts_of(text):
    return WebShop(size=50).prompt(View("x", 1, (), text, (), ()), "paper")


def test_skills_name_only_what_the_agent_saw(env):
    for number, task in enumerate(env.panel("eval", 100)):
        episode = play(env, task, wander(number, skill=0.4))
        seen = " ".join(step.observation["text"] + step.action for step in episode.steps).lower()
        summary, skill = env.annotate(episode)
        words = set(re.findall(r"b0\d+", summary + skill)) | set(read_request(skill).words) - {
            *("search", "open", "choose", "then", "first")
        }
        assert all(word in seen for word in words), (skill, words)
        assert len(skill.split()) <= 25


def test_no_annotation_without_steps(env):
    assert env.annotate(Episode(env.panel("eval", 1).tasks[0], 0, "Find me a lamp")) is None


def test_thoughts_follow_the_page(env):
    task = next(t for t in env.panel("eval") if len(goal_of(env, t).options) == 2)
    goal = goal_of(env, task)
    episode = play(env, task, oracle)
    thoughts = [re.search("<think>(.*)</think>", step.response.text)[1] for step in episode.steps]
    assert thoughts[0] == goal.query
    assert thoughts[1] == f"{' '.join(goal.attributes)} under {goal.price_upper:.2f} dollars"
    assert set(thoughts[2:4]) == set(goal.options.values())
    assert thoughts[4:] == ["buy"]
