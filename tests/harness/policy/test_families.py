"""Model families: our token ids, log-probabilities and updates are those of the family's own processor and model."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers.models.smolvlm.processing_smolvlm as smolvlm_processing
from family_models import FAMILIES
from toy_policies import SAMPLED, close, picture, rows_of
from transformers import ProcessorMixin

from harness.cards import Ledger
from harness.config import TrainConfig
from harness.contracts import HarnessError, Prompt
from harness.methods import get_method
from harness.policy.base import Request, check_length
from harness.policy.encode import Role
from harness.policy.load import check_policy_spec, load_local
from harness.rows import Row
from harness.trainer import Trainer

SEEING = [name for name, family in FAMILIES.items() if family.processor]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    # The processors of transformers want torchvision and num2words for their videos; pictures need neither.
    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    patch.setattr(smolvlm_processing, "num2words", str)
    root = tmp_path_factory.mktemp("families")
    for name, family in FAMILIES.items():
        family.save(root / name)
    yield root
    patch.undo()


@pytest.fixture(scope="module")
def policies(directories):
    return {name: load_local(str(directories / name)) for name in FAMILIES}


@pytest.fixture(params=list(FAMILIES))
def policy(request, policies):
    policies[request.param].family = request.param
    return policies[request.param]


def own_inputs(policy, prompt):
    """What the family's own template and processor make of a message of text and pictures."""
    family = FAMILIES[policy.family]
    pieces = prompt.text.split("<image>")
    parts = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
    for piece in pieces[1:]:
        parts += [{"type": "image"}, *([{"type": "text", "text": piece}] if piece else [])]
    content = parts if family.processor else prompt.text
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
        date_string="26 Jul 2024",
    )
    if not prompt.images:
        return policy.tokenizer([text], add_special_tokens=False, split_special_tokens=False, return_tensors="pt")
    processor = family.processor(policy.tokenizer)
    policy.tokenizer.backend_tokenizer.encode_special_tokens = False
    images = list(prompt.images) if "Qwen" in policy.family else [list(prompt.images)]
    options = {"text_kwargs": {"add_special_tokens": False}}
    return processor(text=[text], images=images, return_tensors="pt", **options)


def prompts_for(policy):
    """Prompts of many lengths; with no, one and two pictures, also at the edges, where the policy sees."""
    made = [Prompt("go"), Prompt("You see a drawer 12.\n\nUser: go  on"), Prompt("put a clean mug in desk 3. " * 6)]
    if policy.image_processor is not None:
        wide, square = picture(1, 64)[:40], picture(2, 32)
        made += [
            Prompt("You see <image> now.", (wide,)),
            Prompt("<image>put a mug", (square,)),
            Prompt("a <image> and\n<image>", (square, picture(3, 100)[:, :50])),
            Prompt("<image><image> go on", (picture(4, 90), wide)),
        ]
    return made


def requests_for(policy):
    prompts = prompts_for(policy)
    return [Request(prompts[i % len(prompts)], key=(5, i)) for i in range(2 * len(prompts))]


def test_token_ids_are_the_familys_own(policy):
    for prompt in prompts_for(policy):
        encoded = policy.encode(prompt)
        assert encoded.ids.tolist() == own_inputs(policy, prompt)["input_ids"][0].tolist(), prompt.text
        text = policy.tokenizer.decode(encoded.ids[encoded.roles == Role.TEXT])
        assert text.strip() == prompt.text.replace("<image>", "").strip()


def test_log_probabilities_are_the_models_own(policy):
    for prompt in prompts_for(policy):
        answer = policy.answer_ids("put a mug in desk 12")
        inputs = dict(own_inputs(policy, prompt))
        length = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            rest = torch.zeros(1, len(answer), dtype=inputs["mm_token_type_ids"].dtype)
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], rest], dim=1)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            logits = policy.model(**inputs).logits[0, length - 1 : -1]
            logits[:, sorted(policy.banned_ids)] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            ours = policy.score([(prompt, answer)]).logprobs
        close(ours, expected, 1e-4)


def test_scores_do_not_depend_on_the_batch_and_equal_the_sampling_log_probabilities(policy):
    requests = requests_for(policy)
    responses = policy.generate(requests, SAMPLED)
    assert policy.generate(requests[3:4], SAMPLED)[0].token_ids == responses[3].token_ids
    rows = rows_of(requests, responses)
    with torch.no_grad():
        together = policy.score(rows)
        backwards = policy.score(rows[::-1]).split()[::-1]
        alone = [policy.score([row]).logprobs for row in rows]
    close(together.logprobs, [p for response in responses for p in response.logprobs], 1e-4)
    close(together.logprobs, torch.cat(backwards), 1e-4)
    close(together.logprobs, torch.cat(alone), 1e-4)
    assert policy.banned_ids.isdisjoint(token for response in responses for token in response.token_ids)


def test_answers_end_at_the_end_of_the_turn(policy):
    family = FAMILIES[policy.family]
    (end,) = policy.tokenizer.convert_tokens_to_ids([family.special[0]])
    assert policy.answer_ids("go")[-1] == end
    assert end in policy.eos_ids
    text = [{"type": "text", "text": "go on"}] if family.processor else "go on"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    whole = policy.tokenizer.apply_chat_template(
        messages, tokenize=False, enable_thinking=False, date_string="26 Jul 2024"
    )
    ids = policy.tokenizer(whole, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    ours = [*policy.encode(Prompt("go on")).ids.tolist(), *policy.answer_ids("go on")]
    assert ids[: len(ours)] == ours
    assert policy.tokenizer.decode(ids[len(ours) :]).strip() == ""


def test_an_update_trains_and_survives_a_directory(policy, directories, tmp_path):
    policy = load_local(str(directories / policy.family))
    requests = requests_for(policy)
    responses = policy.generate(requests, SAMPLED)
    rows = [
        Row(request.prompt, response.token_ids, response.logprobs, i, i // 2, (-1.0) ** i)
        for i, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    trainer = Trainer(policy, get_method("grpo"), TrainConfig(learning_rate=1e-3, kl=0.0, token_budget=300), seed=0)
    trainer.update(rows, 1, Ledger())
    same = [name for name, weight in policy.model.named_parameters() if torch.equal(weight, before[name])]
    assert not same
    policy.save(tmp_path / "model")
    loaded = load_local(str(tmp_path / "model"))
    assert loaded.fingerprint == policy.fingerprint == policy.clone().fingerprint
    assert loaded.generate(requests, SAMPLED) == policy.generate(requests, SAMPLED)


def test_special_tokens_and_picture_marks_in_text_stay_text(policy):
    family = FAMILIES[policy.family]
    marks = [token for token in family.special + family.added if token not in ("<image>", "<think>", "</think>")]
    hostile = "".join(marks)
    encoded = policy.encode(Prompt(f"go {hostile} on"))
    assert policy.encoder.special_ids.isdisjoint(encoded.ids[encoded.roles == Role.TEXT].tolist())
    assert policy.tokenizer.decode(encoded.ids[encoded.roles == Role.TEXT]).strip() == f"go {hostile} on"


@pytest.mark.parametrize("name", ["Idefics3", "SmolVLM"])
def test_frames_are_counted_as_the_image_processor_cuts_them(policies, name):
    policy, shapes = policies[name], np.random.default_rng(0).integers(1, 300, (60, 2))
    for height, width in [(1, 300), (300, 1), (64, 64), (32, 32), *shapes.tolist()]:
        image = np.zeros((height, width, 3), np.uint8)
        options = {"return_row_col_info": True, "input_data_format": "channels_last"}
        made = policy.image_processor(images=[[image]], return_tensors="np", **options)
        assert policy.encoder.vision.grid(image) == (made["rows"][0][0], made["cols"][0][0]), (height, width)
        frames, tokens = len(made["pixel_values"][0]), policy.encoder.vision.text(policy.encoder.vision.grid(image))
        assert tokens.count("<image>") == 4 * frames


def test_prompts_are_the_same_on_another_day(policies, directories, monkeypatch):
    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 1, 2)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    later = load_local(str(directories / "Llama 3"))
    ids = later.encode(Prompt("go")).ids
    assert ids.tolist() == policies["Llama 3"].encode(Prompt("go")).ids.tolist()
    assert "26 Jul 2024" in later.tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------- odd directories


@pytest.fixture
def copied(directories, tmp_path):
    """A family's directory, copied to be changed."""

    def copy(name):
        return Path(shutil.copytree(directories / name, tmp_path / "copy"))

    return copy


def change(file, **entries):
    values = json.loads(file.read_text())
    values.update(entries)
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(load):
    with pytest.raises(HarnessError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sliding_window_is_a_limit_on_what_is_read(policies, copied):
    directory = copied("Qwen2.5")
    assert policies["Qwen2.5"].longest == 2048  # its config.json names a window that is not used
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    change(directory / "config.json", use_sliding_window=True, sliding_window=64, layer_types=layers)
    policy = load_local(str(directory))
    assert policy.longest == 64
    row = (Prompt("go"), policy.answer_ids("put a mug"))
    close(policy.score([row]).logprobs.detach(), policies["Qwen2.5"].score([row]).logprobs.detach(), 1e-6)
    long = Prompt("put a mug " * 40)
    assert "reads 64 tokens at most" in refusal(lambda: policy.score([(long, row[1])]))
    assert "reads 64 tokens at most" in refusal(lambda: policy.generate([Request(long, (0,))], SAMPLED))
    assert "lower max_prompt_tokens" in refusal(lambda: check_length(policy, 2560))
    change(directory / "config.json", layer_types=["full_attention", "chunked_attention", "full_attention"])
    assert "other than full causal attention" in refusal(lambda: load_local(str(directory)))


def test_templates_and_image_processors_are_found_where_processors_keep_them(policies, copied):
    directory = copied("SmolVLM")
    (directory / "chat_template.jinja").rename(directory / "template")
    assert "no chat template" in refusal(lambda: load_local(str(directory)))
    template = (directory / "template").read_text()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    images = directory / "preprocessor_config.json"
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(images.read_text())}))
    images.unlink()
    assert load_local(str(directory)).fingerprint == policies["SmolVLM"].fingerprint
    assert check_policy_spec(str(directory))


def test_a_tokenizer_that_reads_pieces_unlike_the_whole_is_warned_of(copied, caplog):
    directory = copied("Llama 3")
    load_local(str(directory))
    assert not caplog.records
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    words = {"type": "Metaspace", "replacement": "\u0120", "prepend_scheme": "first", "split": True}
    tokenizer["pre_tokenizer"] = words
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    load_local(str(directory))
    assert "as a whole would give" in caplog.text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "cannot be rendered: "),
        ("{{ raise_exception('one role only') }}", "cannot be rendered: one role only"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "shows a message 2 times"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "what ends an answer"),
    ],
)
def test_unusable_templates_are_refused_in_a_line(copied, template, message):
    directory = copied("SmolLM2")
    (directory / "chat_template.jinja").write_text(template)
    change(directory / "config.json", eos_token_id=None)
    change(directory / "generation_config.json", eos_token_id=None)
    assert message in refusal(lambda: load_local(str(directory)))


def test_unknown_vision_families_are_refused_by_name(copied):
    directory = copied("SmolVLM")
    change(directory / "config.json", model_type="llava")
    assert "type 'llava' are not supported; supported types: qwen2_vl" in refusal(lambda: load_local(str(directory)))
