# Sourced: makes <repo>/.venv and installs the package into it, once per content of pyproject.toml.
# Sets PYTHON. QERL_PYTHON names an interpreter that has everything already; then nothing is installed.
# QERL_EXTRAS adds extras, for example QERL_EXTRAS=dev.

qerl_install() {
    local root=$1 extras=${QERL_EXTRAS:-} base stamp key
    if [[ -n ${QERL_PYTHON:-} ]]; then
        PYTHON=$QERL_PYTHON
        return
    fi
    PYTHON=$root/.venv/bin/python
    stamp=$root/.venv/.qerl-installed${extras:+-$extras}
    if command -v nvidia-smi >/dev/null; then base=gpu; else base=cpu; fi
    key="$base $(cat "$root/pyproject.toml" "$root/verl_qerl/hydra_plugin.py" | sha256sum)"  # what an editable install copies
    if [[ -x $PYTHON && -f $stamp && $(<"$stamp") == "$key" ]]; then
        return
    fi
    if [[ ! -x $PYTHON ]]; then
        "${QERL_BASE_PYTHON:-$(qerl_find_python)}" -m venv "$root/.venv"
    fi
    "$PYTHON" -m pip install --quiet --upgrade pip
    if [[ $base == cpu ]]; then
        "$PYTHON" -m pip install torch==2.13.0
    fi
    "$PYTHON" -m pip install -e "$root[$base${extras:+,$extras}]"
    if [[ $base == cpu ]]; then
        # Their wheels are built for CUDA and break `import vllm` next to a torch for the CPU; nothing here needs them.
        "$PYTHON" -m pip uninstall --quiet -y torchvision torchaudio torchcodec
    fi
    printf '%s\n' "$key" >"$stamp"
}

# verl 0.9.1 takes Python 3.10 to 3.12.
qerl_find_python() {
    local name
    for name in python3.12 python3.11 python3.10 python3; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "no interpreter was found: python=none. Python 3.10 to 3.12 is accepted. Set QERL_BASE_PYTHON." >&2
    return 1
}
