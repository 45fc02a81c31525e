"""The places of the norms that get noise in a model.

QeRL puts noise on the norm whose output attention reads, and on the one whose output the MLP reads (section 3.3). The
names alone do not say so: in Gemma 2 and 3 `post_attention_layernorm` comes after the attention, before the sum.
"""

from verl_qerl.algos.aqn import TARGETS

# `model_type` of config.json (of its text part) -> whether a router reads post_attention_layernorm too. In vLLM's
# models of these families `input_layernorm` goes into attention alone, and both norms multiply by their weight.
FAMILIES = {
    "arcee": False,
    "granite": False,
    "llama": False,
    "ministral3": False,
    "mistral": False,
    "mixtral": True,
    "olmoe": True,
    "phi3": False,
    "qwen2": False,
    "qwen2_5_vl_text": False,
    "qwen2_moe": True,
    "qwen2_vl_text": False,
    "qwen3": False,
    "qwen3_moe": True,
    "qwen3_vl_text": False,
    "seed_oss": False,
    "smollm3": False,
    "solar": False,
}


def check_places(family: str, targets: tuple[str, ...] | None) -> None:
    """Refuse with a ValueError the paper's norms in a family of models where they may mean something else.

    Args:
        targets: `AQNConfig.targets`; norms that the user has named are accepted.
    """
    if targets is None and family not in FAMILIES:
        raise ValueError(
            f"it is not known where model_type={family} has the norms that attention and MLP read. Accepted are"
            f" {', '.join(FAMILIES)}. Name the norms by `+aqn.targets=[...]`, where they are those of Llama"
            f" [{','.join(TARGETS)}], in Gemma 2 and 3 [input_layernorm,pre_feedforward_layernorm], or leave out"
            " `+aqn.enabled=true`."
        )


def reaches_router(family: str, norms: tuple[str, ...]) -> bool:
    """Whether noise on these norms changes which experts a token goes to."""
    return FAMILIES.get(family, False) and "post_attention_layernorm" in norms
