#!/usr/bin/env bash
# Installs what the CPU tests need into .venv and runs lint, types and every test that needs no GPU.
# Arguments go to pytest: bash tests/run.sh tests/nvfp4
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
QERL_EXTRAS=dev
source recipes/quickstart/install.sh
qerl_install "$root"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright
"$PYTHON" -m pytest -q --durations=15 "$@"
