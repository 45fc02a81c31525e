"""Started by test_activation_offload*.py: gradients of adapters with activations in the host's memory and without.

python activation_offload_cases.py <cpu or cuda>
"""

import json
import sys
import tempfile

import torch
import verl  # noqa: F401  (its plugins come with it, ours among them)
from qerl_testing import random_qwen2, rms_error_ratio
from verl.trainer.config import CheckpointConfig
from verl.utils import activation_offload
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

from verl_qerl import verl_plugin
from verl_qerl.modules.varlen_attention import NAME
from verl_qerl.verl_plugin.actor.engine import QerlFSDPEngine
from verl_qerl.verl_plugin.config.base_options import QerlFSDPEngineConfig

verl_plugin.activate()
DEVICE = sys.argv[1]
LAYERS = 4
Handler = activation_offload.SynchronizedGroupOffloadHandler
taken: list[torch.Tensor] = []
stock_offload = Handler.offload


def offload(tensor, pin_memory=DEVICE != "cpu"):
    """As verl's, whose pinned memory needs a GPU; what goes to the host is seen."""
    taken.append(tensor)
    return stock_offload(tensor, pin_memory=pin_memory)


Handler.offload = staticmethod(offload)


def gradients(folder, targets, offloaded, checkpointed):
    """Of all adapters, after two passes."""
    torch.manual_seed(1)
    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        lora_rank=8,
        target_modules=targets,
        override_config={"attn_implementation": NAME},
        enable_activation_offload=offloaded,
        enable_gradient_checkpointing=checkpointed,
        use_fused_kernels=True,
    )
    config = QerlFSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype="bf16", qerl={})
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=2)
    engine = QerlFSDPEngine(model, config, optimizer, CheckpointConfig())
    engine.initialize()
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    positions = torch.arange(48, device=DEVICE)[None] % 24  # two sequences
    with engine.train_mode(), torch.autocast(DEVICE, torch.bfloat16):
        engine.optimizer_zero_grad()
        for shift in (0, 1):
            inputs = {"input_ids": tokens.roll(shift, 1), "position_ids": positions, "use_cache": False}
            out = engine.module(**inputs, return_dict=True, temperature=1.0, calculate_entropy=False)
            (-out.log_probs.sum()).backward()
        found = {name: p.grad.full_tensor().cpu() for name, p in engine.module.named_parameters() if p.requires_grad}
    return found


def compare(folder, targets, checkpointed):
    """The largest error of a gradient, and how many floats, and bytes of packed weights, went to the host."""
    expected = gradients(folder, targets, False, checkpointed)
    assert not taken
    found = gradients(folder, targets, True, checkpointed)
    assert found.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    report = {
        "error": max(rms_error_ratio(found[name], expected[name]) for name in expected),
        "floats": sum(t.numel() for t in taken if t.is_floating_point()),
        "packed": sum(t.numel() for t in taken if t.dtype == torch.uint8),
    }
    taken.clear()
    return report


def main():
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        random_qwen2(num_hidden_layers=LAYERS, gain=2.0).save_pretrained(f"{folder}/model")
        found = {
            f"{kind}, {'checkpointed' if checkpointed else 'kept'}": compare(f"{folder}/model", targets, checkpointed)
            for kind, targets in (("all", "all-linear"), ("some", ["q_proj", "down_proj"]))
            for checkpointed in (False, True)
        }
        torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
