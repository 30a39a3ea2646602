"""The tiny policy's tokenizer: exact round trips, phrases, and text that looks like special tokens."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from harness.contracts import HarnessError
from harness.policy.tiny import END, IMAGE, SPECIAL, build_tokenizer

TEXTS = [f"put a clean mug in desk {i}. You see a drawer {i}." for i in range(40)]
PHRASES = ["Your task: ", "Your ", "\nAction:"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS, PHRASES, vocab_size=400)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "put a clean mug in desk 12.",
        "  two blanks, a tab\t, lines\n\n\r\n and an end ",
        "naïve Ж 漢字 🤖 e\u0301 \u200b \x00\x7f",
        "Your task: Your \nAction:",
        "".join(SPECIAL),
        "don't , . ' s ?",
        "",
    ],
)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_words_and_numbers_carry_their_blank(tokenizer):
    assert tokenizer.tokenize("put a clean mug in desk 12") == ["put", "Ġa", "Ġclean", "Ġmug", "Ġin", "Ġdesk", "Ġ12"]


def test_the_longest_phrase_is_one_token(tokenizer):
    assert [tokenizer.decode(i) for i in ids(tokenizer, "Your task: Your \nAction:")] == [
        "Your task: ",
        "Your ",
        "\nAction:",
    ]


def test_special_tokens_in_text_are_spelled_out(tokenizer):
    special = set(tokenizer.all_special_ids)
    assert len(special) == len(SPECIAL)
    assert special.isdisjoint(ids(tokenizer, f"a page with {IMAGE} and {END}"))


def test_it_is_deterministic_and_survives_a_directory(tokenizer, tmp_path):
    again = build_tokenizer(TEXTS, PHRASES, vocab_size=400)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "Your task: put <|im_end|> 漢 in desk 12"
    assert ids(loaded, text) == ids(tokenizer, text)
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(("phrases", "size"), [(["caf\u00e9 "], 400), ([""], 400), (["a "], 200)])
def test_impossible_vocabularies_are_refused(phrases, size):
    with pytest.raises(HarnessError):
        build_tokenizer(TEXTS, phrases, vocab_size=size)
