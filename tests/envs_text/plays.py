"""What tests of text environments share: playing action by action, panels in other processes."""

import os
import random
import subprocess
import sys

from harness.contracts import Episode, Response, Step, StopReason, Turn, View


def play(env, task, choose):
    """An episode in which ``choose(env, view)`` names the actions; the prompts are compact."""
    observation, info = env.reset(options={"task": task})
    episode = Episode(task, 0, env.task_text(observation))
    turns, over = [], False
    while not over:
        history = tuple(turns[-env.card.history :])
        view = View(episode.task_text, len(turns) + 1, history, observation["text"], (), info["admissible"])
        action = choose(env, view)
        response = Response(env.respond(action, env.thought(action)))
        after, reward, terminated, truncated, info = env.step(action)
        episode.steps.append(Step(observation, env.prompt(view, "compact"), response, action, info["valid"], reward))
        turns.append(Turn(view.step, observation["text"], action))
        observation, over = after, terminated or truncated
        assert not (terminated and truncated)
    ended = StopReason.SUCCESS if info["success"] else StopReason.FAILURE
    episode.stop_reason = ended if terminated else StopReason.MAX_STEPS
    episode.score = info["score"]
    return episode


def oracle(env, view):
    return env.oracle()


def wander(seed, skill=0.0):
    """Random choices; with probability ``skill`` the oracle's action instead."""
    rng = random.Random(seed)
    return lambda env, view: env.oracle() if rng.random() < skill else rng.choice(env.choices(view))


def outputs_by_hash_seed(code):
    """The different outputs of a program in two processes with different PYTHONHASHSEEDs."""
    return {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
