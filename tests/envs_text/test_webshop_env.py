import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from gymnasium.utils.env_checker import check_env

from envs_text.webshop import WebShop, generator, prompts
from envs_text.webshop.engine import SEPARATOR, Visit
from envs_text.webshop.hindsight import read_request, searches
from harness.contracts import Episode, HarnessError, Response, Step, StopReason, Turn, View
from harness.parsers import parse_tags
from harness.skills import insert_skill


@pytest.fixture(scope="module")
def env():
    return WebShop()


def goal_of(env, task):
    return env._goals[task.spec["number"]]


def view_of(env, observation, info, turns=()):
    task = env.task_text(observation)
    return View(task, len(turns) + 1, tuple(turns[-2:]), observation["text"], (), info["admissible"])


def play(env, task, choose):
    """Play a task with `choose(env, view) -> action`."""
    observation, info = env.reset(options={"task": task})
    episode, turns = Episode(task, 0, env.task_text(observation)), []
    while True:
        view = view_of(env, observation, info, turns)
        prompt, action = env.prompt(view, "compact"), choose(env, view)
        turns.append(Turn(view.step, observation["text"], action))
        response = Response(env.respond(action, env.thought(action)))
        before = observation
        observation, reward, terminated, truncated, info = env.step(action)
        episode.steps.append(Step(before, prompt, response, action, info["valid"], reward))
        episode.score = info["score"]
        if terminated or truncated:
            ended = StopReason.SUCCESS if info["success"] else StopReason.FAILURE
            episode.stop_reason = ended if terminated else StopReason.MAX_STEPS
            return episode


def oracle(env, view):
    return env.oracle()


def script(*actions):
    """Play these actions, then wait for the step limit."""
    left = iter(actions)
    return lambda env, view: next(left, "click[nothing]")


def wander(seed, skill=0.0):
    """Random choices; with probability `skill` the oracle's action instead."""
    rng = random.Random(seed)
    return lambda env, view: env.oracle() if rng.random() < skill else rng.choice(env.choices(view))


def visit(env, number=0):
    """A visit for an eval goal whose product has two options."""
    goals = [g for g in env._goals[:100] if len(g.options) == 2]
    return Visit(goals[number], env._shop.search, env._shop.product)


# ------------------------------------------------------------------------------------------------------- catalogue


def test_the_catalogue_is_the_same_everywhere_and_has_the_schema():
    catalogue = generator.products(1000)
    assert catalogue == generator.products(1000)
    assert catalogue != generator.products(1000, seed=1)
    assert len({p.asin for p in catalogue}) == 1000
    assert all(len(p.asin) == 10 and p.asin == p.asin.upper() for p in catalogue)
    heads = {(p.query, p.asin[2:6]) for p in catalogue}
    assert len(heads) == 1000  # no head twice within a type
    assert {len(p.options) for p in catalogue} == {0, 1, 2}
    assert any(" to $" in p.price_text for p in catalogue)
    assert any(not p.description for p in catalogue)
    assert all(p.price == float(p.price_text[1:]) for p in catalogue if " to " not in p.price_text)


def test_the_vocabulary_is_small_and_no_word_is_taken_for_another():
    departments = generator.DEPARTMENTS.values()
    options = {value for d in departments for values in d.options.values() for value in values}
    words = {word for d in departments for word in (*d.types, *d.attributes)} | set(generator.BRANDS)
    assert len(words | options) < 200
    assert not [(option, word) for option in options for word in words if option in word]
    assert not set(generator.HEADS) & set(generator.TAILS)


def test_sizes_outside_the_range_get_one_clear_line():
    with pytest.raises(HarnessError, match="50 to 1000 generated products, not 2000"):
        WebShop(size=2000)
    assert len(WebShop(size=50).panel("eval")) >= 20


# ----------------------------------------------------------------------------------------------------------- pages


def test_result_pages_hold_ten_products_and_lead_on_and_back(env):
    shop = visit(env)
    assert shop.act("search[jacket]")
    found = env._shop.search("jacket")
    parts = shop.text.split(SEPARATOR)
    assert parts[:5] == [
        "Instruction:",
        shop.goal.instruction,
        "Back to Search",
        "Page 1 (Total results: 40)",
        "Next >",
    ]
    assert parts[5::3] == found[:10]
    for page in (2, 3, 4):
        assert shop.act("click[next >]")
        assert shop.text.split(SEPARATOR)[3:5] == [f"Page {page} (Total results: 40)", "< Prev"]
        assert [action for action in shop.admissible if "[b0" in action] == [
            f"click[{asin.lower()}]" for asin in found[10 * page - 10 : 10 * page]
        ]
    assert "click[next >]" not in shop.admissible
    assert not shop.act("click[next >]")
    assert shop.act("click[< prev]")
    third = shop.text
    assert shop.act(shop.admissible[3])
    assert shop.page == "item"
    assert shop.act("click[< prev]")
    assert shop.text == third
    assert shop.act("click[back to search]")
    assert shop.text.startswith("WebShop [SEP] Instruction: [SEP] ")


def test_choices_stay_until_the_results(env):
    shop = visit(env)
    shop.act(f"search[{shop.goal.name}]")
    shop.act(f"click[{shop.goal.asin.lower()}]")
    values = list(shop.goal.options.values())
    assert shop.act(f"click[{values[0]}]")
    for page in ("description", "features", "reviews", "attributes"):
        assert shop.act(f"click[{page}]")
        assert shop.admissible == ("click[back to search]", "click[< prev]")
        assert shop.act("click[< prev]")
    assert shop.act(f"click[{values[1]}]")
    assert shop.chosen == dict(shop.goal.options)
    shop.act("click[< prev]")
    assert shop.chosen == {}


def test_sub_pages_show_what_the_original_shows(env):
    shop = visit(env)
    shop.act(f"search[{shop.goal.name}]")
    shop.act(f"click[{shop.goal.asin.lower()}]")
    product = shop.product
    for page, lines in (
        ("description", (product.description or "No description",)),
        ("features", product.bullets),
        ("reviews", product.reviews or ("No reviews",)),
        ("attributes", (*product.attributes, product.category, product.query, product.product_category)),
    ):
        shop.act(f"click[{page}]")
        assert tuple(shop.text.split(SEPARATOR)[4:]) == lines
        shop.act("click[< prev]")


@pytest.mark.parametrize(
    "action", ["", "look", "click[nothing]", "click[buy now]", "search[]", "click[b000000000]", "press[search]"]
)
def test_what_a_page_does_not_offer_changes_nothing(env, action):
    observation, _ = env.reset(options={"task": env.panel("eval", 1).tasks[0]})
    after, reward, terminated, truncated, info = env.step(action)
    assert after == observation
    assert (reward, terminated, truncated, info["valid"], info["score"]) == (0, False, False, False, 0)


def test_as_in_the_original_the_search_button_is_idle_and_a_search_works_everywhere(env):
    shop = visit(env)
    before = shop.text
    assert shop.act("click[search]")
    assert shop.text == before
    shop.act("search[jacket]")
    assert shop.act("SEARCH[Perfume]")
    assert shop.results == env._shop.search("perfume")
    assert shop.act("search[qqq]")
    assert shop.text.endswith("Page 1 (Total results: 0)")


# ----------------------------------------------------------------------------------------------------- environment


def test_gymnasium_accepts_the_environment():
    check_env(WebShop(), skip_render_check=True)


@pytest.mark.parametrize(("goals", "panel"), [("synthetic", "train"), ("synthetic", "eval"), ("human", "eval")])
def test_the_oracle_wins(goals, panel):
    env = WebShop(goals=goals)
    for task in env.panel(panel, 200):
        episode = play(env, task, oracle)
        assert episode.success, task.id
        assert episode.score == 1
        assert [step.reward for step in episode.steps] == [0] * (len(episode.steps) - 1) + [10]
        assert env.parse(episode.steps[0].response.text) == (episode.steps[0].action, True)


def test_where_the_official_reward_cannot_be_won_the_oracle_buys_what_was_asked_for():
    env = WebShop(reward="official")
    task = next(t for t in env.panel("train") if goal_of(env, t).options.get("scent") == "peppermint")
    episode = play(env, task, oracle)
    assert (episode.stop_reason, episode.success) == (StopReason.FAILURE, False)
    assert 0 < episode.score < 1
    assert play(WebShop(), task, oracle).success


def test_the_oracle_recovers_from_detours():
    env = WebShop(max_steps=80)
    for number, task in enumerate(env.panel("eval", 40)):
        rng = random.Random(number)

        def astray(env, view, rng=rng):
            other = rng.choice([choice for choice in env.choices(view) if choice != "click[buy now]"])
            return env.oracle() if rng.random() < 0.6 else other

        assert play(env, task, astray).success


def test_a_wanderer_mostly_fails_and_never_gets_a_reward_for_it(env):
    episodes = [play(env, task, wander(i)) for i, task in enumerate(env.panel("eval"))]
    assert sum(e.success for e in episodes) < 6
    failed = [e for e in episodes if not e.success]
    assert {e.stop_reason for e in failed} == {StopReason.FAILURE, StopReason.MAX_STEPS}
    assert all(e.reward == 0 and e.score < 1 for e in failed)
    assert all(len(e.steps) == 15 and e.score == 0 for e in failed if e.stop_reason is StopReason.MAX_STEPS)
    assert any(0 < e.score < 1 for e in failed)


def test_a_wrong_option_costs_a_part_of_the_score(env):
    task = next(t for t in env.panel("eval") if len(goal_of(env, t).options) == 2)
    goal = goal_of(env, task)
    first = next(iter(goal.options.values()))
    open_it = (f"search[{goal.name}]", f"click[{goal.asin.lower()}]")
    assert play(env, task, script(*open_it, "click[buy now]")).score == pytest.approx(3 / 5)
    bought = play(env, task, script(*open_it, f"click[{first}]", "click[buy now]"))
    assert (bought.stop_reason, bought.score) == (StopReason.FAILURE, pytest.approx(4 / 5))


def test_two_environments_share_no_state():
    one, two = WebShop(), WebShop()
    tasks = one.panel("eval", 2).tasks
    alone = play(one, tasks[0], oracle)
    two.reset(options={"task": tasks[1]})

    def beside(env, view):
        two.step(two.oracle() if view.step < 3 else "click[back to search]")
        return env.oracle()

    together = play(one, tasks[0], beside)
    assert [s.observation for s in together.steps] == [s.observation for s in alone.steps]


def test_panels_do_not_depend_on_the_process():
    code = (
        "from envs_text.webshop import WebShop; e = WebShop(size=200);"
        "print(e.panel('train', 30).hash, e.panel('eval', 30).hash, [t.id for t in e.panel('demo', 3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_panels_are_disjoint_and_nested(goals):
    env = WebShop(goals=goals)
    parts = {name: env.panel(name, 240).tasks for name in env.card.panels}
    prints = [task.fingerprint for tasks in parts.values() for task in tasks]
    assert len(set(prints)) == len(prints)
    requests = [goal_of(env, task).instruction for tasks in parts.values() for task in tasks]
    assert len(set(requests)) == len(requests)
    assert env.panel("eval", 7).tasks == parts["eval"][:7]
    assert len(env.panel("eval")) == 128
    assert {task.kind for task in env.panel("eval")} == set(generator.DEPARTMENTS)


def test_tasks_of_other_data_are_refused(env):
    task = env.panel("eval", 1).tasks[0]
    with pytest.raises(HarnessError, match="is no human goal of WebShop data 'generated-1-1000'"):
        WebShop(goals="human").reset(options={"task": task})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goals": "synthetc"}, "did you mean 'synthetic'"),
        ({"reward": "oficial"}, "did you mean 'official'"),
        ({"max_steps": 0}, "at least 1"),
        ({"data": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_options_get_one_clear_line(options, message):
    with pytest.raises(HarnessError, match=message) as caught:
        WebShop(**options)
    assert "\n" not in str(caught.value)


def test_bad_panels_get_one_clear_line(env):
    with pytest.raises(HarnessError, match="did you mean 'eval'"):
        env.panel("evla")
    for size in (501, 0, -1):
        with pytest.raises(HarnessError, match=f"1 to 500 tasks, not {size}"):
            env.panel("eval", size)


def test_speed_of_random_visits_for_the_record():
    env = WebShop()
    begin = time.process_time()
    steps = 0
    for number, task in enumerate(env.panel("train", 60)):
        rng = random.Random(number)
        observation, info = env.reset(options={"task": task})
        while True:
            choices = env.choices(view_of(env, observation, info))
            observation, _, terminated, truncated, info = env.step(rng.choice(choices))
            steps += 1
            if terminated or truncated:
                break
    print(f"{steps / (time.process_time() - begin):.0f} steps/s")


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
