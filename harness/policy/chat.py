"""What a model's chat template puts around one user message and its answer.

The template is rendered a few times, around a marker, when a policy is made. Its own pieces may contain special
tokens; the text that stands next to a message's own, e.g. the blank of ``User: ``, is kept as text, so that both are
cut into tokens together, as they would be in the whole rendering.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from harness.contracts import HarnessError

MARKER = "\N{OBJECT REPLACEMENT CHARACTER}text\N{OBJECT REPLACEMENT CHARACTER}"

FIXED_DAY = "{%- macro strftime_now(format) -%} 26 Jul 2024 {%- endmacro -%}"
"""What templates that ask for today's date are told, so that a prompt is the same tomorrow: Llama's own default."""


@dataclass(frozen=True)
class Opening:
    """What comes before a message: ids up to the last special token, and the text behind that."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Chat:
    """The pieces of a chat template, for a single user message that is to be answered.

    Attributes:
        opening: Before a message that begins with text.
        pictured: Before a message that begins with a picture; some templates differ.
        closing_text: Right behind the message, up to the first special token.
        closing: Ids from there on, the opening of the answer included.
        picture: Text that stands for a picture, with exactly one image token; empty for text models.
        strips: Whether the template drops white space around the message.
        lead: What stands between the opening of the answer and the answer, e.g. a blank.
        end: The token that ends an answer; None where the template closes answers with no special token.
    """

    opening: Opening
    pictured: Opening
    closing_text: str
    closing: tuple[int, ...]
    picture: str
    strips: bool
    lead: str
    end: int | None


def read_chat(tokenizer: Any, image_token: str = "") -> Chat:
    """Take a template apart; ``image_token`` is the token whose places a picture fills, empty for text models.

    Raises HarnessError for a template that is absent, broken, or places other than one image token for a picture.
    """
    special, vision = special_ids(tokenizer), bool(image_token)
    user = _message("user", MARKER, vision)
    asked = _render(tokenizer, [user])
    before, after = _around(asked)
    opening = _opening(tokenizer, special, before)
    picture, pictured = "", opening
    if image_token:
        text, image = {"type": "text", "text": MARKER}, {"type": "image"}
        picture = _render(tokenizer, [{"role": "user", "content": [text, image, text]}]).split(MARKER)[1]
        if picture.count(image_token) != 1:
            raise HarnessError("the chat template does not place exactly one image token for a picture")
        first = _render(tokenizer, [{"role": "user", "content": [image, text]}])
        pictured = _opening(tokenizer, special, first[: first.index(picture)])
    closing_text, closing = _closing(tokenizer, special, after)
    padded = f"\n {MARKER} \n"
    strips = padded not in _render(tokenizer, [_message("user", padded, vision)])

    turns = [_message("user", "", vision), _message("assistant", MARKER, vision)]
    answered, ended = _around(_render(tokenizer, turns, answer=False))
    opened = _render(tokenizer, turns[:1])
    lead = answered.removeprefix(opened) if answered.startswith(opened) else ""
    ends = [token for token in template_ids(tokenizer, ended) if token in special]
    return Chat(opening, pictured, closing_text, closing, picture, strips, lead, ends[0] if ends else None)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of every token marked special, whether or not it has a name such as eos."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


ANSWER_TAGS = ("<think>", "</think>")
"""Tokens of some models that environments ask for in so many words; a prompt may hold them."""

_MARK = re.compile(r"<[^\s<>]+>")


def plain_tokenizer(tokenizer: Any) -> Tokenizer:
    """The tokenizer for text that is not the template's: no special token and no mark of the template comes out of it.

    ``<|im_end|>`` on a page is spelled out in ordinary tokens; so is ``<tool_call>`` where the template writes it,
    even if the tokenizer calls it ordinary. Raises HarnessError for a tokenizer whose very vocabulary reads special
    tokens in text.
    """
    backend: Tokenizer = tokenizer.backend_tokenizer
    made = json.loads(backend.to_str())
    template = str(tokenizer.chat_template)
    for token in made["added_tokens"]:
        mark = token["content"]
        written = mark.startswith("<|") or mark in template
        if _MARK.fullmatch(mark) and written and mark not in ANSWER_TAGS:
            token["special"] = True
    plain = Tokenizer.from_str(json.dumps(made))
    plain.encode_special_tokens = True
    for token in made["added_tokens"]:
        if token["special"] and token["id"] in plain.encode(token["content"], add_special_tokens=False).ids:
            raise HarnessError(f"this tokenizer reads special tokens such as {token['content']!r} in plain text")
    return plain


def template_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a piece of a template, special tokens included."""
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"])


def rendered_ids(tokenizer: Any, text: str, vision: bool) -> tuple[int, ...]:
    """Ids of the whole rendering of a message that is to be answered; special tokens in its text come out as such."""
    return template_ids(tokenizer, _render(tokenizer, [_message("user", text, vision)]))


def _message(role: str, text: str, vision: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if vision else text}


def _render(tokenizer: Any, messages: list[dict[str, Any]], answer: bool = True) -> str:
    """The rendered messages; with ``answer``, the opening of an answer follows. Thinking is off, as in the paper."""
    if not tokenizer.chat_template:
        raise HarnessError("the model's tokenizer has no chat template; choose an instruct model")
    try:
        rendered: str = tokenizer.apply_chat_template(
            messages,
            chat_template=FIXED_DAY + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=answer,
            enable_thinking=False,
        )
    except TemplateError as error:
        raise HarnessError(f"the chat template cannot be rendered: {str(error).splitlines()[0]}") from error
    return rendered


def _around(rendered: str) -> tuple[str, str]:
    pieces = rendered.split(MARKER)
    if len(pieces) != 2:
        raise HarnessError(f"the chat template shows a message {len(pieces) - 1} times in place of once")
    return pieces[0], pieces[1]


def _opening(tokenizer: Any, special: frozenset[int], text: str) -> Opening:
    ids, ends = _with_places(tokenizer, text, 1)
    last = max((index for index, token in enumerate(ids) if token in special), default=-1)
    return Opening(ids[: last + 1], text[ends[last] if last >= 0 else 0 :])


def _closing(tokenizer: Any, special: frozenset[int], text: str) -> tuple[str, tuple[int, ...]]:
    ids, starts = _with_places(tokenizer, text, 0)
    first = next((index for index, token in enumerate(ids) if token in special), len(ids))
    return text[: starts[first]] if first < len(ids) else text, ids[first:]


def _with_places(tokenizer: Any, text: str, side: int) -> tuple[tuple[int, ...], list[int]]:
    """Ids of a piece of a template, and where in it each begins (side 0) or ends (side 1)."""
    made = tokenizer(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
    return tuple(made["input_ids"]), [place[side] for place in made["offset_mapping"]]
