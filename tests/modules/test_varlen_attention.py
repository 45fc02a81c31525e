"""On a GPU: FlashAttention as torch ships it, beside attention in float64, at the shapes of models that are trained."""

import pytest
import torch
from qerl_testing import assert_close, load_beside, random_qwen2

from verl_qerl.modules import varlen_attention as varlen

pytestmark = pytest.mark.gpu

reference = load_beside(__file__, "varlen_reference")
LENGTHS = (130, 1, 333, 2, 1, 64, 257)
LAYER = type("Layer", (), {"is_causal": True})()


def computed(heads, groups, size, window, dtype, **options):
    """The output and the gradients of ours, and those of float64 from the same numbers."""
    made, grad = reference.inputs(LENGTHS, heads, groups, size, dtype, "cuda")
    positions = reference.positions(LENGTHS, "cuda")
    out, _ = varlen.varlen_attention(LAYER, *made, None, sliding_window=window, position_ids=positions, **options)
    found = [out[0], *(x[0].transpose(0, 1) for x in torch.autograd.grad(out, made, grad))]
    rows = [x.detach()[0].transpose(0, 1).double().requires_grad_() for x in made]
    expected = reference.attention(*rows, LENGTHS, window, options.get("scaling"))
    exact = [expected, *torch.autograd.grad(expected, rows, grad[0].double())]
    return [x.detach() for x in found], [x.detach() for x in exact]


@pytest.mark.parametrize("window", [None, 2, 64, 300, 1000])
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(14, 2, 64), (4, 4, 64), (4, 1, 96), (12, 2, 128), (28, 4, 128), (4, 2, 256)]
)
def test_values_and_gradients_are_those_of_float64(heads, groups, size, window):
    found, exact = computed(heads, groups, size, window, torch.bfloat16)
    # Weights of attention are rounded to bf16 before the second product, outputs and gradients after it: 2**-9 each on
    # average over numbers of either sign; the gradient of the scores is a difference of two such numbers.
    for ours, theirs, bound in zip(found, exact, (0.005, 0.01, 0.01, 0.005), strict=True):
        assert_close(ours, theirs, bound)


def test_scaling_and_float16():
    found, exact = computed(8, 2, 128, None, torch.float16, scaling=0.05)
    for ours, theirs in zip(found, exact, strict=True):
        assert_close(ours, theirs, 0.002)


def test_float32_is_computed_in_float32():
    found, exact = computed(8, 2, 64, 64, torch.float32)
    for ours, theirs in zip(found, exact, strict=True):
        assert_close(ours, theirs, 1e-3)  # TF32 where torch is told so


def test_float32_under_autocast_takes_the_kernel(monkeypatch):
    called = []
    original = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **more: called.append(args) or original(*args, **more))
    with torch.autocast("cuda", torch.bfloat16):
        found, exact = computed(8, 2, 64, None, torch.float32)
    assert [args[0].dtype for args in called] == [torch.bfloat16]
    assert_close(found[0], exact[0], 0.01)


def test_a_lost_border_is_seen():
    made, _ = reference.inputs(LENGTHS, 8, 2, 128, torch.bfloat16, "cuda")
    rows = [x.detach()[0].transpose(0, 1) for x in made]
    lengths = (LENGTHS[0] + LENGTHS[1] + LENGTHS[2], *LENGTHS[3:])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    out = varlen.packed_attention(*rows, varlen.Packing(lengths, bounds))
    with pytest.raises(AssertionError, match="RMS error ratio"):
        assert_close(out, reference.attention(*rows, LENGTHS), 0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_gives_what_it_gives_with_sdpa(checkpointing):
    """Log-probs and gradients; both in bf16, so each is as far from the other as from what is exact."""
    varlen.register()
    ids = torch.randint(0, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).cuda()
    found = {}
    for name in (varlen.NAME, "sdpa", "float32"):
        model = random_qwen2(hidden_size=256, num_attention_heads=4, num_key_value_heads=2).cuda()
        model = model.float() if name == "float32" else model.bfloat16()
        model.set_attn_implementation("sdpa" if name == "float32" else name)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        log_p = (
            model(ids, position_ids=reference.positions(LENGTHS, "cuda"), use_cache=False)
            .logits.float()
            .log_softmax(-1)
        )
        log_p[..., 0].sum().backward()
        grads = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
        found[name] = (log_p.detach(), grads)
    (ours, our_grads), (theirs, their_grads), (exact, exact_grads) = found.values()
    error = (theirs - exact).norm() / exact.norm()
    assert_close(ours, exact, max(2 * float(error), 1e-4))
    for name, grad in our_grads.items():
        theirs_off = (their_grads[name] - exact_grads[name]).norm() / exact_grads[name].norm()
        assert_close(grad, exact_grads[name], max(2 * float(theirs_off), 1e-3))


def test_the_host_waits_for_the_gpu_once_a_pass():
    """Where sequences lie is read back once; layers, and their second forward in backward, wait for nothing."""
    made, grad = reference.inputs(LENGTHS, 8, 2, 64, torch.bfloat16, "cuda")
    positions = reference.positions(LENGTHS, "cuda")
    varlen.varlen_attention(LAYER, *made, None, position_ids=positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = varlen.varlen_attention(LAYER, *made, None, position_ids=positions)
        out.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
