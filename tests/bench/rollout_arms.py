"""What bench_rollout.py compares: arms, model shapes, and the files an engine needs to start without a checkpoint.

Weights are vLLM's dummies: uniform in [-1e-3, 1e-3] from a fixed seed. They leave NVFP4 tensors unusable (packed codes
uninitialized, block scales zero or negative, no power of two among the global scales), so that `DUMMY_NVFP4` draws
valid ones instead: time on a GPU depends on values through the power they draw, and a kernel may check its format.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

DUMMY_NVFP4 = "bench_dummy_nvfp4"  # load format
EXTENSION = "verl_qerl.vllm_plugin.worker.RolloutWorkerExtension"
SCHEDULER = "verl_qerl.vllm_plugin.noise.scheduler.scheduler"
OURS = "verl_qerl_nvfp4"
# Divisor of all weights. Block scales reach 448 and codes 6: weights stay below 448 * 6 / 2**20 = 2.6e-3.
GLOBAL_SCALE = 2.0**20


@dataclasses.dataclass(frozen=True)
class Arm:
    """How one arm is started.

    Args:
        options: Arguments of vllm.LLM beside the common ones.
        packed: The model directory says that it holds NVFP4.
        lora: An adapter is used by every request.
        linear_bytes: Resident bytes per weight of a linear, to size the KV cache.
        runner: VLLM_USE_V2_MODEL_RUNNER; None leaves the model runner to vLLM, which has the other one for some models.
        larger_graphs: Beyond vLLM's own list of CUDA graphs, which ends at 512; None: arms of ours have it.
    """

    options: dict[str, Any]
    packed: bool = False
    lora: bool = True
    linear_bytes: float = 2.0
    runner: str | None = None
    larger_graphs: bool | None = None

    @property
    def has_larger_graphs(self) -> bool:
        return is_ours(self.options) if self.larger_graphs is None else self.larger_graphs


def ours(linear: str = "auto", **choices: Any) -> dict[str, Any]:
    """Options of vllm.LLM: ours for the rollout, the worker extension that reads them, packed weights for our linears.

    Args:
        linear: As in additional_config.verl_qerl.
        choices: Others of there.
    """
    options = {"load_format": DUMMY_NVFP4, "quantization": OURS} if linear == "auto" else {}
    options["additional_config"] = {"verl_qerl": {"linear": linear, "lora": "single", **choices}}
    own_draws = {"scheduler_cls": SCHEDULER} if choices.get("aqn", {}).get("draw", "batch") != "batch" else {}
    return options | {"worker_extension_cls": EXTENSION, **own_draws}


def is_ours(options: dict[str, Any]) -> bool:
    """Whether an engine with these options runs something of ours."""
    return options.get("worker_extension_cls") == EXTENSION


def in_processes(options: dict[str, Any]) -> dict[str, Any]:
    """Options of an arm whose workers are processes of their own, which have nothing registered."""
    extension = f"rollout_extension.{'Ours' if is_ours(options) else 'Stock'}"
    return options | {"worker_extension_cls": extension, "distributed_executor_backend": "mp"}


# Ours with other choices of vLLM's for attention; a cap on splits takes the launch away that adds them up.
ATTENTION = {
    "nvfp4_lora_ours_one_split": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    "nvfp4_lora_ours_fa2": {"flash_attn_version": 2},
    "nvfp4_lora_ours_triton": {"backend": "TRITON_ATTN"},
    "nvfp4_lora_ours_flashinfer": {"backend": "FLASHINFER"},
}
# The one place that maps an arm to engine arguments.
ARMS = {
    "bf16": Arm({}, lora=False),
    "fp8": Arm({"quantization": "fp8"}, lora=False, linear_bytes=1.0),
    "bf16_lora_stock": Arm({}),
    "bf16_lora_ours": Arm(ours(linear="stock")),
    "nvfp4": Arm({"load_format": DUMMY_NVFP4}, packed=True, lora=False, linear_bytes=0.5625),
    "nvfp4_lora_stock": Arm({"load_format": DUMMY_NVFP4}, packed=True, linear_bytes=0.5625),
    "fp8_lora_stock": Arm({"quantization": "fp8"}, linear_bytes=1.0),
    "fp8_lora_ours": Arm(ours(linear="stock") | {"quantization": "fp8"}, linear_bytes=1.0),
    "nvfp4_lora_ours": Arm(ours(), packed=True, linear_bytes=0.5625),
    "nvfp4_lora_stock_sampler": Arm(ours(sampler="stock"), packed=True, linear_bytes=0.5625),
    "nvfp4_lora_stock_attention": Arm(ours(attention="stock"), packed=True, linear_bytes=0.5625),
}
# As in verl (verl_plugin.rollout.server.choose_runner).
ARMS |= {name: dataclasses.replace(arm, runner="0") for name, arm in ARMS.items() if is_ours(arm.options)}
# Measured when they are named; for Qwen2.5 vLLM's choice is the runner of verl's runs.
VARIANTS = {
    name: dataclasses.replace(ARMS["nvfp4_lora_ours"], options={**ours(), "attention_config": options})
    for name, options in ATTENTION.items()
}
VARIANTS |= {
    f"{name}_v1": dataclasses.replace(ARMS[name], runner="0") for name in ("bf16_lora_stock", "nvfp4_lora_stock")
}
# With more than 512 sequences at once: which part of the gain is the graphs'.
VARIANTS["bf16_lora_stock_graphs"] = dataclasses.replace(ARMS["bf16_lora_stock"], larger_graphs=True)
VARIANTS["nvfp4_lora_ours_512"] = dataclasses.replace(ARMS["nvfp4_lora_ours"], larger_graphs=False)
VARIANTS["nvfp4_lora_ours_noise"] = dataclasses.replace(
    ARMS["nvfp4_lora_ours"], options=ours(aqn={"enabled": True})
)  # norms in float32
# Norms with a table of draws, and rows of it for each token; how large sigma is makes no difference to the time.
VARIANTS |= {
    f"{name}_{draw}": dataclasses.replace(ARMS[name], options=ours(linear, aqn={"enabled": True, "draw": draw}))
    for name, linear in (("nvfp4_lora_ours", "auto"), ("bf16_lora_ours", "stock"))
    for draw in ("sequence", "token")
}
VARIANTS["bf16_lora_ours_noise"] = dataclasses.replace(
    ARMS["bf16_lora_ours"], options=ours("stock", aqn={"enabled": True})
)
VARIANTS |= {  # keys and values in E4M3
    f"{name}_kv8": dataclasses.replace(ARMS[name], options=ARMS[name].options | {"kv_cache_dtype": "fp8"})
    for name in ("bf16", "nvfp4_lora_ours")
}
VARIANTS["nvfp4_lora_ours_v2"] = dataclasses.replace(ARMS["nvfp4_lora_ours"], runner="1")
ARMS |= VARIANTS


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a decoder.

    Args:
        hidden, intermediate, layers, heads, kv_heads, vocabulary: As in config.json.
        family: Of FAMILIES.
        head_size: 0 is hidden / heads.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 152064
    family: str = "qwen2"
    head_size: int = 0

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Module in a layer -> (out, in)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    @property
    def kv_bytes(self) -> int:
        """Per token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def weight_bytes(self, linear_bytes: float) -> float:
        """Of the whole model; embedding and lm_head are bf16 in every arm."""
        linears = sum(rows * columns for rows, columns in self.linears.values())
        return self.layers * linears * linear_bytes + 2 * 2 * self.vocabulary * self.hidden


FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
LLAMA_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_ROPE |= {"original_max_position_embeddings": 8192}
# Those without a family in their name are Qwen2.5's.
SHAPES = {
    "1.5B": Shape(1536, 8960, 28, 12, 2, vocabulary=151936),
    "3B": Shape(2048, 11008, 36, 16, 2, vocabulary=151936),
    "7B": Shape(3584, 18944, 28, 28, 4),
    "14B": Shape(5120, 13824, 48, 40, 8),
    "32B": Shape(5120, 27648, 64, 40, 8),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, 8, vocabulary=151936, family="qwen3"),
    "Qwen3-32B": Shape(5120, 25600, 64, 64, 8, vocabulary=151936, family="qwen3", head_size=128),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, vocabulary=128256, family="llama"),
    "tiny": Shape(128, 256, 2, 2, 1, vocabulary=512),
    "tiny-qwen3": Shape(128, 256, 2, 2, 1, vocabulary=512, family="qwen3"),
    "tiny-llama": Shape(128, 256, 2, 2, 1, vocabulary=512, family="llama"),
}


def write_model(folder: Path, shape: Shape, packed: bool) -> Path:
    """A directory with a config.json and nothing else."""
    from verl_qerl.formats import NVFP4

    config = {
        "architectures": [FAMILIES[shape.family]],
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "eos_token_id": shape.vocabulary - 1,
    }
    if shape.family == "llama":  # as of 3.1
        config |= {"rope_theta": 5e5, "rope_scaling": LLAMA_ROPE}
    if packed:
        config["quantization_config"] = NVFP4().config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_adapter(folder: Path, shape: Shape, rank: int) -> Path:
    """A PEFT adapter on all seven linears. Layers share their random values, since time does not depend on them."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (rows, columns) in shape.linears.items():
        down = (torch.randn(rank, columns, generator=generator) * 1e-2).bfloat16()
        up = (torch.randn(rows, rank, generator=generator) * 1e-2).bfloat16()
        for layer in range(shape.layers):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = down.clone(), up.clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in shape.linears),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder


def register_dummy_nvfp4() -> None:
    """Register the load format `DUMMY_NVFP4`: dummies whose NVFP4 tensors are valid ones of our format."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class DummyNVFP4Loader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            if not fill_packed(model):
                raise ValueError(
                    f"{type(model).__name__} has no parameter named weight_packed. The load format {DUMMY_NVFP4} is for"
                    " NVFP4 models. Set `packed` of the arm."
                )

    @torch.no_grad()
    def fill_packed(model: torch.nn.Module) -> int:
        found = 0
        for name, parameter in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "weight_packed":
                parameter.data.random_(0, 256)
                found += 1
            elif leaf == "weight_scale":  # bits of e4m3 from 2 to 448
                parameter.data.view(torch.uint8).random_(0x40, 0x7F)
            elif leaf == "weight_global_scale":
                parameter.data.fill_(GLOBAL_SCALE)
        return found

    register_model_loader(DUMMY_NVFP4)(DummyNVFP4Loader)
