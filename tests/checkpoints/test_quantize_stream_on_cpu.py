import pytest
import torch

from verl_qerl.checkpoints.stream import quantize_stream
from verl_qerl.formats import FORMATS, get_format

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"{Q}.weight": torch.randn(32, 64, generator=generator)}
    made[f"{K}.weight"] = torch.randn(32, 64, generator=generator) * 1e-3  # alone it would have another scale
    return made | {f"{Q}.bias": torch.randn(32, generator=generator), "step": torch.tensor([1])}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_linears_are_quantized_from_bf16_and_the_rest_is_rounded(name):
    form = get_format(name)
    tensors = weights()
    found = dict(quantize_stream(tensors.items(), {Q, K}, form))
    assert set(found) == {f"{module}.{part}" for module in (Q, K) for part in form.parts} | {f"{Q}.bias", "step"}
    expected = form.quantize_group({module: tensors[f"{module}.weight"].bfloat16() for module in (Q, K)})
    for module, packed in expected.items():
        for part, tensor in form.to_tensors(packed).items():
            assert torch.equal(found[f"{module}.{part}"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(found[f"{Q}.bias"], tensors[f"{Q}.bias"].bfloat16())
    assert found["step"].dtype == torch.int64


def test_a_weight_that_is_not_finite_is_named():
    tensors = weights()
    tensors[f"{K}.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.k_proj' holds 1 NaN or infinite values"):
        list(quantize_stream(tensors.items(), {Q, K}, get_format("int8")))


def test_only_what_shares_a_scale_waits():
    seen = []

    def source():
        for name, tensor in weights().items():
            seen.append(name)
            yield name, tensor

    first = next(quantize_stream(source(), {Q, K}, get_format("int8")))
    assert (first[0], seen) == (f"{Q}.weight", [f"{Q}.weight"])
