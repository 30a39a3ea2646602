"""The parts of SEED's loop: what the teacher reads, who is analysed, and fine-tuning before RL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy_cells import toy_episodes, toy_policy

from harness.cards import Ledger
from harness.config import AnalysisConfig, Stage1Config, TrainConfig
from harness.contracts import HarnessError, StopReason
from harness.methods import Teacher
from harness.seed import NO_SKILL, analyse, fine_tune, imitation_samples, skill_samples, teacher_texts
from harness.skills import read_skill


def test_what_the_teacher_reads_about_each_episode() -> None:
    episodes, groups = toy_episodes(8), [0, 0, 0, 0, 1, 1, 1, 1]
    skills = [replace(NO_SKILL, text="" if n in (2, 5) else f"skill {n}") for n in range(8)]

    def texts(context: Any, wanted: Any = "all") -> list[str | None]:
        teacher = Teacher(weights="update_start", context=context, episodes=wanted)
        return teacher_texts(teacher, episodes, skills, groups, lambda task: f"about {task.id}", (0, 1))

    own = texts("own_skill")
    assert own == [skill.text or None for skill in skills]
    assert texts("library") == texts("oracle_skill") == [f"about t/{n}" for n in range(8)]
    assert texts("own_skill", "successes") == [text if n % 2 else None for n, text in enumerate(own)]
    assert texts("own_skill", "failures") == [None if n % 2 else text for n, text in enumerate(own)]
    swapped, shuffled = texts("same_task_skill"), texts("other_task_skill")
    assert (
        {swapped[n] for n in (2, 5)} == {shuffled[n] for n in (2, 5)} == {None}
    )  # an unusable skill distils nothing, wherever skills come from
    assert sorted(filter(None, swapped)) == sorted(filter(None, shuffled)) == sorted(filter(None, own))
    for n in set(range(8)) - {2, 5}:
        given, far = skills.index(replace(NO_SKILL, text=swapped[n] or "")), int(str(shuffled[n])[-1])
        assert given != n
        assert groups[given] == groups[n] != groups[far]


def test_fine_tune_teaches_to_write_skills() -> None:
    policy, episodes, ledger = toy_policy(), toy_episodes(8), Ledger()
    answer = '{"episode_summary": "1 steps.", "episode_skill": "Open the left door."}'
    skills = [read_skill(answer, "scripted", -1)] * 7 + [NO_SKILL]
    samples = skill_samples(policy, episodes, skills, 256)
    assert len(samples) == 7
    settings = Stage1Config(epochs=1, batch=4, learning_rate=1e-2)
    first = fine_tune(policy, samples, settings, 0, TrainConfig(token_budget=512), ledger, lambda done, total: None)
    settings = settings.model_copy(update={"epochs": 12})
    last = fine_tune(policy, samples, settings, 0, TrainConfig(token_budget=512), ledger, lambda done, total: None)
    assert last < 0.2 * first
    written = analyse(policy, episodes, AnalysisConfig(max_tokens=16), 1, ledger)
    assert [skill.text for skill in written] == ["Open the left door."] * 8
    assert ledger.analyzer_tokens == 8 * len(policy.answer_ids(answer))
    assert ledger.optimizer_steps == 2 * 13
    assert ledger.trained_tokens == 13 * sum(len(tokens) for _, tokens in samples)


def test_nothing_to_learn_from_is_one_clear_line() -> None:
    with pytest.raises(HarnessError, match="no usable skill"):
        skill_samples(toy_policy(), toy_episodes(2), [NO_SKILL] * 2, 256)
    failures = toy_episodes(3)[::2]
    with pytest.raises(HarnessError, match="solved none of its 2 episodes"):
        imitation_samples(failures, "successes")
    assert len(imitation_samples(failures, "all")) == 2


def test_episodes_without_a_step_or_a_score_are_not_analysed() -> None:
    policy, episodes, ledger = toy_policy(), toy_episodes(3), Ledger()
    episodes[0].steps = []
    episodes[1].stop_reason = StopReason.ENV_ERROR
    skills = analyse(policy, episodes, AnalysisConfig(max_tokens=4), 1, ledger)
    assert skills[:2] == [NO_SKILL] * 2
    assert skills[2].author == "policy"
    assert not skills[2].usable
    assert ledger.analyzer_tokens <= 4
