"""From the name of a policy to a policy.

A name is ``random``, ``oracle``, ``tiny``, ``tiny-teacher``, a model directory, a cell's or checkpoint's directory, a
Hugging Face hub id, or ``api:MODEL@BASE_URL``. Everything that can be checked without loading a model or calling
anybody is checked first, in one line.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.contracts import AgentEnv, HarnessError, unknown
from harness.policy.api import PREFIX as API
from harness.policy.api import USUAL, ApiPolicy, Calls, check_endpoint
from harness.policy.base import Policy

if TYPE_CHECKING:
    from harness.policy.local import LocalPolicy

SCRIPTED = ("random", "oracle")
PACKAGED = ("tiny", "tiny-teacher")
MODELS = Path(__file__).resolve().parents[1] / "models"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_policy(spec: str, env: AgentEnv, device: str = "", dtype: str = "auto", calls: Calls = USUAL) -> Policy:
    """Build the policy a user named.

    Args:
        spec: See the module's docstring.
        env: Scripted policies word their answers through it.
        device: A torch device, e.g. ``"cpu"`` or ``"cuda:0"``; empty takes a GPU where there is one.
        dtype: Type of the weights; ``"auto"`` keeps the files' own.
        calls: How an endpoint is called.

    Raises:
        HarnessError: There is no such policy, or its files are missing or broken.
    """
    if spec in SCRIPTED:
        from harness.policy.scripted import OraclePolicy, RandomPolicy

        return RandomPolicy(env) if spec == "random" else OraclePolicy(env)
    if spec.startswith(API):
        return ApiPolicy(spec, calls)
    return load_local(spec, device, dtype)


def check_policy_spec(spec: str) -> str:
    """Check a name and the files behind it without loading a model; returns a SHA-256 over those files (of an
    endpoint, over model name and URL).

    Raises HarnessError as ``load_policy`` would.
    """
    if spec in SCRIPTED:
        return f"{spec}-1"
    if spec.startswith(API):
        return check_endpoint(spec)
    directory = model_directory(spec)
    check_model_files(directory)
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in MODEL_FILES and path.name != "manifest.json":
            with path.open("rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def trainable(spec: str) -> bool:
    """Whether a name stands for a model whose weights are at hand."""
    return spec not in SCRIPTED and not spec.startswith(API)


def model_directory(spec: str) -> Path:
    """Where the files of a packaged policy, a directory, a cell or a hub id lie; hub ids are downloaded."""
    if spec in PACKAGED:
        if not (MODELS / spec).is_dir():
            raise HarnessError(f"the packaged policy {spec!r} has not been built; run: harness build-policy {spec}")
        return MODELS / spec
    path = Path(spec).expanduser()
    if path.is_dir():
        return _inside(path)
    if path.exists():
        raise HarnessError(f"policy {spec!r} is a file; name the model directory it lies in")
    if HUB_ID.fullmatch(spec):
        return _download(spec)
    if "/" in spec or spec.startswith((".", "~")):
        raise HarnessError(f"no policy directory at {spec!r}")
    raise unknown("policy", spec, (*SCRIPTED, *PACKAGED))


def _inside(path: Path) -> Path:
    """The model directory in a cell's or checkpoint's directory: the final or latest weights; else the path itself."""
    if not (path / "policy").is_dir() and (path / "checkpoints").is_dir():
        numbered = [entry for entry in (path / "checkpoints").iterdir() if entry.name.isdecimal()]
        if not numbered:
            raise HarnessError(f"{path} holds no checkpoint yet")
        path = max(numbered, key=lambda entry: int(entry.name))
    return path / "policy" if (path / "policy").is_dir() else path


def _download(spec: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(spec, allow_patterns=[f"*{suffix}" for suffix in MODEL_FILES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise HarnessError(f"{spec!r} is neither a directory nor available from the hub: {reason}") from error


def check_model_files(directory: Path) -> None:
    """Raise HarnessError, naming the file, where a model directory is incomplete or damaged."""
    config = _read_json(directory, "config.json")
    _read_json(directory, "tokenizer.json")
    if "vision_config" in config:
        _read_json(directory, "preprocessor_config.json")
    if (directory / INDEX).is_file():
        shards = sorted(set(_read_json(directory, INDEX).get("weight_map", {}).values()))
    else:
        shards = [WEIGHTS]
    for shard in shards:
        _check_safetensors(directory, shard)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    if not path.is_file():
        raise HarnessError(f"{directory} is not a model directory: {name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HarnessError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise HarnessError(f"{path} is damaged: it must hold a JSON object")
    return content


def _check_safetensors(directory: Path, name: str) -> None:
    """The header must parse and the file must be exactly as long as it says."""
    path = directory / name
    if not path.is_file():
        raise HarnessError(f"{directory} is not a model directory: {name} is missing")
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size:
            raise HarnessError(f"{path} is damaged: its header is cut off")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise HarnessError(f"{path} is damaged: its header cannot be read") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise HarnessError(f"{path} is damaged: {size} bytes instead of {expected}")


def load_local(spec: str, device: str = "", dtype: str = "auto") -> LocalPolicy:
    """Load a model of transformers from a packaged name, a directory or a hub id; see ``load_policy``."""
    directory = model_directory(spec)
    check_model_files(directory)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from harness.policy.local import STYLE_FILE, LocalPolicy, check_architecture

    vision = "vision_config" in _read_json(directory, "config.json")
    family = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise HarnessError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from error
    try:
        # Not AutoTokenizer: for some model types it replaces what tokenizer.json says by the type's own rules.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        processor = Qwen2VLImageProcessorPil.from_pretrained(directory) if vision else None
        model, report = family.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise HarnessError(f"cannot load the model in {directory}: {str(error).strip().splitlines()[0]}") from error
    wrong = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if wrong:
        raise HarnessError(f"the weights in {directory} do not fit its config.json, e.g. {wrong[0]}")
    check_architecture(model)
    style = "paper"
    if (directory / STYLE_FILE).is_file():
        style = str(_read_json(directory, STYLE_FILE).get("prompt_style", style))
    if style not in ("paper", "compact"):
        raise unknown(f"prompt_style in {directory / STYLE_FILE}", style, ("paper", "compact"))
    return LocalPolicy(model.to(target), tokenizer, processor, spec, style)
