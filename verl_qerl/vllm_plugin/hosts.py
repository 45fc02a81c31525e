"""What we change in vLLM, or repeat of its source: one record each, with fingerprints of 0.24.0 and 0.27.0.

One fingerprint where both are the same. With another vLLM those that differ are what is to be read first;
`python -m verl_qerl doctor` marks them.
"""

from functools import partial

from verl_qerl.upstream import Register

CHANGES = Register("0.24.0", "0.27.0")
_class, _method, _data, _copy, _override = (
    partial(CHANGES.add, kind) for kind in ("class", "method", "data", "copy", "override")
)
_overrides = CHANGES.add_overrides

# Classes of objects that are exchanged once a model is loaded.
RMS_NORM = _class(
    "vllm.model_executor.layers.layernorm:RMSNorm",
    "Norms let the next packed linear start early, or take each token's weight from a table of noise.",
    "3ce53de2cb57 a904117458d6",
)
SILU_AND_MUL = _class(
    "vllm.model_executor.layers.activation:SiluAndMul",
    "The activation lets the next packed linear start early.",
    "853986e9f72d 521e3ce96ea5",
)
ROTARY = _class(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
    "The rotation is one launch, which lets the next kernel start early.",
    "e9f91c22a5b2",
)
_HEADS = "Norms of heads and their rotation are one launch."
QWEN3_ATTENTION = _class("vllm.model_executor.models.qwen3:Qwen3Attention", _HEADS, "261f493d30f7 2e121b817c5d")
QWEN3_MOE_ATTENTION = _class("vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention", _HEADS, "ffdb70dfd07f")
_SINGLE = "A LoRA linear computes base and adapter by our kernels for one adapter."
LORA_LINEARS = (
    _class("vllm.lora.layers.column_parallel_linear:ColumnParallelLinearWithLoRA", _SINGLE, "2df29afce4a1"),
    _class(
        "vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA",
        _SINGLE,
        "2fc92d4ab909 b90474e363ee",
    ),
    _class("vllm.lora.layers.column_parallel_linear:MergedQKVParallelLinearWithLoRA", _SINGLE, "0c7f2fae0ab7"),
    _class("vllm.lora.layers.column_parallel_linear:QKVParallelLinearWithLoRA", _SINGLE, "e713fe69c035"),
    _class("vllm.lora.layers.replicated_linear:ReplicatedLinearWithLoRA", _SINGLE, "396ce43069f1"),
    _class("vllm.lora.layers.row_parallel_linear:RowParallelLinearWithLoRA", _SINGLE, "957b37420705"),
)
LORA_WRAPPER = _class(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
    "Our kernels are told whether any token of a batch has an adapter; no tokens are sorted for others.",
    "bd4c8d2cff04",
)
ATTENTION = _class(
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    "Steps in which every request decodes one token run on our attention.",
    "f0859b138772 0722083d70f9",
)
SAMPLER = _class(
    "vllm.v1.sample.sampler:Sampler", "Our kernel draws tokens in one launch.", "e012eb6923ec 3823c64e6339"
)

# Methods of objects that are replaced.
LOAD_MODEL = _method(
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "The model is prepared as soon as it is loaded: vLLM lets a worker extension override nothing.",
    "3ccc8b56fea6 953bf38a10da",
)
EXECUTE_MODEL = _method(
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "No step is computed with memory whose owner has ended (share_base).",
    "d97cade97d8d 0fd3a503d1a3",
)
SLEEP = _method(
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "Sleep at level 2 is refused where nothing could bring the weights back.",
    "3681f1cc82bc cf1fcecd6a92",
)
MAX_SPLIT = _method(
    "vllm.v1.worker.gpu_worker:Worker._scoped_allocator_max_split",
    "Segments that are empty again while weights load may be used again.",
    "67cabf581f02",
    "vllm/0001",
)
AVAILABLE_MEMORY = _method(
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "With sleep mode the KV cache stays within the engine's share of the GPU.",
    "63920244d546 8a3a2d383bfc",
)
_IN_POOL = "Unused buffers of LoRA are freed, in the memory that sleep mode keeps weights in."
LOAD_IN_POOL = (
    _method("vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model", _IN_POOL, "8cdc51431fb3 37a720854bbd"),
    _method("vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model", _IN_POOL, "105a90ddb601 bd3f788b260c"),
)
PREPARE_INPUTS = _method(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
    "Before each step its tokens get their rows of the noise (aqn.draw).",
    "677d58ace988 5e4d0ccdbf6e",
)
CACHE_BLOCKS = _method(
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    "The prefix cache holds prompts alone where each sequence has noise of its own.",
    "d845623667bd",
)
COMPUTED_BLOCKS = _method(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
    "A request that asks for a draw of the noise does not read the prefix cache.",
    "431438b9b2e3 5eec7dcc3727",
)
ADD_REQUEST = _method(
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "verl hears that a request is admitted although its answer is asked for once, when it is whole.",
    "66aafbb3d80b 64f7649bf7d6",
    "verl/0016",
)
LIST_LORAS = _method(
    "vllm.v1.engine.async_llm:AsyncLLM.list_loras",
    "verl asks before each request; the workers are asked once between two changes.",
    "06b5f5bbef5b",
    "verl/0015",
)
_FORGET = "What may change the adapters makes the remembered list of them void."
CHANGE_LORAS = (
    _method("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", _FORGET, "600ce3b04c6a", "verl/0015"),
    _method("vllm.v1.engine.async_llm:AsyncLLM.add_lora", _FORGET, "75c7c7e5bf8d", "verl/0015"),
    _method("vllm.v1.engine.async_llm:AsyncLLM.remove_lora", _FORGET, "afe3c69bbfcb", "verl/0015"),
)

# Attributes of objects that are set.
LORA_BUFFERS = _data(
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.create_lora_weights",
    "A and B of a fused linear are one tensor each, of which vLLM's own buffers are views.",
    "3e4baab7740b",
)
REQUEST = _data(
    "vllm.v1.request:Request",
    "A request that asks for a draw of the noise skips the prefix cache.",
    "c3c61ae64751 d654f0575d7d",
)
ADDITIONAL_CONFIG = _data(
    "vllm.config.vllm:VllmConfig.compute_hash",
    "What is compiled with our layers is kept apart from stock vLLM's.",
    "4f6dcddc109c",
)
LORA_TARGETS = _data(
    "vllm.config.lora:LoRAConfig",
    "Experts get no buffers for adapters that they never have.",
    "59a5e5dc818d e6331ccd2d19",
)
RELOADED = _data(
    "vllm.model_executor.layers.linear:LinearBase",
    "After a weight sync CUDA graphs find a linear's tensors where they were.",
    "ea722c941424 1d4999f9df95",
)

_SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"
_SAME_STEPS = "The same steps, with norms of heads and rotation as one launch."
# What ours repeat of vLLM's bodies.
_copy("vllm.model_executor.models.qwen3:Qwen3Attention.forward", _SAME_STEPS, "0cd83a1ca6e0")
_copy("vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention.forward", _SAME_STEPS, "3b1a3f0021a9")
_copy(
    f"{_SCHEMES}.compressed_tensors_w4a4_nvfp4:CompressedTensorsW4A4Fp4.__init__",
    "Its three attributes, with a kernel of ours: vLLM's chooses Marlin, and raises on a CPU.",
    "fc56ac6fb6ab",
)
_copy(
    f"{_SCHEMES}.compressed_tensors_w4a4_mxfp4:CompressedTensorsW4A4Mxfp4.__init__",
    "Its two attributes, with Marlin: vLLM's kernel quantizes activations too on some GPUs.",
    "3debfc305334 281a33578b72",
)
_copy(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w4a4_nvfp4:CompressedTensorsW4A4Nvfp4MoEMethod.create_weights",
    "It is called for another class: packed experts without a GPU have the same tensors.",
    "d46822d03564",
)
_copy(
    "vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
    "Its list of sizes, which goes on for larger batches (decode/graph_sizes.py).",
    "9bb47912808e",
)
_copy(
    "vllm.lora.model_manager:LoRAModelManager._add_adapter",
    "Its bookkeeping, for an adapter whose weights are in the buffers already.",
    "54352d3cd3e2",
)

# Methods that classes of ours define anew, and classes in whose place ours stand.
_override(
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA",
    "Logits are computed by the layer inside: no adapter of ours is on the head.",
    "6c932d1c7ae1 6365ef214339",
)
_overrides(
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",
    "Base and adapter are computed together.",
    {"apply": "e0e21c3e7470"},
)
_overrides(
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
    "No tokens are sorted for kernels that do not run.",
    {"update_metadata": "8a504455355b"},
)
_overrides(
    "vllm.model_executor.custom_op:CustomOp",
    "Norms, activation and rotation run on our kernels.",
    {"forward": "61a117647bd8"},
)
_override(
    "vllm.model_executor.kernels.linear.mxfp4.base:MxFp4LinearKernel",
    "The CPU build has no kernel for the format; weights are decoded once.",
    "292a177e1b9a",
)
_override(
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel",
    "Packed linears run on our kernels, or without a GPU on a reference.",
    "082639f798d7",
)
_overrides(
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    "Packed experts are decoded once where there is no GPU.",
    {"create_weights": "ad2e0b1eb192", "process_weights_after_loading": "86158354e7b2"},
)
_overrides(
    "vllm.model_executor.layers.quantization.base_config:QuantizationConfig",
    "A compressed-tensors checkpoint is taken where the user names our method.",
    {"override_quantization_method": "b88392395e20"},
)
_overrides(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig",
    "Every linear outside of `ignore` is of one format, with our choice of kernel.",
    {
        "__init__": "15be0a158c20",
        "_get_scheme_from_parts": "29612d24b5f0 f9cdb00356da",
        "get_name": "e55684cf430e",
        "get_quant_method": "d071dc0d5e5e",
    },
)
_override(
    f"{_SCHEMES}.compressed_tensors_scheme:CompressedTensorsScheme",
    "The CPU build has no kernel for FP8, and for INT8 one that cannot be reloaded or adapted.",
    "d4506110098a",
)
_overrides(
    f"{_SCHEMES}.compressed_tensors_w4a4_nvfp4:CompressedTensorsW4A4Fp4",
    "A rollout that computes with the actor's base holds no weights of its own (share_base).",
    {"create_weights": "79629fe32525", "process_weights_after_loading": "32d3676c972f"},
)
_overrides(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader",
    "Weights are quantized while they are read, or are the actor's own.",
    {
        "__init__": "4981b986142f",
        "download_model": "f97d43792303",
        "load_model": "ade5c192232e 633703765dfb",
        "load_weights": "a8b9b232bb76",
    },
)
_overrides(
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    "Steps in which every request decodes one token run on our attention.",
    {"do_kv_cache_update": "2af5f73b8b80 d15d06a0a44d", "forward": "b75fb9b3eeba 943e91971d4e"},
)
_overrides("vllm.v1.sample.sampler:Sampler", "Our kernel draws tokens in one launch.", {"forward": "1d3bc39416a2"})
