"""From the name of a policy to a policy.

A name is ``random``, ``oracle``, ``tiny``, ``tiny-teacher``, a model directory, a cell's or checkpoint's directory, a
Hugging Face hub id, or ``api:MODEL@BASE_URL``. Everything that can be checked without loading a model or calling
anybody is checked first, in one line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import Precision
from harness.contracts import AgentEnv, HarnessError, Prompt, unknown
from harness.policy.api import PREFIX as API
from harness.policy.api import USUAL, ApiPolicy, Calls, check_endpoint
from harness.policy.base import Policy

if TYPE_CHECKING:
    from harness.policy.local import LocalPolicy

log = logging.getLogger(__name__)

SCRIPTED = ("random", "oracle")
PACKAGED = ("tiny", "tiny-teacher")
MODELS = Path(__file__).resolve().parents[1] / "models"
WEIGHTS = "model.safetensors"
PROCESSOR = "processor_config.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
"""Where vision-language models used to keep it."""
INDEX = "model.safetensors.index.json"
MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PROBE = "Go on: take mug 12."
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_policy(
    spec: str,
    env: AgentEnv,
    device: str = "",
    precision: Precision = "float32",
    trained: bool = False,
    calls: Calls = USUAL,
) -> Policy:
    """Build the policy a user named.

    Args:
        spec: See the module's docstring.
        env: Scripted policies word their answers through it.
        device: A torch device, e.g. ``"cpu"`` or ``"cuda:0"``; empty takes a GPU where there is one.
        precision: What a model computes in, whatever its files hold (:mod:`harness.policy.precision`).
        trained: Whether its weights, all of them, will be trained.
        calls: How an endpoint is called.

    Raises:
        HarnessError: There is no such policy, or its files are missing or broken.
    """
    if spec in SCRIPTED:
        from harness.policy.scripted import OraclePolicy, RandomPolicy

        return RandomPolicy(env) if spec == "random" else OraclePolicy(env)
    if spec.startswith(API):
        return ApiPolicy(spec, calls)
    policy = load_local(spec, device, "float32", rounded=precision == "bfloat16" and not trained)
    policy.compute_in(precision, trained)
    return policy


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
    if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
        return _inside(path)
    if os.path.exists(path):
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
        _check_image_processor(directory)
    if (directory / INDEX).is_file():
        shards = sorted(set(_read_json(directory, INDEX).get("weight_map", {}).values()), key=str)
    else:
        shards = [WEIGHTS]
    for shard in shards:
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise HarnessError(f"{directory / INDEX} is damaged: {shard!r} is no weight file beside it")
        if not (directory / shard).is_file() and (pickled := next(directory.glob("*.bin"), None)):
            raise HarnessError(f"{pickled} may hold code and is not read: save the weights as {WEIGHTS}")
        _check_safetensors(directory, shard)


def _check_image_processor(directory: Path) -> None:
    """An image processor is described in a file of its own, or within that of the processor of text and images."""
    if (directory / PROCESSOR).is_file() and "image_processor" in _read_json(directory, PROCESSOR):
        return
    _read_json(directory, "preprocessor_config.json")


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


def _bfloat16_only(directory: Path) -> bool:
    """Whether the weight files hold bfloat16 and nothing else."""
    from safetensors import safe_open

    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(name).get_dtype() != "BF16" for name in file.keys()):  # noqa: SIM118
                return False
    return True


def load_local(spec: str, device: str = "", dtype: str = "auto", rounded: bool = False) -> LocalPolicy:
    """Load a model of transformers from a packaged name, a directory or a hub id; see ``load_policy``.

    Args:
        dtype: Type of the weights; ``"auto"`` is the one that the model's configuration names.
        rounded: Round the layers' weights to bfloat16 before they go to the device.
    """
    directory = model_directory(spec)
    check_model_files(directory)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

    from harness.policy.architecture import check_architecture
    from harness.policy.chat import rendered_ids
    from harness.policy.families import vision_family
    from harness.policy.local import STYLE_FILE, LocalPolicy
    from harness.policy.precision import hold_rounded

    config = _read_json(directory, "config.json")
    sees = vision_family(str(config.get("model_type"))) if "vision_config" in config else None
    family = AutoModelForCausalLM if sees is None else AutoModelForImageTextToText
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise HarnessError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from error
    try:
        # Not AutoTokenizer: for some model types it replaces what tokenizer.json says by the type's own rules.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        if sees is not None and (directory / OLD_TEMPLATE).is_file() and not (directory / TEMPLATE).is_file():
            tokenizer.chat_template = _read_json(directory, OLD_TEMPLATE).get("chat_template")
        processor = None if sees is None else sees[1].from_pretrained(directory)
        if rounded and _bfloat16_only(directory):
            dtype = "bfloat16"  # the same numbers in half the memory
        model, report = family.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,  # code that a model brings along is never run
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise HarnessError(f"cannot load the model in {directory}: {str(error).strip().splitlines()[0]}") from error
    wrong = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if wrong:
        raise HarnessError(f"the weights in {directory} do not fit its config.json, e.g. {wrong[0]}")
    check_architecture(model)
    if rounded:
        hold_rounded(model)
    style = "paper"
    if (directory / STYLE_FILE).is_file():
        style = str(_read_json(directory, STYLE_FILE).get("prompt_style", style))
    if style not in ("paper", "compact"):
        raise unknown(f"prompt_style in {directory / STYLE_FILE}", style, ("paper", "compact"))
    policy = LocalPolicy(model.to(target), tokenizer, processor, spec, style)
    if tuple(policy.encode(Prompt(PROBE)).ids.tolist()) != rendered_ids(tokenizer, PROBE, sees is not None):
        log.warning("%s: prompts are not cut into quite the tokens that the chat template as a whole would give", spec)
    return policy
