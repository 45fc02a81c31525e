"""The methods of vLLM that ours override, with the fingerprints of their sources in 0.24.0 and in 0.27.0.

One fingerprint where both are the same. With another vLLM those that differ are what is to be read first.
"""

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.custom_op:CustomOp.forward": ("61a117647bd8",),
    "vllm.model_executor.kernels.linear.mxfp4.base:MxFp4LinearKernel.apply_weights": ("3aa65d76c572",),
    "vllm.model_executor.kernels.linear.mxfp4.base:MxFp4LinearKernel.process_weights_after_loading": ("6ea3f817f851",),
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel.__init__": ("e2728e9f85c1",),
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel.apply_weights": ("3aa65d76c572",),
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel.can_implement": ("d5d2ce5b5520",),
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel.is_supported": ("bf9afdd94627",),
    "vllm.model_executor.kernels.linear.nvfp4.base:NvFp4LinearKernel.process_weights_after_loading": ("6ea3f817f851",),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights": (
        "ad2e0b1eb192",
    ),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    ":UnquantizedFusedMoEMethod.process_weights_after_loading": ("86158354e7b2",),
    "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method": (
        "b88392395e20",
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.__init__": (
        "15be0a158c20",
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig._get_scheme_from_parts": ("29612d24b5f0", "f9cdb00356da"),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_name": (
        "e55684cf430e",
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig.get_quant_method": ("d071dc0d5e5e",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme"
    ":CompressedTensorsScheme.create_weights": ("50301505cb50",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme"
    ":CompressedTensorsScheme.get_min_capability": ("09fd53dc79c5",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_mxfp4"
    ":CompressedTensorsW4A4Mxfp4.__init__": ("3debfc305334", "281a33578b72"),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
    ":CompressedTensorsW4A4Fp4.__init__": ("fc56ac6fb6ab",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
    ":CompressedTensorsW4A4Fp4.create_weights": ("79629fe32525",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
    ":CompressedTensorsW4A4Fp4.process_weights_after_loading": ("32d3676c972f",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8"
    ":CompressedTensorsW8A8Int8.create_weights": ("433b150f4b7e",),
    "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8"
    ":CompressedTensorsW8A8Int8.process_weights_after_loading": ("dcabfa5f481a",),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": ("218ee489ba7f",),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading": (
        "a3c94ddd1d6c",
    ),
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.__init__": ("4981b986142f",),
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.download_model": ("f97d43792303",),
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": ("ade5c192232e", "633703765dfb"),
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_weights": ("a8b9b232bb76",),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": ("2af5f73b8b80", "d15d06a0a44d"),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": ("b75fb9b3eeba", "943e91971d4e"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": ("fdfab91bed9d", "ea1da4aa7dce"),
    "vllm.v1.sample.sampler:Sampler.forward": ("1d3bc39416a2",),
}
