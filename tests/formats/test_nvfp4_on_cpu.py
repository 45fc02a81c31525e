import pytest
import torch

from verl_qerl.formats.channel import E4M3_MAX
from verl_qerl.formats.e2m1 import E2M1_MAX, E2M1_VALUES
from verl_qerl.formats.nvfp4 import BLOCK_SIZE, E4M3_MIN_NORMAL, nvfp4_weight


def parts(N: int = 2, K: int = 32) -> dict[str, torch.Tensor]:
    return {
        "codes": torch.zeros(N, K // 2, dtype=torch.uint8),
        "block_scale": torch.ones(N, K // 16).to(torch.float8_e4m3fn),
        "global_decode_scale": torch.tensor(1.0),
    }


def test_code_table_is_e2m1() -> None:
    # sign s, exponent e of 2 bits with bias 1, mantissa m of 1 bit; e = 0 is subnormal
    for code, value in enumerate(E2M1_VALUES):
        s, e, m = code >> 3, (code >> 1) & 3, code & 1
        magnitude = m * 0.5 if e == 0 else 2.0 ** (e - 1) * (1 + m / 2)
        assert value == (-1) ** s * magnitude
    assert str(E2M1_VALUES[8]) == "-0.0"
    assert max(E2M1_VALUES) == E2M1_MAX


def test_constants_are_those_of_e4m3() -> None:
    assert (BLOCK_SIZE, E4M3_MAX, E4M3_MIN_NORMAL) == (16, 448.0, 2.0**-6)


def test_shape_and_size() -> None:
    weight = nvfp4_weight(**parts(N=3, K=48))
    assert weight.shape == (3, 48)
    assert weight.size_bytes == 3 * 24 + 3 * 3 + 4
    assert weight.to("cpu").shape == (3, 48)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("codes", torch.zeros(2, 16, dtype=torch.int8)),
        ("block_scale", torch.ones(2, 2)),
        ("global_decode_scale", torch.tensor(1.0, dtype=torch.float64)),
    ],
)
def test_wrong_dtypes_are_refused(key: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"of NVFP4 is torch\.\w+ \(.*\) for a weight \(2, 32\), not torch"):
        nvfp4_weight(**parts() | {key: tensor})


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("codes", torch.zeros(2, 8, dtype=torch.uint8)),
        ("block_scale", torch.ones(2, 3).to(torch.float8_e4m3fn)),
        ("block_scale", torch.ones(3, 2).to(torch.float8_e4m3fn)),
        ("global_decode_scale", torch.ones(2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(key: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"of NVFP4 is torch\.\w+ \(.*\) for a weight .* not torch"):
        nvfp4_weight(**parts() | {key: tensor})
