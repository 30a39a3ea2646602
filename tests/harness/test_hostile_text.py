"""Hostile text in prompts, skills, journals and on the terminal: nothing raises, nothing passes for what it is not."""

from __future__ import annotations

import functools
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty import NASTY, few, texts
from rich.table import Table
from rich.text import Text
from toy_cells import toy_episodes, toy_policy
from toy_envs import Doors
from transformers import PreTrainedTokenizerFast

from harness.config import CellConfig, EnvConfig, EvalConfig
from harness.contracts import HarnessError, Prompt, Turn, View, digest, plain
from harness.inert import one_line, readable, visible
from harness.policy.api import content
from harness.policy.chat import plain_tokenizer, special_ids
from harness.policy.tiny import build_tokenizer
from harness.progress import Board
from harness.prompts import fit_prompt
from harness.skills import analysis_prompt, insert_skill, parse_skill
from harness.store import PARQUET, CellDir
from harness.terminal import Terminal

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PICTURE = np.zeros((28, 28, 3), np.uint8)


@pytest.fixture(scope="module")
def policy():
    return toy_policy()


# ------------------------------------------------------------------------------------------------- characters


@few
@given(texts)
def test_text_becomes_readable_visible_and_one_line(text: str) -> None:
    assert readable(text).encode().decode() == readable(text)
    assert not STEERING.search(visible(text))
    assert visible(visible(text)) == visible(text)
    assert len(one_line(text).splitlines()) <= 1
    assert len(digest([text])) == 64


# ---------------------------------------------------------------------------------------------------- prompts


@few
@given(texts, texts, texts)
def test_a_prompt_has_its_pictures_and_no_special_token(policy, task: str, seen: str, action: str) -> None:
    view = View(task, 2, (Turn(1, seen, action), Turn(2, task, seen)), action, (PICTURE,), (task, seen))
    prompt, _ = fit_prompt(Doors(), policy, view, 10**9, skill=action)
    assert prompt is not None
    assert len(prompt.images) == 1
    encoded = policy.encoder(prompt)
    text = [int(i) for i, role in zip(encoded.ids, encoded.roles, strict=True) if role == 1]
    assert special_ids(policy.tokenizer).isdisjoint(text)
    assert [part["type"] for part in content(prompt)].count("image_url") == 1
    json.dumps(content(prompt), ensure_ascii=False).encode()


@few
@given(texts)
def test_ordinary_text_survives_the_tokenizer(policy, text: str) -> None:
    ids = policy.encoder.text_ids(plain(text))
    assert policy.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == plain(text)


@few
@given(texts)
def test_a_skill_stays_in_its_block(text: str) -> None:
    prompt = insert_skill(Prompt("<image>\nYour task is to: win.\nNow it's your turn to act.", (PICTURE,)), text)
    assert prompt.text.startswith("<image>\nYour task is to: win.")
    assert prompt.text.endswith("Now it's your turn to act.")
    if readable(text).strip():
        block = prompt.text.partition("in this episode.\n[")[2].removesuffix("]\n\nNow it's your turn to act.")
        opened = 0
        for line in block.split("\n")[:-1]:  # no line but the block's last ends in a bracket that closes the block
            opened = functools.reduce(lambda depth, c: max(depth + (c == "[") - (c == "]"), -1), line, opened)
            assert opened >= 0 or not line.rstrip().endswith("]")
            opened = max(opened, 0)


@few
@given(texts, texts)
@pytest.mark.parametrize("style", ["paper", "compact"])
def test_an_analysis_prompt_tells_of_the_steps_there_were(style: str, seen: str, answer: str) -> None:
    episode = toy_episodes(1)[0]
    step = episode.steps[0]
    hostile = replace(
        step,
        observation={"text": seen, "images": step.observation["images"]},
        response=replace(step.response, text=answer),
        action=answer,
    )
    episode.steps = [step, hostile]
    episode.task_text = answer
    prompt, dropped = analysis_prompt(episode, style, 10**9, lambda prompt: len(prompt.text))
    assert prompt is not None
    assert not dropped
    if style == "paper":
        assert re.findall(r"(?m)^\[Step (\d+)\]", prompt.text) == ["0", "1"]
        for heading in ("Outcome", "Trajectory:", "Task:"):
            assert len(re.findall(rf"(?m)^{heading}", prompt.text)) <= 1
        assert len(re.findall(r"(?m)^Action valid: ", prompt.text)) == 2


@few
@given(texts)
def test_any_answer_is_read_as_a_skill_or_refused(answer: str) -> None:
    for text in (answer, f'{{"episode_skill": {answer}}}', f"{{'episode_skill': {answer!r}}}"):
        found = parse_skill(text)
        (found.skill + found.summary + found.error).encode()


@pytest.mark.parametrize(
    "answer",
    [
        "```" + "a" * 10**6,
        '{"' * 49_000,
        '{"a":[' * 500 + "1," * 45_000,
        "``` " * 24_000,
        "{'a':1}" * 14_000,
        "{'episode_skill': 0x" + "f" * 9_000 + "}",
        "[" * 99_999,
    ],
    ids=lambda answer: answer[:8],
)
def test_long_answers_take_no_long_time(answer: str) -> None:
    start = time.perf_counter()
    assert not parse_skill(answer).usable
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("word", ["x", "漢", "<|im_end|>", "\x00"])
def test_a_megabyte_without_a_blank_is_encoded_in_seconds(policy, word: str) -> None:
    start = time.perf_counter()
    assert len(policy.encoder(Prompt(word * (10**6 // len(word.encode()))))) > 10**4
    assert time.perf_counter() - start < 20


# ------------------------------------------------------------------------------------------------- tokenizers


def chat_tokenizer(marks: list[str], template: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the ordinary added tokens that larger models have."""
    tokenizer = build_tokenizer(["put a mug in desk 1"] * 4, ["Your task: "], 300)
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = tokenizer.chat_template + template
    return tokenizer


def test_marks_of_the_template_are_spelled_out_even_where_they_are_ordinary_tokens() -> None:
    marks = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<think>", "</think>", "<b>"]
    tokenizer = chat_tokenizer(marks, "{# <tool_call> </tool_call> <think> </think> #}")
    made = plain_tokenizer(tokenizer)

    def whole(mark: str) -> bool:
        return tokenizer.convert_tokens_to_ids(mark) in made.encode(f"x{mark} y", add_special_tokens=False).ids

    assert [whole(mark) for mark in marks] == [False, False, False, True, True, True]
    assert whole("Your task: ")
    assert not any(map(whole, tokenizer.all_special_tokens))
    assert tokenizer("<tool_call>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<tool_call>")]


def metaspace_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """A tokenizer as sentencepiece makes them: blanks become a sign, unknown characters bytes."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if model == "bpe":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    else:
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=special, show_progress=False
        )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator(["put a mug </s> <s> in desk"] * 9, trainer)
    settings = json.loads(made.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@few
@given(texts)
def test_a_metaspace_tokenizer_spells_special_tokens_out(text: str) -> None:
    made = plain_tokenizer(METASPACE)
    assert {1, 2}.isdisjoint(made.encode(readable(text), add_special_tokens=False).ids)


METASPACE = metaspace_tokenizer("bpe")


def test_a_tokenizer_that_cannot_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(HarnessError, match="reads special tokens such as"):
        plain_tokenizer(metaspace_tokenizer("unigram"))


# ---------------------------------------------------------------------------------------------------- journals


@few
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_journals_and_parquet_hold_any_text(tmp_path_factory: pytest.TempPathFactory, pairs) -> None:
    cell = CellDir(tmp_path_factory.mktemp("cell"))
    cell.append("episodes.jsonl", *({"task": a, "trace": json.dumps([b], ensure_ascii=False)} for a, b in pairs))
    cell.write_json("config.json", dict(pairs))
    wanted = [readable(a) for a, _ in pairs]
    assert [record["task"] for record in cell.records("episodes.jsonl")] == wanted
    assert [json.loads(record["trace"]) for record in cell.records("episodes.jsonl")] == [
        [readable(b)] for _, b in pairs
    ]
    cell.finish({})
    table = pyarrow.parquet.read_table(cell.path / f"{PARQUET[0]}.parquet")
    assert table["task"].to_pylist() == wanted
    assert cell.read_json("config.json") == {readable(a): readable(b) for a, b in dict(pairs).items()}


# ---------------------------------------------------------------------------------------------------- terminal


@settings(few, max_examples=8)
@given(texts)
def test_the_terminal_shows_text_and_obeys_none_of_it(text: str) -> None:
    terminal = Terminal()
    terminal.file = shown = io.StringIO()
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    for part in (text, Text(text, "red"), table, [text]):
        terminal.print(part)
    terminal.rule(text)
    with Board({"key": text}, 0, terminal) as board:
        board.note("key", text)
        board.end("key", text)
    assert not STEERING.search(shown.getvalue())
    shown.getvalue().encode()


def test_markup_and_smileys_are_text_and_our_own_styles_are_not() -> None:
    terminal = Terminal()
    terminal.file = shown = io.StringIO()
    terminal.print("[red]x[/red] [/nothing] :smile:")
    assert shown.getvalue() == "[red]x[/red] [/nothing] :smile:\n"


def test_a_megabyte_on_the_terminal_takes_seconds() -> None:
    terminal = Terminal()
    terminal.file = io.StringIO()
    table = Table("a", "b")
    table.add_row("x" * 10**6, "\x1b" * 10**5)
    start = time.perf_counter()
    terminal.print(table)
    assert time.perf_counter() - start < 20


# ------------------------------------------------------------------------------------------------ a whole cell


def test_a_cell_in_which_every_word_is_hostile_finishes_and_is_reported(tmp_path: Path) -> None:
    from harness.cell import run_cell
    from harness.reporting.report import write_report

    config = CellConfig(
        env=EnvConfig(id="hostile_env:Hostile", history=2, max_steps=3, max_prompt_tokens=10**6),
        policy="random",
        eval=EvalConfig(panel_size=len(NASTY), episodes_per_task=2),
    )
    cell = CellDir(tmp_path / "cells" / config.hash)
    run_cell(config, cell, lambda progress: None, 1)
    assert cell.finished
    results = cell.records("evals.jsonl")[-1]["results"]
    assert {result["stop_reason"] for result in results} <= {"success", "failure", "max_steps"}
    write_report(tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in written)
    for path in written:
        if path.suffix in (".html", ".js", ".csv", ".md", ".tex", ".svg"):
            assert not STEERING.search(path.read_text(encoding="utf-8")), path


def test_a_crash_with_hostile_words_is_told_and_kept(tmp_path: Path) -> None:
    from harness.runner import attempt

    def play(*_: object) -> None:
        raise RuntimeError("".join(NASTY))

    config = CellConfig(env=EnvConfig(id="toy_envs:Doors"), policy="random")
    (tmp_path / "cell").mkdir()
    assert attempt(lambda: play, config, CellDir(tmp_path / "cell"), lambda progress: None) is not None
    assert not STEERING.search((tmp_path / "cell" / "error.txt").read_text(encoding="utf-8"))
