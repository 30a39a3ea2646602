"""What samples the answers of a policy that is trained: the policy itself, or an engine beside it.

An engine has a copy of the weights, which ``load_weights`` renews after every update. Scoring and training stay with
the policy: kernels differ, so the log-probs that an engine reports are not quite the policy's own. The trainer scores
every answer again before it learns from it, and tells by how much they differ (:func:`harness.rows.rescored`).
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image

from harness.config import CellConfig, EngineConfig, longest_sequence
from harness.contracts import HarnessError, Prompt, Response, digest
from harness.policy.base import Policy, Request, Sampling
from harness.policy.encode import Encoded, Role
from harness.policy.load import model_directory
from harness.policy.local import LocalPolicy
from harness.validation import require_extra

MOST_BANNED = 1024
"""Logit biases that vLLM takes with a request."""
NEVER = -100.0
"""The lowest logit bias that vLLM takes: a banned token keeps a share of e^-100."""


class Engine(Policy):
    """Samples in a policy's place."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self.spec, self.prompt_style = policy.spec, policy.prompt_style

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.policy.fingerprint

    @property
    def parameters(self) -> int:
        return self.policy.parameters

    def prompt_tokens(self, prompt: Prompt) -> int:
        return self.policy.prompt_tokens(prompt)

    @abstractmethod
    def load_weights(self, policy: LocalPolicy) -> None:
        """Answer with the weights that ``policy`` has now, which shares tokenizer and architecture with the own."""

    def rest(self) -> None:
        """Give up the memory that can be done without until the next ``load_weights``; until then nothing is asked."""
        return

    def close(self) -> None:
        """Give up everything."""
        return


def check_engine(processes: int) -> None:
    """Raise HarnessError where vLLM cannot sample for so many processes here, before anything is loaded."""
    require_extra("engine.kind vllm", "vllm", "vllm")
    if processes > 1:
        raise HarnessError(
            f"engine.kind vllm samples for a single training process, and there are {processes}; "
            "use engine.tensor_parallel for several GPUs, or engine.kind local"
        )


def open_engine(cell: CellConfig, policy: Policy) -> Engine:
    """The engine that a cell asks for, with the policy's weights. Raises HarnessError for a policy without weights."""
    if not isinstance(policy, LocalPolicy):
        raise HarnessError(f"engine.kind {cell.engine.kind} runs models, and {policy.spec!r} is none")
    directory = model_directory(cell.policy)
    return VllmEngine(policy, directory, cell.engine, cell.precision, longest_sequence(cell))


class VllmEngine(Engine):
    """vLLM in this process's charge, written against the interface that vLLM 0.22 and later document.

    Prompts go as our token ids; what vLLM says that it read is compared with them. New weights go through a checkpoint
    in the directory for temporary files (``TMPDIR``), in the format that every model of vLLM can load.
    """

    def __init__(
        self, policy: LocalPolicy, directory: Path, config: EngineConfig, precision: str, longest: int
    ) -> None:
        super().__init__(policy)
        vllm: Any = importlib.import_module("vllm")
        banned = sorted(index for index in policy.banned_ids if index < policy.vocabulary)
        if len(banned) > MOST_BANNED:
            raise HarnessError(f"{policy.spec!r} bans {len(banned)} tokens, and vLLM takes at most {MOST_BANNED}")
        self._bias = dict.fromkeys(banned, NEVER)
        self._params = vllm.SamplingParams
        # Its cache of processed pictures is kept on two sides, of which sleep clears one.
        pictures = {} if policy.image_processor is None else {"mm_processor_cache_gb": 0}
        self._llm: Any = vllm.LLM(
            model=str(directory),
            dtype=precision,
            max_model_len=longest,
            gpu_memory_utilization=config.gpu_memory,
            tensor_parallel_size=config.tensor_parallel,
            enable_sleep_mode=True,
            logprobs_mode="processed_logprobs",  # of the distribution that was drawn from: bans and temperature applied
            generation_config="vllm",  # nothing is sampled by the model's own habits
            **pictures,
        )
        self._awake = True

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Answer every request, in order; equal keys give equal answers as far as vLLM repeats itself."""
        if not self._awake:
            raise ValueError("the engine rests; load weights first")
        if not requests:
            return []
        encoded = [self.policy.encode(request.prompt) for request in requests]
        outputs = self._llm.generate(
            [as_tokens_prompt(prompt) for prompt in encoded],
            [self._sampling(request, sampling) for request in requests],
            use_tqdm=False,
        )
        responses = []
        for prompt, output in zip(encoded, outputs, strict=True):
            if list(output.prompt_token_ids) != prompt.ids.tolist():
                raise HarnessError(
                    f"vLLM reads a prompt as {len(output.prompt_token_ids)} tokens that the trainer reads as other "
                    f"{len(prompt)}: it processes the pictures of {self.spec!r} otherwise; use engine.kind local"
                )
            responses.append(self._response(output.outputs[0]))
        return responses

    def _sampling(self, request: Request, sampling: Sampling) -> Any:
        return self._params(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=int(digest(list(request.key))[:8], 16) >> 1,
            logprobs=0,  # of the sampled token alone
            stop_token_ids=sorted(self.policy.eos_ids),
            logit_bias=self._bias,
            detokenize=False,
        )

    def _response(self, answer: Any) -> Response:
        ids = tuple(int(token) for token in answer.token_ids)
        logprobs = tuple(float(step[token].logprob) for token, step in zip(ids, answer.logprobs, strict=True))
        text = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
        return Response(text, ids, logprobs, finished=answer.finish_reason == "stop")

    def load_weights(self, policy: LocalPolicy) -> None:
        self.rest()  # also forgets what was computed with the old weights: prefixes and picture features
        with tempfile.TemporaryDirectory(prefix="harness-weights-") as place:
            checkpoint = Path(place, "policy")
            policy.save(checkpoint)
            self._llm.wake_up(tags=["weights"])
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
            self._llm.wake_up(tags=["kv_cache"])
        self._awake = True

    def rest(self) -> None:
        if self._awake:
            self._llm.sleep(level=2)
            self._awake = False

    def close(self) -> None:
        self._llm = None
        gc.collect()  # vLLM ends its processes when its last reference goes


def as_tokens_prompt(prompt: Encoded) -> Mapping[str, Any]:
    """A prompt in vLLM's ``TokensPrompt`` form.

    vLLM puts a picture's many tokens in the place of a single one, so each run of picture tokens is cut to its first.
    Raises HarnessError where pictures are not one run each.
    """
    first = [prompt.roles[i] != Role.IMAGE or prompt.roles[i - 1] != Role.IMAGE for i in range(len(prompt))]
    ids = prompt.ids[first].tolist()
    if not prompt.pictures:
        return {"prompt_token_ids": ids}
    runs = int((prompt.roles[first] == Role.IMAGE).sum())
    if runs != len(prompt.pictures):
        raise HarnessError(
            f"{len(prompt.pictures)} pictures take {runs} runs of tokens here, and vLLM takes one each; "
            "use engine.kind local"
        )
    pictures = [PIL.Image.fromarray(picture.image) for picture in prompt.pictures]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
