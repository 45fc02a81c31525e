"""Started by test_engines_on_cpu.py: what verl's registry gives on the CPU platform, on one rank.

python engines_cases.py <model>
"""

import sys

import torch
import verl  # noqa: F401  (its plugins come with it, ours among them)
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_qerl import verl_plugin
from verl_qerl.modules import varlen_attention

kinds = []
for prepare in (lambda: None, verl_plugin.activate):  # a stock run, then one of ours
    prepare()
    kinds.append(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
assert kinds[0] is FSDPEngineWithLMHead, kinds
assert kinds[1].__name__ == "QerlFSDPEngine", kinds

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def critic(attention, **options):
    """An engine on the model, its head the same each time."""
    model = HFModelConfig(
        path=sys.argv[1],
        model_type="value_model",
        load_tokenizer=False,
        override_config={"attn_implementation": attention},
        **options,
    )
    torch.manual_seed(1)
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=2)
    sharding = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    found = EngineRegistry.new("value_model", "fsdp2", model, sharding, optimizer, CheckpointConfig())
    found.initialize()
    return found.module


tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa").model
padded = critic("sdpa", use_remove_padding=False)
with torch.no_grad():
    values = padded(tokens).logits  # FSDP2 computes in bf16
    head = padded.score.weight.full_tensor().bfloat16()
    expected = base(tokens).last_hidden_state @ head.T
assert values.shape == (2, 16, 1), values.shape
assert values.std() > 0
torch.testing.assert_close(values.float(), expected.float(), atol=2e-2, rtol=2e-2)
assert {p.dtype for p in padded.parameters()} == {torch.float32}
assert all(p.requires_grad for p in padded.parameters())

# Without padding, and with the attention that runs of ours have where flash-attn is not installed.
packed = critic(varlen_attention.NAME)
positions = torch.arange(16).repeat(2)[None]
found = packed(tokens.reshape(1, 32), position_ids=positions).logits
torch.testing.assert_close(found.view(2, 16, 1).float(), expected.float(), atol=2e-2, rtol=2e-2)
found.float().sum().backward()
untrained = [name for name, p in packed.named_parameters() if p.grad is None or not p.grad.full_tensor().any()]
assert not untrained, untrained
