"""No foreign code runs: what the package may not call, what a model directory may not bring along, who may listen."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.contracts import HarnessError
from harness.policy.load import MODELS, load_local

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path for folder in ("harness", "envs_text", "envs_vision", "scripts") for path in (ROOT / folder).rglob("*.py")
)

FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "dill.load", "marshal.loads", "shelve.open",
    "pandas.read_pickle",
}  # fmt: skip
FORMULA = "envs_vision/ezpoints/rules.py"
"""Evaluates arithmetic made of numbers, brackets and four operators, without any name in reach."""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))


def given(call: ast.Call, name: str) -> object:
    """The literal value of a keyword; None where there is none."""
    found = [word.value for word in call.keywords if word.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_the_package_runs_what_it_reads(path: Path) -> None:
    for call in calls(path):
        name = ast.unparse(call.func)
        where = f"{path}:{call.lineno}: {name}"
        assert name not in FORBIDDEN_CALLS or (name == "eval" and str(path).endswith(FORMULA)), where
        assert name != "torch.load" or given(call, "weights_only") is True, where
        assert not given(call, "trust_remote_code"), where
        assert not given(call, "shell"), where
        assert not given(call, "allow_pickle"), where
        if (
            name.endswith("from_pretrained")
            and re.match(r"(family|Auto\w*Model\w*)\.", name)
            and "scripts" not in str(path)
        ):
            assert given(call, "use_safetensors") is True, where
    assert not re.search(r"import (pickle|dill|marshal|shelve|joblib)\b|0\.0\.0\.0", path.read_text(encoding="utf-8"))


def test_the_arithmetic_of_ezpoints_reaches_no_name() -> None:
    from envs_vision.ezpoints import rules

    source = (ROOT / FORMULA).read_text()
    assert '{"__builtins__": {}}' in source
    assert rules


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded policy to tamper with."""
    place = tmp_path / "model"
    shutil.copytree(MODELS / "tiny", place)
    return place


def test_weights_that_may_hold_code_are_not_read(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(HarnessError, match=r"pytorch_model\.bin may hold code and is not read"):
        load_local(str(model))


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/tmp/x.safetensors", "weights.bin", "a/b.safetensors", 7])
def test_an_index_names_weight_files_beside_it(model: Path, shard: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(HarnessError, match="no weight file beside it"):
        load_local(str(model))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "not_a_type"])
def test_code_that_a_model_brings_along_is_never_run(model: Path, model_type: str, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoTokenizer")
    config |= {"model_type": model_type, "auto_map": dict.fromkeys(classes, "evil.Evil")}
    if model_type == "not_a_type":
        del config["vision_config"]
    (model / "config.json").write_text(json.dumps(config))
    trap = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(trap)!r}, 'w')\nclass Evil: pass\n")
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        if (model / name).is_file():
            settings = json.loads((model / name).read_text())
            (model / name).write_text(json.dumps(settings | {"auto_map": config["auto_map"]}))
    with pytest.raises(HarnessError, match="cannot load") if model_type == "not_a_type" else nullcontext():
        load_local(str(model))
    assert not trap.exists()


def test_a_chat_template_reaches_no_python(model: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0]['content'] }}" + f"{{# {trap} #}}"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = model / name
        if name.endswith("jinja"):
            path.write_text(template)
        elif path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(HarnessError, match="chat template"):
        load_local(str(model))


def test_the_retrieval_server_listens_on_this_machine_alone() -> None:
    import argparse

    from envs_text.search_qa import server

    parser = argparse.ArgumentParser()
    server.command(parser)
    assert parser.get_default("host") == "127.0.0.1"


def test_keys_are_no_setting() -> None:
    """A key that no recipe, manifest or record has a field for cannot be written there."""
    from harness.config import CellConfig, Recipe

    fields = {
        name for model in (CellConfig, Recipe) for name in json.dumps(model.model_json_schema()).lower().split('"')
    }
    assert not {name for name in fields if re.search(r"api_?key|password|secret|credential", name)}
