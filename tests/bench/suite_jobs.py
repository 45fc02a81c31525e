"""The jobs of suite.py: first what needs a quiet host, then the long runs, and with those what only has to work.

Commands are bash, run in the root of the checkout. OUT is the folder of results, WORK that of models and data, SOURCE
GSM8K, CUDA_VISIBLE_DEVICES the job's GPUs.
"""

import dataclasses
from collections.abc import Iterable

import rollout_arms

_BENCH = "python3 tests/bench"
_LORA = "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64"
_BASE = "+qerl.base"
_ROLLOUT = "+qerl.rollout"
_SLEEP = "actor_rollout_ref.rollout.free_cache_engine=True"
_NOISE = "+aqn.enabled=true +aqn.num_stages=3"  # the first of three steps without


@dataclasses.dataclass(frozen=True)
class Job:
    """One entry.

    Args:
        name: Of its log too.
        what: For --list.
        command: Bash; what it leaves in OUT as it goes on counts when it is killed.
        seconds: It is not begun with less time left: what a first result takes.
        gpus: How many it has; 0 is all.
        after: Jobs that must have ended; those that failed end it too.
        small: It shares its GPUs with other small jobs, and with one that shares.
        shares: Small jobs may join it on its GPUs.
    """

    name: str
    what: str
    command: str
    seconds: int
    gpus: int = 1
    after: tuple[str, ...] = ()
    small: bool = False
    shares: bool = False


def _rollout(name: str, model: str, arms: str, batches: str, more: str = "", gpus: int = 1) -> Job:
    """A call of bench_rollout.py; every row is written as it is measured. GPUs share the model."""
    options = f"--arms {arms} --batches {batches} --prompts 256 --new-tokens 128 {more}".strip()
    options += f" --tensor-parallel {gpus}" if gpus > 1 else ""
    command = f'{_BENCH}/bench_rollout.py --out "$OUT/{name}.json" --work "$WORK/{name}" --models {model} {options}'
    return Job(name, f"decode of {model}: {arms}", command, 150, gpus)


def _verl(name: str, what: str, options: str, env: str = "", gpus: int = 1) -> Job:
    """A run of verl with some options; an engine that is to sleep wants a GPU of its own."""
    command = f"{env} bash tests/bench/verl_run.sh {name} {options}".strip()
    return Job(name, what, command, 250, gpus, ("base",), small=_SLEEP not in options)


def _random(name: str, what: str, make: str, options: str = "", beside: bool = True) -> Job:
    """As _verl, of a small model with random weights and the base's tokenizer.

    Args:
        name: verl_NAME.
        make: A call of qerl_testing.py without its end, which the size of the vocabulary is.
        beside: It shares its GPU with others; else it has CUDA graphs and sleeps.
    """
    words = "vocab_size=config.from_pretrained('$WORK/base').vocab_size, max_position_embeddings=512"
    imports = (
        "import sys; sys.path.append('tests/bench'); import qerl_testing; from transformers import AutoConfig as config"
    )
    made = f"{imports}; qerl_testing.{make}, {words}).save_pretrained('$WORK/{name}')"
    copied = f'cp "$WORK"/base/{{*token*,*.jinja}} "$WORK/{name}"'
    alone = "" if beside else f"{_SLEEP} actor_rollout_ref.rollout.enforce_eager=False"
    path = f'actor_rollout_ref.model.path="$WORK/{name}"'
    job = _verl(f"verl_{name}", what, " ".join(filter(None, (_NVFP4, _NOISE, path, options, alone))))
    return dataclasses.replace(job, command=f'python3 -c "{made}"; {copied}; {job.command}')


def _actor() -> Job:
    command = f'{_BENCH}/bench_actor.py --out "$OUT/actor.json"'
    return Job("actor", "training passes of 7B, 14B and 32B: every arm", command, 150)


def _study(name: str, arms: str, at_once: int, env: str = "") -> Job:
    """Arms of recipes/qurl with three seeds, on all GPUs."""
    folder = f'mkdir -p "$OUT/{name}"; ln -sfn "$WORK"/{{gsm8k,arithmetic,base}} "$OUT/{name}/"; WORK="$OUT/{name}"'
    sizes = f"AT_ONCE={at_once} STEPS=25 BATCH=32 KV_BYTES=2000000000"
    where = f'ARMS="{arms}" GPUS="$CUDA_VISIBLE_DEVICES"'
    command = f"{folder} {where} {env} {sizes} bash recipes/qurl/from_scratch.sh trainer.test_freq=25"
    return Job(name, f"QuRL, three seeds: {arms}", command, 500, gpus=0, after=("base",), shares=True)


def _gsm8k(arm: str, seed: int) -> Job:
    """GRPO on GSM8K; three fit on a GPU of 80 GB. `verl_qerl plot` takes their files."""
    what, options = _GSM8K_ARMS[arm]
    sizes = (
        "actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.agent.num_workers=3"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64"
        " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128 ray_kwargs.ray_init.num_cpus=20"
    )
    env = f"DATA=gsm8k BATCH=96 STEPS=40 LR=4e-4 SEED={seed}"
    return _verl(f"gsm8k_{arm}-seed{seed}", f"GSM8K, {what}", f"{options} {sizes}", env)


def _train_step_inside(shape: str, cap: int, share: float, seconds: int, sizes: str = "") -> Job:
    """Two GRPO steps inside so many GiB, on a GPU of that size or of a larger one; `share` GiB are vLLM's."""
    of_gpu = f"import torch; print(round({share} * 2**30 / torch.cuda.mem_get_info()[1], 3))"
    call = f'SHAPE={shape} CAP={cap} {sizes} UTILIZATION="$share" WORK="$WORK/{shape}_{cap}gib"'
    command = f'share=$(python3 -c "{of_gpu}"); {call} OUT="$OUT/train_step_{shape}_{cap}gib.json"'
    command += " bash tests/bench/train_step.sh"
    return Job(f"train_step_{shape}", f"two GRPO steps of {shape.upper()} inside {cap} GiB", command, seconds)


def _tests(name: str, folders: str) -> Job:
    """Tests that pytest marks with gpu; torch would take all cores for each small tensor."""
    command = f"OMP_NUM_THREADS=2 python3 -m pytest -q -m gpu -p no:cacheprovider {folders}"
    return Job(name, f"what pytest marks with gpu: {folders}", command, 60, gpus=0, small=True)


_OURS_AND_STOCK = "nvfp4_lora_ours bf16_lora_stock"
_ARMS = f"{_OURS_AND_STOCK} bf16_lora_ours nvfp4_lora_stock fp8_lora_stock"
_ATTENTION = " ".join(("nvfp4_lora_ours", *rollout_arms.ATTENTION))
_NVFP4 = f"+rollout=nvfp4 {_LORA}"
# Heads of 128 columns, and a context shorter than the largest CUDA graph.
_DENSE = "hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2"
_SHARDED = f"{_NVFP4} {_NOISE} {_BASE}.shard=true trainer.n_gpus_per_node=2"
_TP2 = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
_STOCK = f"{_ROLLOUT}.linear=stock {_ROLLOUT}.lora=stock {_ROLLOUT}.sampler=stock {_ROLLOUT}.attention=stock"
_GSM8K_ARMS = {
    "ours": ("everything of ours on", f"{_NVFP4} +aqn.enabled=true"),
    "kernels": ("the same with vLLM's kernels", f"{_NVFP4} +aqn.enabled=true {_STOCK}"),
    # verl takes the base from its own checkpoint where the sync has the adapter alone.
    "bf16": ("stock verl with LoRA in bf16", f"{_LORA} actor_rollout_ref.rollout.load_format=safetensors"),
}

JOBS = (
    _train_step_inside("32b", 80, 44.8, 400),
    _train_step_inside("14b", 40, 22.4, 300, "MICRO=2"),
    _train_step_inside("7b", 24, 12.6, 250, "PROMPTS=8 MICRO=2"),
    _rollout("rollout_14b", "14B", _OURS_AND_STOCK, "1 32 64 128 256"),
    _rollout("rollout_32b", "32B", _OURS_AND_STOCK, "1 32 64 128 256"),
    _actor(),
    Job("dequantize", "bandwidth of decoding", f'{_BENCH}/bench_dequantize.py --out "$OUT/dequantize.json"', 60),
    Job(
        "layer",
        "what an adapter and attention add to a decode layer",
        f'{_BENCH}/bench_layer.py --contexts 0 320 --out "$OUT/layer.json"',
        30,
    ),
    Job(
        "base",
        "the model of recipes/gsm8k, 105 M parameters from scratch, and its data",
        'cd "$WORK"; BATCH=1 LR=1 STEPS=1 source "$ROOT/recipes/gsm8k/base.sh"',
        260,
    ),
    Job(
        "answers",
        "what verl's server takes of a rollout, asked its way and ours",
        f'{_BENCH}/bench_answers.py --realistic 128 8 --out "$OUT/answers_7b.json"',
        120,
    ),
    _rollout("rollout_7b", "7B", _OURS_AND_STOCK, "1 8 32 64 128 256", "--realistic"),
    _rollout(
        "rollout_7b_own_process",
        "7B",
        _OURS_AND_STOCK,
        "256",
        "--no-fixed --realistic --own-process --functions",
    ),
    # Four times as many at once as verl lets run by itself, and twice as many as vLLM has CUDA graphs for.
    _rollout(
        "rollout_7b_1024",
        "7B",
        f"{_OURS_AND_STOCK} nvfp4_lora_ours_512 bf16_lora_stock_graphs",
        "1024",
        "--no-fixed --realistic --own-process",
    ),
    _rollout("rollout_32b_1024", "32B", _OURS_AND_STOCK, "1024", "--no-fixed --realistic --own-process --repeats 1"),
    # Noise makes norms float32, which vLLM does not fuse with the sums of GPUs.
    _rollout("rollout_7b_tp2", "7B", f"{_OURS_AND_STOCK} nvfp4_lora_ours_noise", "1 32 256", gpus=2),
    _rollout("rollout_32b_tp2", "32B", f"{_OURS_AND_STOCK} nvfp4_lora_ours_noise", "1 32 256", gpus=2),
    _rollout("rollout_32b_tp4", "32B", f"{_OURS_AND_STOCK} nvfp4_lora_ours_noise", "1 32 256", gpus=4),
    Job(
        "actor_ranks",
        "training passes of 7B on all GPUs",
        'torchrun --nproc-per-node "$(tr , "\\n" <<<"$CUDA_VISIBLE_DEVICES" | wc -l)" tests/bench/bench_actor_ranks.py'
        ' --shapes 7b --out "$OUT/actor_ranks.json"',
        90,
        gpus=0,
    ),
    _study("study", "bf16 int8 int8-tis int8-acr int8-acr-uaq fp8 fp8-tis fp8-acr fp8-acr-uaq nvfp4", 8),
    _verl("verl_shard_tp2", "qerl.base.shard on two GPUs, tensor-parallel rollout", f"{_SHARDED} {_TP2}", gpus=2),
    *(_gsm8k(arm, seed) for seed in (1, 2) for arm in _GSM8K_ARMS),
    _verl("verl_shard", "qerl.base.shard on two GPUs", _SHARDED, gpus=2),
    _verl("verl_fp8", "LoRA on fp8", f"+rollout=fp8 {_LORA} {_NOISE}"),
    _verl("verl_mxfp4", "LoRA on mxfp4", f"+rollout=mxfp4 {_LORA} {_NOISE}"),
    _verl(
        "verl_int8",
        "LoRA on int8, mismatch taken apart",
        f"+rollout=int8 {_LORA} {_NOISE} +qerl.gate.mismatch_sample=8",
    ),
    _random(
        "moe",
        "LoRA on a mixture of experts",
        "random_qwen3_moe(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,"
        " num_experts=16, moe_intermediate_size=256",
        "+qerl.gate.max_initial_kl=0.2",  # routers choose by rounding errors
    ),
    _random("qwen3", "Qwen3, CUDA graphs, sleep", f"random_decoder('qwen3', gain=2, {_DENSE}", beside=False),
    _random("llama", "Llama, CUDA graphs, sleep", f"random_decoder('llama', gain=2, {_DENSE}", beside=False),
    _verl(
        "verl_share",
        "one base, trained norms",
        f"{_NVFP4} {_NOISE} {_SLEEP} {_BASE}.share=true {_BASE}.train_norms=true",
    ),
    _study("study_nvfp4", "nvfp4-tis nvfp4-acr", 3),
    _study("study_lr", "bf16", 2, "LR=4.5e-6"),  # what UAQ with s = 1.5 should amount to
    _rollout("rollout_7b_arms", "7B", _ARMS, "1 32 64 128 256", "--realistic"),
    _rollout("rollout_7b_attention", "7B", _ATTENTION, "1 64 256", "--prompts 256 1024"),
    _rollout("rollout_7b_profile", "7B", "nvfp4_lora_ours", "1", "--no-fixed --profile 1 32 64 256"),
    _rollout("rollout_32b_realistic", "32B", _OURS_AND_STOCK, "256", "--no-fixed --realistic 32 8"),
    _tests("tests_kernels", "tests/kernels"),
    _tests("tests_vllm", "tests/vllm_plugin"),
    _tests("tests", "tests --ignore=tests/kernels --ignore=tests/vllm_plugin"),
)


def selected(names: Iterable[str] | None) -> list[Job]:
    """The jobs of these names in their order, or all; none waits for one that is left out."""
    known = {job.name: job for job in JOBS}
    chosen = [known[name] for name in dict.fromkeys(known if names is None else names)]
    there = {job.name for job in chosen}
    return [dataclasses.replace(job, after=tuple(name for name in job.after if name in there)) for job in chosen]
