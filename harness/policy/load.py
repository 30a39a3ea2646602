"""From the name of a policy to a policy.

A name is ``random``, ``oracle``, ``tiny``, ``tiny-teacher``, a model directory, a cell's or checkpoint's directory, a
Hugging Face hub id, or ``api:MODEL@BASE_URL``. Everything that can be checked without loading a model or calling
anybody is checked first, in one line.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config import Precision
from harness.contracts import AgentEnv, HarnessError, Prompt, unknown
from harness.policy.api import PREFIX as API
from harness.policy.api import USUAL, ApiPolicy, Calls, check_endpoint
from harness.policy.base import Policy
from harness.policy.files import (
    MODEL_FILES,
    OLD_TEMPLATE,
    TEMPLATE,
    check_model_files,
    read_json,
    tensors_in,
    weight_files,
)

if TYPE_CHECKING:
    from harness.policy.local import LocalPolicy

log = logging.getLogger(__name__)

SCRIPTED = ("random", "oracle")
PACKAGED = ("tiny", "tiny-teacher")
MODELS = Path(__file__).resolve().parents[1] / "models"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PROBE = "Go on: take mug 12."


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
    policy = load_local(spec, device, rounded=precision == "bfloat16" and not trained)
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


def load_local(spec: str, device: str = "", rounded: bool = False) -> LocalPolicy:
    """Load a model of transformers, in float32, from a packaged name, a directory or a hub id; see ``load_policy``.

    ``rounded`` rounds the layers' weights to bfloat16 before they go to the device.
    """
    directory = model_directory(spec)
    check_model_files(directory)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

    from harness.policy.architecture import check_architecture
    from harness.policy.chat import rendered_ids
    from harness.policy.families import vision_family
    from harness.policy.local import STYLE_FILE, LocalPolicy
    from harness.policy.precision import hold_rounded

    config = read_json(directory, "config.json")
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
            tokenizer.chat_template = read_json(directory, OLD_TEMPLATE).get("chat_template")
        processor = None if sees is None else sees[1].from_pretrained(directory)
        stored = {entry["dtype"] for path in weight_files(directory) for entry in tensors_in(path).values()}
        halved = rounded and stored == {"BF16"}  # the same numbers in half the memory
        model, report = family.from_pretrained(
            directory,
            dtype="bfloat16" if halved else "float32",
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
    bad = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if bad is not None:
        raise HarnessError(f"the weights in {directory} are not finite, e.g. {bad}")
    check_architecture(model)
    if rounded:
        hold_rounded(model)
    style = "paper"
    if (directory / STYLE_FILE).is_file():
        style = str(read_json(directory, STYLE_FILE).get("prompt_style", style))
    if style not in ("paper", "compact"):
        raise unknown(f"prompt_style in {directory / STYLE_FILE}", style, ("paper", "compact"))
    policy = LocalPolicy(model.to(target), tokenizer, processor, spec, style)
    if tuple(policy.encode(Prompt(PROBE)).ids.tolist()) != rendered_ids(tokenizer, PROBE, sees is not None):
        log.warning("%s: prompts are not cut into quite the tokens that the chat template as a whole would give", spec)
    return policy
