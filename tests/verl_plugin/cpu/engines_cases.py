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

kinds = []
for prepare in (lambda: None, verl_plugin.activate):  # a stock run, then one of ours
    prepare()
    kinds.append(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
assert kinds[0] is FSDPEngineWithLMHead, kinds
assert kinds[1].__name__ == "QerlFSDPEngine", kinds

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = HFModelConfig(
    path=sys.argv[1],
    model_type="value_model",
    load_tokenizer=False,
    use_remove_padding=False,
    override_config={"attn_implementation": "sdpa"},
)
engine = EngineRegistry.new(
    "value_model",
    "fsdp2",
    model,
    FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
    FSDPOptimizerConfig(lr=1e-3, total_training_steps=2),
    CheckpointConfig(),
)
engine.initialize()
tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa").model
with torch.no_grad():
    values = engine.module(tokens).logits  # FSDP2 computes in bf16
    head = engine.module.score.weight.full_tensor().bfloat16()
    expected = base(tokens).last_hidden_state @ head.T
assert values.shape == (2, 16, 1), values.shape
assert values.std() > 0
torch.testing.assert_close(values.float(), expected.float(), atol=2e-2, rtol=2e-2)
assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
assert all(p.requires_grad for p in engine.module.parameters())
