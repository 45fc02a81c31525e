"""Ranks do not share sequences where the attention of a model takes no part in it."""

from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes))
assert model.config._attn_implementation == "sdpa"
try:
    apply_monkey_patch(model, ulysses_sp_size=2)
    said = "nothing"
except ValueError as error:
    said = str(error)
assert "needs flash attention" in said, f"apply_monkey_patch told {said}"

apply_monkey_patch(model, ulysses_sp_size=1)
model.config._attn_implementation_internal = "flash_attention_2"
apply_monkey_patch(model, ulysses_sp_size=2)
