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
export PYTHONPATH=$root/tests/startup${PYTHONPATH:+:$PYTHONPATH}  # imports take a fifth less

lint() {
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m pyright
}

run_pytest() {
    "$PYTHON" -m pytest -q --durations=15 "$@"
}

if (($#)); then
    lint
    run_pytest "$@"
    exit
fi

# Two processes that take about as long. Runs of verl, benchmarks and patches are chains of processes that
# wait for each other's imports: they take one core and a little. The other tests run beside them, and need no threads
# for their small tensors, which would wait for a core. Those of sanity are where they make both take as long.
export OMP_NUM_THREADS=1
log=$(mktemp)
set -m  # a process group, which goes with this script
chained=(tests/e2e tests/bench tests/patches tests/sanity)
run_pytest "${chained[@]}" >"$log" 2>&1 &
chains=$!
set +m
trap 'kill -- "-$chains" 2>/dev/null || true; rm -f "$log"' EXIT
lint
failed=0
run_pytest tests "${chained[@]/#/--ignore=}" || failed=1
echo "${chained[*]}:"
wait "$chains" || failed=1
cat "$log"
exit "$failed"
