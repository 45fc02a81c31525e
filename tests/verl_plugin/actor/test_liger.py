"""Liger's kernels on a GPU against transformers' own, in a model with our adapters."""

import copy
import importlib

import pytest

pytest.importorskip("verl")
pytest.importorskip("liger_kernel")

import torch
from peft import LoraConfig, get_peft_model
from qerl_testing import assert_close, random_decoder

from verl_qerl.modules.adapted_linear import Siblings, fuse_adapters
from verl_qerl.modules.trained_norm import train_norms
from verl_qerl.verl_plugin.actor.liger import apply_liger

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3"])
def family(request):
    """A family whose module is restored: Liger puts its rotary function and classes there."""
    module = importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    before = dict(vars(module))
    yield request.param
    vars(module).update(before)


def passes(model, dtype, norms):
    """Log-probs and the gradients of their sum."""
    model = model.to("cuda", dtype).requires_grad_(False)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if norms:
        train_norms(model)
        for name, parameter in model.named_parameters():
            if name.endswith("shift"):
                torch.nn.init.normal_(parameter, std=0.01)
    fuse_adapters(model)
    ids = torch.arange(60, device="cuda").reshape(2, 30) % 50
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        log_p = model(ids).logits.float().log_softmax(-1)
    log_p[..., 3].sum().backward()
    return log_p.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


# Float32: the order of sums. bf16: two passes of transformers' own with other orders of sums differ as much.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=["float32", "bf16"])
@pytest.mark.parametrize("norms", [False, True], ids=["frozen norms", "trained norms"])
def test_log_probs_and_gradients(family, norms, dtype, bound, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = random_decoder(family, gain=2.0)
    expected, gradients = passes(copy.deepcopy(model), dtype, norms)
    together, compute = [], Siblings._outputs
    monkeypatch.setattr(Siblings, "_outputs", lambda self, x: together.append(len(self.members)) or compute(self, x))
    apply_liger(model)
    assert model.model.norm._get_name() == "LigerRMSNorm"
    found, its_gradients = passes(model, dtype, norms)
    assert together == [3, 1, 2, 1] * 2  # q, k, v are still one product, and gate, up
    assert_close(found, expected, bound)
    for name, gradient in gradients.items():
        assert_close(its_gradients[name], gradient, bound)


def test_a_norm_is_that_of_transformers_but_for_the_order_of_its_sum(family):
    model = random_decoder(family).to("cuda")
    norm = model.model.norm
    x = torch.randn(4096, norm.weight.shape[0], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, x.shape[1]))
        expected = norm(x)
        apply_liger(model)
        different = (norm(x) != expected).float().mean()
    assert different < 1e-2  # elements whose float32 value lies at the edge of two bf16 values
