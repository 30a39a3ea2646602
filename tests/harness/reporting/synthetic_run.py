"""A made-up run's directory: what the reporter reads, without training anything."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.cards import Ledger, ProtocolCard
from harness.config import CellConfig, EnvConfig, TrainConfig
from harness.methods import GatedNLL, Method, ReverseKL, Teacher
from harness.records import PICTURES, save_picture
from harness.store import CellDir

ENVS = {"ALFWorld-v1": ("pick", "look", "clean", "heat"), "EZPoints-v1": ("points",), "Sokoban-v1": ("1 box",)}
METHODS = {
    "grpo": Method(name="grpo", summary="group-relative policy optimisation"),
    "opd-teacher": Method(
        name="opd-teacher",
        summary="distillation",
        advantage=None,
        teacher=Teacher(weights="external", context="plain"),
        signal=ReverseKL(),
    ),
    "seed": Method(
        name="seed",
        summary="hindsight skills",
        start="hindsight_sft",
        teacher=Teacher(weights="update_start", context="own_skill"),
        signal=GatedNLL(),
    ),
}
RATES = {"grpo": (0.15, 0.7), "opd-teacher": (0.15, 0.85), "seed": (0.17, 0.75)}
BASELINES = {"random": 0.03, "tiny": 0.15, "oracle": 1.0}


def card(env: str) -> ProtocolCard:
    return ProtocolCard(
        env=env,
        panel="eval",
        panel_hash="0123456789abcdef",
        episodes_per_task=1,
        history=2,
        max_steps=15,
        truncation="oldest history first, beyond 512 tokens",
        temperature=0.4,
        checkpoint="last",
        parser="tags-1",
        decoding="free, at most 24 tokens",
        invalid_action="does nothing & costs 0.1",
        reward="10 for success",
        success="the goal holds",
        prompt_hash="feedbeef0123",
        engine="native-1",
        data="generated-1",
    )


def write_run(
    directory: Path,
    envs: tuple[str, ...] = tuple(ENVS),
    methods: tuple[str, ...] = tuple(METHODS),
    seeds: tuple[int, ...] = (0, 1),
    tasks: int = 48,
    updates: int = 40,
    skill: str = "Look into closed receptacles first; the lamp is where you put things down.",
) -> Path:
    """3 environments x 3 methods x 2 seeds and baselines, by default."""
    (directory / "cells").mkdir(parents=True)
    (directory / "recipe.yaml").write_text("name: synthetic\n")
    for env in envs:
        for seed in seeds:
            for policy, rate in BASELINES.items():
                config = CellConfig(env=EnvConfig(id=env), policy=policy, seed=seed)
                write_cell(directory, config, {0: rate}, tasks)
            for name in methods:
                config = CellConfig(
                    env=EnvConfig(id=env), method=METHODS[name], seed=seed, train=TrainConfig(updates=updates)
                )
                start, end = RATES[name]
                wobble = np.random.default_rng([seed, len(name), len(env)]).normal(0, 0.04)
                speed = {"seed": 12, "grpo": 16, "opd-teacher": 8}[name] * (2 if env.startswith("ALF") else 1)
                end += wobble
                curve = {u: end + (start - end) * np.exp(-u / speed) for u in range(0, updates + 1, 5)}
                write_cell(directory, config, curve, tasks, skill)
    return directory


def write_cell(
    directory: Path,
    config: CellConfig,
    rates: dict[int, float],
    tasks: int = 48,
    skill: str = "",
    protocol: ProtocolCard | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """One finished cell whose success follows ``rates``; every task has a fixed difficulty."""
    path = directory / "cells" / config.hash
    path.mkdir(parents=True)
    protocol = protocol or card(config.env.id)
    if config.policy in ("random", "oracle"):
        protocol = replace(protocol, prompt_hash="another", temperature=protocol.temperature)
    (path / "config.json").write_text(config.model_dump_json())
    kinds = ENVS.get(config.env.id, ("kind",))
    hard = np.random.default_rng(len(config.env.id)).normal(0, 0.15, tasks)
    rng = np.random.default_rng([config.seed, len(config.title), len(rates)])
    trained = config.method is not None
    evals, metrics = [], []
    contexts = config.method.evaluation if config.method else ("plain",)
    for update, rate in rates.items():
        spent = (ledger(update, config.method) if trained else Ledger()).as_dict()
        for context in contexts:
            chance = np.clip(rate + hard * (0 < rate < 1) + 0.1 * (context == "library"), 0, 1)
            results = [
                {
                    "task": f"eval/{t:06d}",
                    "kind": kinds[t % len(kinds)],
                    "attempt": 0,
                    "success": bool(won),
                    "score": float(won) or 0.25,
                    "reward": 10.0 * won,
                    "steps": int(rng.integers(4, 15)),
                    "stop_reason": "success" if won else "max_steps",
                }
                for t, won in enumerate(rng.random(tasks) < chance)
            ]
            record = {"update": update, "skills": context, "ledger": spent, "protocol": asdict(protocol)}
            evals.append({**record, "results": results})
    for update in range(1, max(rates) + 1):
        noise = rng.normal(0, 0.03, 8)
        record = {
            "update": update,
            "success": float(np.interp(update, list(rates), list(rates.values())) + noise[0]),
            "episode_steps": 12 - 5 * update / 40 + 10 * noise[1],
            "valid_rate": min(1.0, 0.97 + noise[2]),
            "entropy": 1.2 * np.exp(-update / 30) + noise[3],
            "grad_norm": 0.8 + 3 * noise[4],
            "clip_fraction": 0.02 + abs(noise[5]) / 3,
            "loss/kl": 0.001 * update,
            "stop_reasons": {"success": 60, "max_steps": 68},
            "ledger": ledger(update, config.method).as_dict(),
        }
        if config.method and config.method.signal:
            record["loss/distill"] = -0.02 + noise[6] / 5
        if config.method and config.method.writes_skills:
            record |= {"skill/parse_rate": 0.9, "skill/gate": 0.47 + noise[7], "skill/gap": -0.3 + noise[6]}
        metrics.append(record)
    write_lines(path / "evals.jsonl", evals)
    write_lines(path / "metrics.jsonl", metrics)
    picture = save_picture(np.full((4, 4, 3), 200, np.uint8), path / PICTURES)
    last = [record for record in evals if record["update"] == evals[-1]["update"]]
    episodes = [episode("eval", record, outcome, skill, picture) for record in last for outcome in record["results"]]
    if config.method and config.method.writes_skills:
        write_lines(path / "skills.jsonl", [skill_record(u, won, skill) for u in (1, 20, 40) for won in (True, False)])
        played = [(u, attempt) for u in (1, 20, 40) for attempt in range(2)]
        episodes += [
            episode("train", {"update": u, "skills": "plain"}, trained_outcome(attempt), skill, picture)
            for u, attempt in played
        ]
        write_lines(path / "credit.jsonl", [row for u, attempt in played for row in credit(u, attempt, skill)])
    write_lines(path / "episodes.jsonl", episodes)
    total = ledger(max(rates), config.method) if trained else Ledger()
    CellDir(path).finish(described(protocol, total) | (manifest or {}))
    write_manifest(path, protocol, total, manifest or {})  # without checksums: tests change what they read
    return path


def write_manifest(path: Path, protocol: ProtocolCard, total: Ledger, extra: dict[str, Any]) -> None:
    (path / "manifest.json").write_text(json.dumps(described(protocol, total) | extra))


def described(protocol: ProtocolCard, total: Ledger) -> dict[str, Any]:
    """The manifest of a finished cell."""
    panel = {"name": protocol.panel, "hash": protocol.panel_hash, "tasks": 48, "notes": []}
    return {
        "status": "complete",
        "harness": "0.1.0",
        "git": "a" * 40,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"cpu": "made up", "cores": 2},
        "panel": panel,
        "train_panel": None,
        "protocol": asdict(protocol),
        "ledger": total.as_dict(),
        "policy": {"spec": "tiny", "fingerprint": "", "parameters": 400_000},
        "warnings": [],
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:10:00+00:00",
    }


def ledger(update: int, method: Method | None) -> Ledger:
    """What training spent after so many updates; a hindsight-SFT start costs 256 episodes first."""
    skills = bool(method and method.writes_skills)
    episodes = 128 * update + 256 * skills
    return Ledger(
        env_steps=9 * episodes,
        episodes=episodes,
        sampled_tokens=108 * episodes,
        analyzer_tokens=24 * episodes * skills,
        rescored_tokens=108 * 128 * update * bool(method and method.teacher),
        trained_tokens=108 * 128 * update,
        optimizer_steps=2 * update,
        wall_seconds=0.6 * update,
        cpu_seconds=0.5 * update * (1.3 if skills else 1.0) + 9 * skills,
        flops=2.6e9 * episodes,
    )


def skill_record(update: int, success: bool, text: str) -> dict[str, Any]:
    usable = update != 20 or success
    return {
        "text": text if usable else "",
        "summary": "Found the mug, then the desk.",
        "author": "policy",
        "update": update,
        "raw": json.dumps({"episode_skill": text}) if usable else "<<not json>>",
        "task": "train/000017",
        "attempt": int(success),
        "success": success,
        "usable": usable,
    }


def trained_outcome(attempt: int) -> dict[str, Any]:
    """How an attempt at the training task went: 0 failed, 1 succeeded."""
    won = attempt == 1
    return {
        "task": "train/000017",
        "kind": "pick",
        "attempt": attempt,
        "success": won,
        "score": float(won),
        "reward": 10.0 * won,
        "steps": 2,
        "stop_reason": "success" if won else "max_steps",
    }


def episode(phase: str, where: dict[str, Any], outcome: dict[str, Any], text: str, picture: str) -> dict[str, Any]:
    """A detailed episode of two steps; ``text`` is in its prompt and its second answer."""
    first = {"observation": "You see <b>a desk</b>.", "response": "<action>go</action>", "action": "go", "valid": True}
    second = {"observation": "You are at the desk.", "response": f"hm {text}", "action": "", "valid": False}
    shown = {"prompt": f"You see this: <image>\n{text}\nWhat now?", "pictures": [picture]}
    return {
        "phase": phase,
        "update": where["update"],
        "skills": where["skills"],
        **outcome,
        "valid": 1,
        "dropped_turns": 0,
        "task_text": "put a mug in desk.",
        "prompt_tokens": 120,
        "sampled_tokens": 9,
        "error": "",
        "detail": True,
        "trace": json.dumps([{**step, "reward": 0.0, **shown} for step in (first, second)]),
    }


def credit(update: int, attempt: int, text: str) -> list[dict[str, Any]]:
    """Credit of the two steps of a training episode: a token's shift is 0.1 more than the one's before it."""
    rows, sign = [], 1.0 if attempt else -1.0
    for step, tokens in enumerate((["<action>", "go", "</action>"], ["hm", f" {text}"])):
        logp = [-0.5] * len(tokens)
        shift = [round(0.1 * n + 0.05 * attempt - 0.1, 3) for n in range(len(tokens))]
        gate = [float(1 / (1 + np.exp(-5 * d))) for d in shift]
        rows.append(
            {
                "update": update,
                "task": "train/000017",
                "attempt": attempt,
                "step": step,
                "ids": list(range(len(tokens))),
                "tokens": tokens,
                "logp": logp,
                "teacher": [a + b for a, b in zip(logp, shift, strict=True)],
                "gate": gate,
                "advantage": sign,
                "pull": [sign + 0.01 * g for g in gate],
                "skill": text,
                "in_policy": True,
                "in_distill": True,
                "chosen": True,
            }
        )
    return rows


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
