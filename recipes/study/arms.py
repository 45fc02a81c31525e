"""What a run of the study is: the options of `python -m verl.trainer.main_ppo` that its arm and its task give.

A new arm is a line in ARMS, a new task one in TASKS. Names have lower-case letters, digits and `_`.
"""

from pathlib import Path
from typing import NamedTuple

from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl

BATCH, ANSWERS, UPDATES = 32, 8, 2  # questions of a step, answers to each, optimizer steps
CACHE = 30_000  # bytes of keys and values of a token: 28,672 of the 1.5B, and a reserve
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))

# Learning rates of a first look at 24 steps: LoRA at 4e-5 and all weights at 1e-6 reached the same reward.
LORA = [f"{MODEL}.lora_rank=32", f"{MODEL}.lora_alpha=64", f"{ACTOR}.optim.lr=4e-5"]
FULL = [f"{ACTOR}.optim.lr=1e-6"]
BF16_LORA = [*LORA, f"{MODEL}.lora.merge=True"]
ACR = [f"{ACTOR}.policy_loss.loss_mode=acr"]
TIS = ["algorithm.rollout_correction.rollout_is=token"]
# As in the paper: 1e-2 to 5e-4 in ten stages, added to the weights of the norms.
AQN = [
    "+aqn.enabled=true",
    "+aqn.mode=additive",
    "+aqn.sigma_start=1e-2",
    "+aqn.sigma_end=5e-4",
    "+aqn.num_stages=10",
]
# Noise whose effect is chosen instead of its sigma, another draw for each answer of a group.
NOISE = [
    "+aqn.enabled=true",
    "+aqn.mode=relative",
    "+aqn.target_kl=5e-3",
    "+aqn.sigma_start=1e-2",
    "+aqn.sigma_end=1e-3",
    "+aqn.draw=sequence",
]

ARMS: dict[str, list[str]] = {
    "bf16_merge": BF16_LORA,  # stock verl, its rollout without an adapter: the fastest 16-bit LoRA
    # verl sends the adapter alone, so that vLLM has to read the base.
    "bf16": [*LORA, f"{ROLLOUT}.load_format=safetensors"],
    "nvfp4": ["+rollout=nvfp4", *LORA],
    "nvfp4_gptq": ["+rollout=nvfp4", *LORA],
    "nvfp4_aqn": ["+rollout=nvfp4", *LORA, *AQN],
    "nvfp4_noise": ["+rollout=nvfp4", *LORA, *NOISE],
    "int8_lora": ["+rollout=int8", *LORA],
    "fp8_lora": ["+rollout=fp8", *LORA],
    "bf16_of_nvfp4": BF16_LORA,
    "bf16_noise": [*BF16_LORA, *NOISE],
    "bf16_aqn": [*BF16_LORA, *AQN],
    # Of the untrained model's answers it raises the entropy by 13 %, as bf16_noise does in steps 7 to 12.
    "bf16_hot": [*BF16_LORA, f"{ROLLOUT}.temperature=1.07"],
    "bf16_full": FULL,
    "int8": ["+rollout=int8", *FULL],
    "int8_acr": ["+rollout=int8", *FULL, *ACR],
    "fp8": ["+rollout=fp8", *FULL],
    "fp8_acr": ["+rollout=fp8", *FULL, *ACR],
    "nvfp4_full_acr": ["+rollout=nvfp4", *FULL, *ACR],
    "nvfp4_full_tis": ["+rollout=nvfp4", *FULL, *TIS],
}

# Arms on another base than --model: the option of run.py that names it.
BASES = {"nvfp4_gptq": "calibrated", "bf16_of_nvfp4": "dequantized"}


class Task(NamedTuple):
    """Tokens of a question and of an answer, at most."""

    question: int
    answer: int


TASKS = {"gsm8k": Task(256, 512), "math": Task(512, 1024)}
VALIDATE = ("end", "often", "none")
EVERY = 20  # steps between validations of `often`


class Run(NamedTuple):
    """One run of main_ppo."""

    arm: str
    task: str
    seed: int
    tag: str = ""

    @property
    def name(self) -> str:
        """`nvfp4_aqn-gsm8k-seed1`; with a tag `nvfp4_aqn.lr1e-5-gsm8k-seed1`."""
        return f"{self.arm}{'.' * bool(self.tag)}{self.tag}-{self.task}-seed{self.seed}"


def experiment(run: Run, steps: int, extra: list[str]) -> list[str]:
    """What makes the run what it is, without seed and places: runs of one arm have the same.

    Args:
        run: Which.
        steps: Of the trainer.
        extra: Overrides of the user, which win.
    """
    task = TASKS[run.task]
    common = [
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={BATCH}",
        f"data.max_prompt_length={task.question}",
        f"data.max_response_length={task.answer}",
        f"{ACTOR}.ppo_mini_batch_size={BATCH // UPDATES}",
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.use_kl_loss=False",
        f"{ROLLOUT}.n={ANSWERS}",
        f"trainer.total_training_steps={steps}",
    ]
    return [*common, *ARMS[run.arm], *extra]


def seeds(run: Run) -> list[str]:
    """The order of the questions, and what is drawn."""
    options = ["data.seed", f"{ACTOR}.data_loader_seed", f"{ROLLOUT}.seed"]
    if any(option.startswith("+aqn.enabled") for option in ARMS[run.arm]):
        options.append("+aqn.seed")
    return [f"{option}={run.seed}" for option in options]


def sampler(options: list[str]) -> list[str]:
    """Stock verl's trainer looks for answers every 2 s, that of runs with an option of ours every 0.2 s: so do all."""
    if asks_for_qerl(options):
        return []
    place = "trainer.v1.sampler.custom_sampler"
    file = quoted(Path(__file__).with_name("sampler.py").resolve())
    return [f"{place}.path={file}", f"{place}.name=Sampler"]


def quoted(path: Path) -> str:
    """For Hydra, whose bare values have no umlauts, brackets or `=`."""
    return "'" + str(path).replace("'", r"\'") + "'"


def machine(task: Task, per_gpu: int, gpus: int) -> list[str]:
    """What fits a model of 1.5 billion parameters on 80 GB, and starts soon.

    Args:
        task: Whose lengths count.
        per_gpu: Runs that share a GPU.
        gpus: Of a run.
    """
    return [
        # vLLM would measure what is left, wrongly when another run takes memory meanwhile. And what it does not hold
        # need not be released and mapped again in each step.
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={BATCH * ANSWERS * sum(task) * CACHE}",  # of all answers
        f"{ROLLOUT}.gpu_memory_utilization={0.35 / per_gpu:.3f}",
        f"{MODEL}.use_fused_kernels=True",
        f"{MODEL}.use_remove_padding=True",
        f"{MODEL}.use_liger=True",
        f"++{MODEL}.override_config.attn_implementation=verl_qerl_varlen",  # needs no flash-attn, in stock arms too
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={32768 // max(2, per_gpu)}",  # an H200 keeps all activations of two runs
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=32768",
        f"{ACTOR}.strategy=fsdp2",  # FSDP1 on one GPU sends vLLM an empty adapter
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.max_model_len={task.question + task.answer}",
        f"{ROLLOUT}.max_num_seqs={BATCH * ANSWERS}",
        f"{ROLLOUT}.calculate_log_probs=True",
        f"{ROLLOUT}.agent.num_workers=4",
        "data.filter_overlong_prompts=True",
        "data.filter_overlong_prompts_workers=null",  # in its own process: to start others takes longer than the work
        "data.dataloader_num_workers=0",
        "reward.num_workers=2",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "++ray_kwargs.ray_init.include_dashboard=False",
        "++ray_kwargs.ray_init.object_store_memory=2000000000",
        "ray_kwargs.ray_init.num_cpus=16",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.nnodes=1",
        "trainer.total_epochs=1000",  # total_training_steps ends it
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        'trainer.logger=["console","file"]',
        "trainer.project_name=study",
    ]


def validation(kind: str, steps: int, samples: int, data: Path) -> list[str]:
    """When which questions are asked.

    Several samples are as many copies of the questions: of several answers to one verl draws thousands of bootstraps
    for metrics that nobody reads here, two minutes for GSM8K.

    Args:
        kind: `end`, all test questions after the last step, sampled as in training but at temperature 1; `often`, 256
            of them before the first step and every EVERY, greedily; `none`.
        steps: Of the run.
        samples: Answers to each question at the end.
        data: Folder of the task's parquet files.
    """
    asked = {"end": ("test", steps, False), "often": ("val", EVERY, True), "none": ("val", -1, False)}
    questions, every, before = asked[kind]
    copies = samples if kind == "end" else 1
    options = [
        f"data.val_files=[{','.join([quoted(data / f'{questions}.parquet')] * copies)}]",
        f"trainer.test_freq={every}",
        f"trainer.val_before_train={before}",
    ]
    if kind == "end":
        options += [f"{ROLLOUT}.val_kwargs.{option}" for option in ("do_sample=True", "temperature=1.0")]
    return options
