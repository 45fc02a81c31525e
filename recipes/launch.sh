# Sourced by the run_*.sh of every recipe, with their arguments: runs the doctor, then verl with RECIPE_DIR's config.yaml,
# the options in TWIN and the arguments. Variables: README.md, Use.

# verl's default needs flash-attn, which `.[gpu]` does not install. Runs with an option of ours do without it by
# themselves; the control run has none, and is told to.
ATTENTION=()
if ! python3 -c 'import flash_attn' >/dev/null 2>&1; then
    ATTENTION=(++actor_rollout_ref.model.override_config.attn_implementation=verl_qerl_varlen)
fi

# The ablation without noise has a name of its own: under QeRL's it would resume QeRL's last step and train nothing.
NOISE=""
for argument in "$@"; do
    case "${argument,,}" in
        *aqn.enabled=false) NOISE=_nonoise ;;
        *aqn.enabled=true) NOISE="" ;;
    esac
done

# verl empties its file of metrics at every start, also when it resumes: each start gets a folder. Ray's workers write
# it, and those of a running cluster do not see variables of this shell.
METRICS=${VERL_FILE_LOGGER_ROOT:-$PWD/metrics/$(date +%Y%m%d_%H%M%S)}

# verl hides an entry point that fails to import; a module named here fails loudly.
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-verl_qerl.verl_plugin}
if [[ ${DRY_RUN:-0} != 0 ]]; then
    set -- "$@" --cfg job
else
    python3 -m verl_qerl doctor
fi
source "$RECIPE_DIR/../quoted.sh"
exec python3 -m verl.trainer.main_ppo --config-dir "$RECIPE_DIR" --config-name config \
    data.train_files="$(quoted "$DATA_DIR/train.parquet")" \
    data.val_files="$(quoted "$DATA_DIR/test.parquet")" \
    actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")" \
    actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY" \
    trainer.n_gpus_per_node="$NUM_GPUS" \
    trainer.nnodes="$NNODES" \
    trainer.experiment_name="${NAME}_${ROLLOUT}${NOISE}" \
    ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_ROOT="$(quoted "$METRICS")" \
    "${ATTENTION[@]}" "${TWIN[@]}" "$@"
