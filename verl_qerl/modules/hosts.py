"""What we change in PEFT, transformers and torch, or repeat of their sources, while an actor is built and trained.

Their versions are not pinned: the fingerprints are those of the versions that were tested, on a GPU and on a CPU.
"""

from verl_qerl.upstream import Register

TORCH, TRANSFORMERS = ("2.11.0", "2.13.0"), ("5.9.0", "5.10.4")
_peft, _torch, _transformers = Register("0.21.0", "0.21.2"), Register(*TORCH), Register(*TRANSFORMERS)

LORA_LINEAR = _peft.add(
    "class",
    "peft.tuners.lora.layer:Linear",
    "Linears with one input compute base and adapter in one fused function.",
    "c909a8357d38",
)
_peft.add_overrides("peft.tuners.lora.layer:Linear", LORA_LINEAR.why, {"forward": "a15acbef02c6"})
_peft.add_overrides(
    "peft.utils.other:ModulesToSaveWrapper",
    "A trained norm is its frozen weight plus a float32 shift, rounded once.",
    {
        "__init__": "66b8922376bd",
        "_forward_wrapped": "22d62938d164",
        "_forward_wrapped_passthrough": "60d65a64159d",
    },
)
LINEAR_FORWARD = _torch.add(
    "method",
    "torch.nn.modules.linear:Linear.forward",
    "For one pass linears multiply by weights rounded as the rollout holds them.",
    "76181b0142f4",
)
_torch.add_overrides(
    "torch.nn.modules.module:Module",
    "A packed weight spread over ranks is saved, loaded and moved as the bytes that it is.",
    {
        "_apply": "3ad584b1fbee",
        "_load_from_state_dict": "e4487a7c8db7 7d6e454eb2f5",
        "_save_to_state_dict": "b5044b50b237",
    },
)
_transformers.add(
    "override",
    "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts",
    "Packed experts stand in its place.",
    "ab5ff281521e",
)
_transformers.add(
    "copy",
    "transformers.integrations.moe:grouped_mm_experts_forward",
    "Its steps, in their order, over packed weights.",
    "4f676edc983d",
)
CHANGES = (*_peft, *_torch, *_transformers)
