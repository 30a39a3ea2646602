"""Reinforcement learning beside TRL's ``GRPOTrainer``: one tiny text model, one environment, one CPU thread.

Both sides start every update from the same weights, sample at temperature 1 and take one AdamW step on the clipped
surrogate without a KL term, in float32, on the same tasks. Ours is the whole of ``Training.update``: play, advantages,
optimise, journal. TRL gets what a careful user would give it: all answers of an update in one ``generate`` call with
key-value cache, no second scoring pass (sampling and training are aligned), sdpa attention, no logging, no
checkpoints, no gradient checkpointing, and a micro-batch size that suits it. Neither samples special tokens.

*One turn* is what TRL is made for: a prompt, G answers, a reward function. Weights are fresh, so that answers run to
the token limit on both sides. *Many turns* goes through TRL's ``rollout_func``: the very step prompts of the protocol,
all episodes of an update side by side, one row per step as on our side.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from harness.cell import Session, env_options
from harness.config import CellConfig
from harness.contracts import HarnessError, Observation, Task, Turn, View
from harness.methods import Advantage, Method
from harness.perf.measure import Measurement, Report, Result, Settings, opened, quick_cells, train_config
from harness.perf.phases import Phases
from harness.policy.load import load_local
from harness.policy.local import LocalPolicy
from harness.policy.qwen import FAMILY
from harness.preparation import local
from harness.registry import make_env
from harness.trainer import Trainer
from harness.training import Training
from harness.validation import require_extra

ENV = "ALFWorld-v1"
UPDATES = 5
"""Updates of each side; the first warms up and does not count."""
TURNS = 8
"""Steps of an episode in the setting with many turns; few are over before."""
GOALS = {1: 1.2, TURNS: 2.0}
MICRO_BATCH = 64
"""Rows of a micro-batch of TRL; between 16 and 128 its time differs by a tenth, and here it is best or nearly so."""
GRPO = Method(name="grpo", summary="every row is trained on", advantage=Advantage(degenerate="keep"))
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}
"""Freed memory is kept for the next tensor; without it large tensors are mapped anew each time."""
PHASES = ("rollout", "scoring", "optimisation", "rest")


@dataclass(frozen=True)
class Side:
    """What an update took: CPU seconds by phase, rows and sampled tokens."""

    seconds: Mapping[str, float]
    rows: float
    tokens: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def trl_speed(settings: Settings, report: Report) -> Iterator[Result]:
    """Episodes trained per CPU second, ours against TRL's. Raises HarnessError where TRL is not installed."""
    require_extra("harness perf trl", "trl", "bench")
    for turns, goal in GOALS.items():
        what = "one turn" if turns == 1 else f"{turns} turns"
        report(f"trl, {what}")
        with kept_memory(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            ours, theirs = child.submit(compare, settings, turns).result()
        speed, reference = (settings.episodes / side.total for side in (ours, theirs))
        yield Measurement("trl", what, speed, reference, "episodes/s", goal, "at least")
        yield phase_table(f"{what}: CPU seconds of an update", ours, theirs)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Processes that start meanwhile keep freed memory: glibc reads its settings once, at the start."""
    before = {name: os.environ.get(name) for name in MALLOC}
    os.environ.update(MALLOC)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def phase_table(title: str, ours: Side, theirs: Side) -> Table:
    """Both sides phase by phase."""
    table = Table("", *PHASES, "all", "rows", "sampled tokens", title=title, title_justify="left", box=None)
    for name, side in (("ours", ours), ("TRL", theirs)):
        seconds = [f"{side.seconds.get(phase, 0.0):.3f}" for phase in PHASES]
        table.add_row(name, *seconds, f"{side.total:.3f}", f"{side.rows:,.0f}", f"{side.tokens:,.0f}")
    return table


def compare(settings: Settings, turns: int) -> tuple[Side, Side]:
    """Updates of both sides by turns; ours first."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="harness-perf-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL calls its own API and transformers' settings experimental or old
        twin = Path(scratch, "twin")
        text_twin(load_local(settings.policy), fresh=turns == 1).save(twin)
        [config] = [cell for cell in quick_cells(settings, "grpo") if cell.env.id == ENV]
        with opened(bench_config(config, str(twin), turns)) as session:
            ours = Ours(session)
            theirs = Theirs(session, ours.tasks, turns, Path(scratch, "trl"))
            theirs.train(ours.update)
            return ours.side, theirs.side


def bench_config(config: CellConfig, policy: str, turns: int) -> CellConfig:
    """Every row is trained on, in one optimizer step, without KL term; all tokens weigh the same."""
    change = {"mini_batches": 1, "max_rows": None, "kl": 0.0, "detail": 0, "normalise": "token"}
    train = train_config(config).model_copy(update=change)
    env = config.env.model_copy(update={"max_steps": turns})
    return config.model_copy(update={"policy": policy, "method": GRPO, "train": train, "env": env})


def text_twin(policy: LocalPolicy, fresh: bool) -> LocalPolicy:
    """The decoder of a policy as a text model of its own, with its weights or with ``fresh`` ones.

    Raises HarnessError for architectures other than Qwen2's.
    """
    if type(policy.decoder.text).__name__ not in FAMILY:
        raise HarnessError("harness perf trl measures models of the Qwen2 family; choose another --policy")
    given = policy.model.config.get_text_config()
    names = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range"),
    ]
    config = Qwen2Config(
        **{name: getattr(given, name) for name in names},
        rope_parameters={"rope_type": "default", "rope_theta": given.rope_parameters["rope_theta"]},
        tie_word_embeddings=given.tie_word_embeddings,
        eos_token_id=policy.tokenizer.eos_token_id,
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config).float()
    if not fresh:
        model.model.load_state_dict(policy.decoder.text.state_dict())
        model.lm_head.weight.data.copy_(policy.model.get_output_embeddings().weight)
    return LocalPolicy(model, policy.tokenizer, None, policy.spec, policy.prompt_style)


# ------------------------------------------------------------------------------------------------- our side


class Ours:
    """Updates of the harness, all from the same weights."""

    def __init__(self, session: Session) -> None:
        self.policy, train = local(session.policy), train_config(session.config)
        self.start = self.policy.clone()
        self.session, self.phases = session, Phases()
        self.training = Training(session, GRPO, self.policy, train)
        self.trainer = Trainer(self.policy, GRPO, train, seed=0)
        self.phases.watch(session, "play", "rollout")
        self.phases.watch(self.training, "_rows", "scoring")
        self.phases.watch(self.trainer, "update", "optimisation")

    def update(self, number: int) -> None:
        self.policy.copy_weights_from(self.start)
        gc.collect()
        with self.phases.update("rest"):
            self.training.update(self.trainer, number)

    def tasks(self, number: int) -> list[Task]:
        """The tasks of an update, each once."""
        return list({job.task.id: job.task for job in self.training._jobs(number)}.values())

    @property
    def side(self) -> Side:
        ledger = self.session.ledger
        return Side(self.phases.medians(), ledger.env_steps / UPDATES, ledger.sampled_tokens / UPDATES)


# ----------------------------------------------------------------------------------------------- TRL's side


@dataclass
class Played:
    """An episode that TRL's side plays, in its own environment."""

    observation: Observation
    admissible: tuple[str, ...]
    task: str
    turns: list[Turn]
    reward: float = 0.0
    over: bool = False


class Theirs:
    """TRL's trainer on the tasks that ``tasks`` names for each update."""

    def __init__(self, session: Session, tasks: Callable[[int], list[Task]], turns: int, scratch: Path) -> None:
        datasets: Any = import_module("datasets")
        trl: Any = import_module("trl")
        config, train = session.config, train_config(session.config)
        self.policy, self.env, self.turns, self.group = local(session.policy), session.env, turns, train.group
        self.history = session.rules(train.temperature).history
        self.tasks = [task for number in range(1, UPDATES + 1) for task in tasks(number)]
        self.envs = [make_env(config.env.id, env_options(config)) for _ in range(train.tasks * train.group)]
        self.phases, self.rows, self.tokens = Phases(), 0, 0
        rows = len(self.envs) * turns
        micro = math.gcd(MICRO_BATCH, rows)
        prompts = [self.first_prompt(task) if turns == 1 else str(n) for n, task in enumerate(self.tasks)]
        dataset = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
        self.trainer: Any = trl.GRPOTrainer(
            model=self.policy.clone().model.requires_grad_(True),
            processing_class=self.policy.tokenizer,
            reward_funcs=self.validity if turns == 1 else self.returns,
            train_dataset=datasets.Dataset.from_list(dataset),
            rollout_func=None if turns == 1 else self.play,
            args=trl.GRPOConfig(
                output_dir=str(scratch),
                max_steps=UPDATES,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=rows // micro,
                num_generations=train.group * turns,
                max_completion_length=config.env.max_response_tokens,
                temperature=train.temperature,
                top_k=0,
                generation_kwargs={"suppress_tokens": sorted(self.policy.banned_ids)},
                beta=0.0,
                epsilon=train.clip,
                learning_rate=train.learning_rate,
                lr_scheduler_type="constant",
                adam_beta1=train.betas[0],
                adam_beta2=train.betas[1],
                weight_decay=train.weight_decay,
                max_grad_norm=train.grad_clip,
                optim="adamw_torch_fused",
                gradient_checkpointing=False,
                shuffle_dataset=False,
                bf16=False,
                use_cpu=True,
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        self.phases.watch(self.trainer, "_generate", "rollout")
        self.phases.watch(self.trainer, "_generate_and_score_completions", "scoring")

    def train(self, between: Callable[[int], None]) -> None:
        """All updates, each from the same weights; ``between`` gets the number of the one that is over."""
        start = self.policy.clone()
        side = self

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                with torch.no_grad():
                    for mine, theirs in zip(model.parameters(), start.model.parameters(), strict=True):
                        mine.copy_(theirs)
                gc.collect()
                side.phases.begin("optimisation")

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                side.phases.end()
                between(state.global_step)

        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(Clock())
        self.trainer.train()

    @property
    def side(self) -> Side:
        return Side(self.phases.medians(), self.rows / UPDATES, self.tokens / UPDATES)

    # One turn: what the first prompt asks, and whether the answer is one.

    def first_prompt(self, task: Task) -> str:
        observation, info = self.envs[0].reset(options={"task": task})
        return self.prompt(Played(observation, info["admissible"], self.env.task_text(observation), []))

    def validity(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.rows += len(completions)
        self.tokens += sum(map(len, completion_ids))
        return [float(self.env.parse(answer[0]["content"])[1]) for answer in completions]

    # Many turns.

    def play(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Rows of whole episodes: every task comes ``group * turns`` times in a row, once for each step to play.

        Episodes that are over early leave rows of one token that is not trained on.
        """
        numbers = [int(prompt[0]["content"]) for prompt in prompts[:: self.group * self.turns]]
        tasks = [self.tasks[number] for number in numbers for _ in range(self.group)]
        episodes = [self.reset(env, task) for env, task in zip(self.envs, tasks, strict=True)]
        nothing = ([self.policy.tokenizer.pad_token_id], [self.policy.tokenizer.eos_token_id], [0])
        rows = [[nothing] * self.turns for _ in episodes]
        for turn in range(self.turns):
            open_ = [n for n, episode in enumerate(episodes) if not episode.over]
            texts = [self.prompt(episodes[n]) for n in open_]
            ids = [self.chat_ids(text) for text in texts]
            answers, _ = trainer._generate_single_turn(ids, None, {}, 1)
            replies = self.policy.tokenizer.batch_decode(answers, skip_special_tokens=True)
            for n, prompt, answer, reply in zip(open_, ids, answers, replies, strict=True):
                rows[n][turn] = (prompt, answer, [1] * len(answer))
                self.step(self.envs[n], episodes[n], reply)
                self.rows += 1
                self.tokens += len(answer)
        flat = [row for steps in rows for row in steps]
        return {
            "prompt_ids": [row[0] for row in flat],
            "completion_ids": [row[1] for row in flat],
            "env_mask": [row[2] for row in flat],
            "logprobs": None,
            "total": [episode.reward for episode in episodes for _ in range(self.turns)],
        }

    def returns(self, completions: list[Any], total: list[float], **_: Any) -> list[float]:
        return total

    def reset(self, env: Any, task: Task) -> Played:
        observation, info = env.reset(options={"task": task})
        return Played(observation, info["admissible"], self.env.task_text(observation), [])

    def prompt(self, episode: Played) -> str:
        turns, seen = episode.turns, episode.observation
        history = tuple(turns[-self.history :]) if self.history else ()
        view = View(episode.task, len(turns) + 1, history, seen["text"], seen["images"], episode.admissible)
        return self.env.prompt(view, self.policy.prompt_style).text

    def chat_ids(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        rendered = self.policy.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.policy.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def step(self, env: Any, episode: Played, reply: str) -> None:
        action, _ = self.env.parse(reply)
        episode.turns.append(Turn(len(episode.turns) + 1, episode.observation["text"], action))
        episode.observation, reward, terminated, truncated, info = env.step(action)
        episode.admissible = info["admissible"]
        episode.reward += float(reward)
        episode.over = terminated or truncated
