#!/usr/bin/env bash
# What this GPU does with models of the sizes that the paper trains; under 8 minutes, offline, random weights.
#
#   scripts/gpu_check.sh                 writes results/gpu-check.json and results/gpu-check.md
#   scripts/gpu_check.sh --size tiny     the same on a CPU with toy models, to see that it works
#
# `harness run RECIPE --dry-run` reads the JSON file and bases its GPU hours on it.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
[ -x .venv/bin/python ] && own=.venv/bin/python || own=python
exec "${PYTHON:-$own}" scripts/gpu_check.py "$@"
