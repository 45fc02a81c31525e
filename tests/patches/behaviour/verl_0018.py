"""A critic is loaded with the attention that its configuration names, where flash-attn is not installed."""

import sys
import tempfile

import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
from verl.utils.model import load_valuehead_model

sys.modules["flash_attn"] = None  # type: ignore[assignment]
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
with tempfile.TemporaryDirectory() as folder:
    Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager", num_labels=1)
    try:
        critic = load_valuehead_model(folder, torch.bfloat16, config, trust_remote_code=False)
        found = critic.config._attn_implementation
    except RuntimeError as error:
        found = str(error)
assert found == "eager", f"the critic has {found}"
assert critic(torch.arange(6)[None]).logits.shape == (1, 6, 1)
assert critic.dtype == torch.bfloat16
