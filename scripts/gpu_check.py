"""Measure one GPU on models with random weights: rollout, scoring, update, memory, rounding. No downloads.

Run it as ``scripts/gpu_check.sh``. What does not fit in time or memory is skipped, and said so. Shares of the peak
count FLOPs as the ledger does (2 x parameters x tokens forward, prompts included, 6 x trained, 4 x with adapters)
against the fastest matrix product that was measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from harness.cards import Ledger
from harness.config import LoraConfig, Precision, TrainConfig
from harness.contracts import HarnessError, Prompt
from harness.methods import get_method
from harness.policy.base import Request, Sampling
from harness.policy.load import load_local
from harness.policy.local import LocalPolicy
from harness.policy.lora import add_adapters
from harness.policy.tiny import END, IMAGE, PAD, PATCH, VIDEO, VISION_END, VISION_START
from harness.provenance import machine, versions
from harness.rows import Row
from harness.trainer import Trainer

BOUNDS: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""By how many nats a token's score may depend on the rows beside it."""
ENOUGH = 45.0
"""Seconds that must be left for a part to begin."""
GROUP = 8


@dataclass(frozen=True)
class Load:
    """How much work the parts do.

    Attributes:
        words: Random numbers in a prompt, about two tokens each.
        side: Of the picture in a prompt, in pixels.
        answer: Tokens of an answer.
        batches: Answers that grow at once; the last is the number of rows of an update.
        token_budget: Tokens of a micro-batch.
        matrix: Side of the matrices whose product is taken for the peak.
    """

    words: int
    side: int
    answer: int
    batches: tuple[int, ...]
    token_budget: int
    matrix: int


LOADS = {"full": Load(300, 252, 96, (8, 32, 128), 16384, 8192), "tiny": Load(10, 56, 6, (2, 8), 512, 256)}


@dataclass
class Result:
    """What was measured of one model; memory in bytes, scores in nats."""

    name: str
    parameters: int = 0
    rollout_tokens_per_second: dict[int, float] = field(default_factory=dict)
    scoring_tokens_per_second: float = 0.0
    update_tokens_per_second: dict[str, float] = field(default_factory=dict)
    peak_memory: dict[str, float] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    share_of_peak: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


class Bench:
    """A device, the time that is left, and how large things are."""

    def __init__(self, size: str, device: torch.device, seconds: float) -> None:
        self.size, self.load, self.device = size, LOADS[size], device
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds that work takes, up to the end of what it started on the device."""
        self.finish()
        begin = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - begin

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give memory back, and count its peak anew."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> float:
        return float(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else 0.0

    def attempt(self, result: Result, name: str, work: Callable[[], None]) -> None:
        """A part of the check; one that finds no time or memory is skipped, and says so."""
        self.free()
        why = f"{self.left:.0f} s left" if self.left < ENOUGH else ""
        begin = time.perf_counter()
        if not why:
            try:
                work()
            except torch.cuda.OutOfMemoryError:
                why = "out of memory"
            except HarnessError as error:
                why = str(error)
        if why:
            result.skipped.append(f"{name}: {why}")
        result.peak_memory[name] = self.peak_memory()
        outcome = f"SKIPPED, {why}" if why else f"{time.perf_counter() - begin:.1f} s"
        print(f"{result.name}: {name}: {outcome}", flush=True)


def main() -> int:
    """Measure, write JSON and a table; 1 where scores depend on their batch by more than the bounds."""
    parser = argparse.ArgumentParser(description="Measure one GPU on models with random weights.")
    parser.add_argument("--size", choices=list(LOADS), default="full", help="tiny: toy models, also on a CPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="time in all (default 7)")
    parser.add_argument("--out", type=Path, help="default results/gpu-check.json, or gpu-check-tiny.json")
    options = parser.parse_args()
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes must be a number above 0, not {options.minutes:g}")
    out: Path = options.out or Path(f"results/gpu-check{'' if options.size == 'full' else '-tiny'}.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        if options.size == "full":
            print("gpu_check: torch sees no GPU; --size tiny runs on a CPU")
            return 2
        torch.set_num_threads(1)
    bench = Bench(options.size, device, 60 * options.minutes)
    peak = matrix_peak(bench)
    results = [check(name, bench, peak) for name in ("Qwen3-0.6B", "Qwen2.5-VL-3B")]
    complete = [result for result in results if len(result.share_of_peak) == 3]  # an estimate needs all three
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    report = {
        "device": properties.name if properties else "CPU",
        "memory_bytes": properties.total_memory if properties else 0,
        "peak_flops": peak,
        "size": options.size,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "load": asdict(bench.load),
        "models": [asdict(result) for result in complete],
        "incomplete": [asdict(result) for result in results if result not in complete],
    }
    text = table(str(report["device"]), peak, bench.load, results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    out.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwrote {out} and {out.with_suffix('.md')}")
    differences = [(r.rounding.get(f"batch, {kind}", 0.0), most) for r in results for kind, most in BOUNDS.items()]
    return 0 if all(found <= most for found, most in differences) else 1


def check(name: str, bench: Bench, peak: float) -> Result:
    """Everything about one model, as far as time and memory reach."""
    result, rows = Result(name), list[Row]()
    config = TrainConfig(kl=0.0, token_budget=bench.load.token_budget, gradient_checkpointing=True)

    def play(policy: LocalPolicy) -> None:
        for batch in bench.load.batches:
            requests = requests_for(policy, batch, bench.load)
            policy.generate(requests[:2], Sampling(1.0, 4))
            answers: list[Any] = []
            sampling = Sampling(1.0, bench.load.answer)
            spent = bench.seconds(lambda: answers.extend(policy.generate(requests, sampling)))  # noqa: B023
            sampled = sum(len(answer.token_ids) for answer in answers)
            read = sum(policy.prompt_tokens(request.prompt) for request in requests)
            result.rollout_tokens_per_second[batch] = sampled / spent
            result.share_of_peak["sampling"] = 2.0 * policy.parameters * (read + sampled) / spent / peak
            rows[:] = [
                Row(request.prompt, answer.token_ids, answer.logprobs, i, i // GROUP, 1.0 - 2 * (i % 2))
                for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
            ]

    def score(policy: LocalPolicy) -> None:
        with torch.no_grad():
            policy.score(pairs_of(rows[:2]))
            spent = bench.seconds(lambda: policy.score(pairs_of(rows)))
        result.scoring_tokens_per_second = tokens_of(policy, rows) / spent
        result.share_of_peak["scoring"] = 2.0 * policy.parameters * result.scoring_tokens_per_second / peak

    def update(policy: LocalPolicy, what: str) -> None:
        trainer = Trainer(policy, get_method("grpo"), config, seed=0)
        trainer.update(rows[:2], 1, Ledger())  # makes the optimizer's state
        spent = bench.seconds(lambda: trainer.update(rows, 2, Ledger()))
        result.update_tokens_per_second[what] = tokens_of(policy, rows) / spent

    def read_only() -> None:
        policy = build(name, bench)
        result.parameters = policy.parameters
        policy.compute_in("bfloat16", trained=True)
        bench.attempt(result, "rollout", lambda: play(policy))
        if rows:
            bench.attempt(result, "scoring", lambda: score(policy))
            bench.attempt(result, "rounding", lambda: result.rounding.update(rounding(policy, rows[:8])))

    def adapters() -> None:
        policy = build(name, bench)
        policy.compute_in("bfloat16")
        add_adapters(policy, LoraConfig(), (0,))
        update(policy, "adapters")

    def all_weights() -> None:
        policy = build(name, bench)
        policy.compute_in("bfloat16", trained=True)
        update(policy, "all weights")
        trained = 6.0 * policy.parameters * result.update_tokens_per_second["all weights"]
        result.share_of_peak["training"] = trained / peak

    bench.attempt(result, "reading", read_only)
    if rows:
        bench.attempt(result, "update of adapters", adapters)
        bench.attempt(result, "update of all weights", all_weights)
    return result


# ---------------------------------------------------------------------------------------------------- pieces


def matrix_peak(bench: Bench) -> float:
    """FLOP/s of the fastest of five bfloat16 matrix products."""
    side = bench.load.matrix
    a, b = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    torch.matmul(a, b)
    return max(2.0 * side**3 / bench.seconds(lambda: torch.matmul(a, b)) for _ in range(5))


def build(name: str, bench: Bench) -> LocalPolicy:
    """A model of that size with random weights in float32; its tokenizer is the embedded policy's."""
    tokenizer = load_local("tiny", "cpu").tokenizer
    pieces = (END, PAD, IMAGE, VIDEO, VISION_START, VISION_END)
    ids = {piece: tokenizer.convert_tokens_to_ids(piece) for piece in pieces}
    full = bench.size == "full"
    vocabulary = 151_936 if full else len(tokenizer)
    common = {"vocab_size": vocabulary, "eos_token_id": ids[END], "pad_token_id": ids[PAD], "bos_token_id": None}
    common |= {"tie_word_embeddings": True}
    torch.manual_seed(0)
    with torch.device(bench.device):
        if name == "Qwen3-0.6B":
            text = dimensions(1024, 28, 16, 8, 3072) if full else dimensions(32, 2, 4, 2, 64)
            model: Any = Qwen3ForCausalLM(Qwen3Config(**common, **text, head_dim=128 if full else 8))
            return LocalPolicy(model, tokenizer, None, name)
        text = dimensions(2048, 36, 16, 2, 11008) if full else dimensions(32, 2, 4, 2, 64)
        sections = [16, 24, 24] if full else [2, 1, 1]
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
        tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
        toy = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
        config = Qwen2_5_VLConfig(
            text_config={**common, **text},
            vision_config=tower if full else {**toy, "fullatt_block_indexes": [0, 1]},
            image_token_id=ids[IMAGE],
            video_token_id=ids[VIDEO],
            vision_start_token_id=ids[VISION_START],
            vision_end_token_id=ids[VISION_END],
            tie_word_embeddings=True,
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
    edge = bench.load.side + 2 * PATCH
    processor = Qwen2VLImageProcessorPil(min_pixels=4 * PATCH**2, max_pixels=edge**2, patch_size=PATCH, merge_size=2)
    return LocalPolicy(model, tokenizer, processor, name)


def dimensions(width: int, layers: int, heads: int, key_value_heads: int, mlp: int) -> dict[str, Any]:
    """Settings of a decoder."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip(names, (width, layers, heads, key_value_heads, mlp), strict=True))


def requests_for(policy: LocalPolicy, count: int, load: Load) -> list[Request]:
    """Distinct prompts of random numbers, with a picture where the policy sees."""
    rng = np.random.default_rng(count)
    requests = []
    for i in range(count):
        text = " ".join(map(str, rng.integers(1000, size=load.words)))
        pictures: tuple[Any, ...] = ()
        if policy.image_processor is not None:
            text = f"<image>{text}"
            pictures = (rng.integers(0, 256, (load.side, load.side, 3), dtype=np.uint8),)
        requests.append(Request(Prompt(text, pictures), (count, i)))
    return requests


def rounding(policy: LocalPolicy, rows: Sequence[Row]) -> dict[str, float]:
    """How far bfloat16 scores are from float32 ones, and scores in a batch from scores alone: nats a token."""
    pairs, together, found = pairs_of(rows), dict[str, torch.Tensor](), dict[str, float]()
    for kind in BOUNDS:
        policy.compute_in(kind, trained=True)
        with torch.no_grad():
            together[kind] = policy.score(pairs).logprobs
            alone = torch.cat([policy.score([pair]).logprobs for pair in pairs])
        found[f"batch, {kind}"] = (together[kind] - alone).abs().max().item()
    gap = (together["bfloat16"] - together["float32"]).abs()
    return {**found, "bfloat16, mean": gap.mean().item(), "bfloat16, largest": gap.max().item()}


def pairs_of(rows: Sequence[Row]) -> list[tuple[Prompt, tuple[int, ...]]]:
    return [(row.prompt, row.response) for row in rows]


def tokens_of(policy: LocalPolicy, rows: Sequence[Row]) -> int:
    return sum(policy.prompt_tokens(row.prompt) + len(row.response) for row in rows)


def table(device: str, peak: float, load: Load, results: Sequence[Result]) -> str:
    """The results as a markdown table."""
    lines = [
        f"{device}: {peak / 1e12:,.3g} TFLOP/s in a bfloat16 product of {load.matrix}² matrices. Prompts of "
        f"{load.words} words, answers of {load.answer} tokens, micro-batches of {load.token_budget:,} tokens.",
        "",
        f"| | {' | '.join(result.name for result in results)} |",
        f"|:--|{'--:|' * len(results)}",
    ]

    def row(what: str, value: Callable[[Result], float | None], form: str = ",.0f") -> None:
        values = [value(result) for result in results]
        lines.append(f"| {what} | {' | '.join('-' if v is None else format(v, form) for v in values)} |")

    row("parameters, millions", lambda r: r.parameters / 1e6)
    for batch in load.batches:
        row(f"sampled tokens/s, {batch} answers at once", lambda r, b=batch: r.rollout_tokens_per_second.get(b))  # type: ignore[misc]
    row("scored tokens/s", lambda r: r.scoring_tokens_per_second)
    for what in ("all weights", "adapters"):
        row(f"trained tokens/s, {what}", lambda r, w=what: r.update_tokens_per_second.get(w))  # type: ignore[misc]
    for kind in ("sampling", "scoring", "training"):
        row(f"share of the peak, {kind}", lambda r, k=kind: r.share_of_peak.get(k), ".1%")  # type: ignore[misc]
    for name in ("rollout", "scoring", "update of all weights", "update of adapters"):
        row(f"peak GB, {name}", lambda r, n=name: r.peak_memory.get(n, 0.0) / 1e9, ".1f")  # type: ignore[misc]
    for name in ("bfloat16, mean", "bfloat16, largest", "batch, float32", "batch, bfloat16"):
        row(f"score differs by (nats): {name}", lambda r, n=name: r.rounding.get(n), ".2g")  # type: ignore[misc]
    skipped = [f"- {result.name}, {line}" for result in results for line in result.skipped]
    return "\n".join([*lines, *(["", "Skipped:", *skipped] if skipped else []), ""])


if __name__ == "__main__":
    raise SystemExit(main())
