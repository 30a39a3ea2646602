"""Goals, views and visits of WebShop in tests."""

from envs_text.webshop.engine import Visit
from harness.contracts import View


def goal_of(env, task):
    return env._goals[task.spec["number"]]


def view_of(env, observation, info):
    """What an agent sees that remembers nothing."""
    task = env.task_text(observation)
    return View(task, 1, (), observation["text"], (), info["admissible"])


def script(*actions):
    """Play these actions, then wait for the step limit."""
    left = iter(actions)
    return lambda env, view: next(left, "click[nothing]")


def visit(env, number=0):
    """A visit for an eval goal whose product has two options."""
    goals = [g for g in env._goals[:100] if len(g.options) == 2]
    return Visit(goals[number], env._shop.search, env._shop.product)
