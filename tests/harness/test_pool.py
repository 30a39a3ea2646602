"""The environment pool: trouble costs the episode that causes it, nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import pytest
from toy_envs import DOORS, Doors, troubled

from harness.contracts import HarnessError, Task
from harness.pool import EnvPool, State, _observe
from harness.registry import make_env

ENV = "toy_envs:Doors"
TASKS = Doors().panel("train", 6).tasks
PLAY = [dict.fromkeys(range(6), action) for action in ("wait", *DOORS)]


def play(pool: EnvPool, tasks: Sequence[Task]) -> dict[int, list[State]]:
    """Everything that happens when all doors are opened in order; slots leave when they are over or in error."""
    states = {slot: [state] for slot, state in pool.reset(dict(enumerate(tasks))).items()}
    for actions in PLAY:
        running = {slot: actions[slot] for slot, seen in states.items() if not _over(seen[-1])}
        for slot, state in pool.step(running).items():
            states[slot].append(state)
            if _over(state):
                pool.release(slot)
    return states


def _over(state: State) -> bool:
    return state.terminated or state.truncated or bool(state.error)


def comparable(states: Mapping[int, list[State]], without: Sequence[int] = ()) -> dict[int, list[object]]:
    """States in a form that == can compare."""
    return {
        slot: [
            (s.observation["text"], [i.tobytes() for i in s.observation["images"]], s.reward, s.success, s.error)
            for s in seen
        ]
        for slot, seen in states.items()
        if slot not in without
    }


@pytest.fixture(scope="module")
def calm() -> dict[int, list[object]]:
    """What happens without trouble, in one worker."""
    with EnvPool(ENV) as pool:
        states = play(pool, TASKS)
    assert {len(seen) for seen in states.values()} == {3, 4, 5}  # a wait, then one to three doors
    return comparable(states)


@pytest.mark.parametrize(
    ("workers", "trouble", "at", "said"),
    [
        (2, {2: "raise"}, 2, "RuntimeError: this door is stuck"),
        (2, {2: "die"}, 2, "exit code 3"),
        (1, {2: "die"}, 0, "exit code 3"),
        (1, {0: "die", 2: "die", 4: "die"}, 1, "died"),
        (2, {3: "nan"}, 1, "ValueError: the environment's reward is nan"),
    ],
    ids=["raise", "die", "die in reset", "three die at once", "nan"],
)
def test_trouble_costs_its_own_episode_only(
    calm: dict[int, list[object]], workers: int, trouble: dict[int, str], at: int, said: str
) -> None:
    tasks = [troubled(task, trouble[i], at) if i in trouble else task for i, task in enumerate(TASKS)]
    with EnvPool(ENV, workers=workers) as pool:
        states = play(pool, tasks)
        assert comparable(play(pool, TASKS)) == calm  # and the pool goes on as if nothing had happened
    assert comparable(states, without=list(trouble)) == {s: seen for s, seen in calm.items() if s not in trouble}
    for slot in trouble:
        assert len(states[slot]) == at + 1
        assert said in states[slot][-1].error
        assert "\n" not in states[slot][-1].error


@pytest.mark.parametrize(
    ("trouble", "error", "where"),
    [
        ("raise", "RuntimeError: this door is stuck (", "in _trouble\n    raise RuntimeError"),
        ("crash", "environment worker died (signal SIGSEGV)", "in _trouble\n"),
        ("hang", "environment worker hung for 2.5 s", "in _trouble\n"),
    ],
)
def test_where_an_environment_was_when_it_failed(trouble: str, error: str, where: str) -> None:
    with EnvPool(ENV, timeout=2.5) as pool:
        pool.reset({0: TASKS[0], 1: troubled(TASKS[1], trouble, 1)})
        states = pool.step({0: "wait", 1: "wait"})
    assert not states[0].error
    assert states[1].error.startswith(error)
    assert where in states[1].traceback


def test_a_worker_that_grows_is_replaced_and_costs_nothing(
    calm: dict[int, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [troubled(task, "leak", 1) if i == 1 else task for i, task in enumerate(TASKS)]
    with EnvPool(ENV, memory=40 << 20) as pool:
        pool.reset(dict(enumerate(TASKS)))  # from here on its size counts
        first = pool._workers[0].process.pid
        assert comparable(play(pool, tasks)) == calm
        assert pool._workers[0].process.pid != first
        assert pool.recycled >= 1
    assert "environment worker replaced: it had grown by 0.1 GiB" in caplog.text


def test_closing_does_not_wait_for_environments_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.pool.PATIENCE", 0.5)
    pool = EnvPool("toy_envs:Stubborn", workers=2)
    pool.reset(dict(enumerate(TASKS[:2])))
    processes = [worker.process for worker in pool._workers]
    clock = time.monotonic()
    pool.close()
    assert time.monotonic() - clock < 5
    assert not any(process.is_alive() for process in processes)


def test_a_hanging_step_ends_at_the_timeout(calm: dict[int, list[object]]) -> None:
    tasks = [troubled(task, "hang", 1) if i == 1 else task for i, task in enumerate(TASKS)]
    with EnvPool(ENV, timeout=2.5) as pool:
        states = play(pool, tasks)
    assert comparable(states, without=[1]) == {slot: seen for slot, seen in calm.items() if slot != 1}
    assert "hung" in states[1][-1].error


def test_a_worker_that_dies_between_steps_costs_nothing(calm: dict[int, list[object]]) -> None:
    with EnvPool(ENV) as pool:
        pool.reset(dict(enumerate(TASKS)))
        first = pool.step(PLAY[0])
        pool._workers[0].process.kill()
        pool._workers[0].process.join()
        pool.forget_images()
        second = pool.step(PLAY[1])
    assert comparable({slot: [first[slot], second[slot]] for slot in first}) == {s: v[1:3] for s, v in calm.items()}


def test_workers_end_with_the_pool() -> None:
    with EnvPool(ENV, workers=2) as pool:
        play(pool, TASKS)
        processes = [worker.process for worker in pool._workers]
        pids = [process.pid for process in processes]
        assert all(process.is_alive() for process in processes)
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(process.is_alive() for process in processes)


def test_instances_do_not_grow_with_episodes() -> None:
    with EnvPool("toy_envs:Census", workers=2) as pool:
        counts = set()
        for _ in range(5):
            for state in pool.reset(dict(enumerate(TASKS[:4]))).values():
                counts.add(int(state.observation["text"].split()[1]))
            for slot in range(4):
                pool.release(slot)
        assert max(counts) == 2
        assert not pool._log


def test_an_unknown_option_is_named_in_one_line() -> None:
    with EnvPool(ENV, {"max_step": 3}) as pool:
        state = pool.reset({0: TASKS[0]})[0]
    assert "did you mean 'max_steps'" in state.error
    with pytest.raises(HarnessError, match="cannot load"):
        make_env("toy_envs:Windows")


@pytest.mark.parametrize("field", ["reward", "score"])
def test_numbers_that_are_not_finite_are_errors(field: str) -> None:
    numbers = {"reward": 0.0, "score": 0.0, field: float("nan")}
    info = {"valid": True, "success": False, "score": numbers["score"], "admissible": ()}
    result = ({"text": "", "images": ()}, numbers["reward"], False, False, info)
    with pytest.raises(ValueError, match=f"the environment's {field} is nan"):
        _observe(Doors(), result, want_expert=False)
