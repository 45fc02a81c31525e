import hashlib

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.checkpoints.digest import check_same_base, differing_weights, model_digest, weight_digest
from verl_qerl.formats.nvfp4 import nvfp4_weight


def test_digest_is_sha256_of_shape_codes_block_scales_and_global_scale() -> None:
    weight = nvfp4_weight(
        torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8),
        torch.tensor([[0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor(1.0),
    )
    content = b"(1, 16)" + bytes([1, 2, 3, 4, 5, 6, 7, 8, 0x38]) + b"\x00\x00\x80\x3f"
    assert weight_digest(weight) == hashlib.sha256(content).hexdigest()[:16]


def test_one_flipped_nibble_one_scale_or_the_shape_changes_the_digest() -> None:
    weight = random_packed_weight(16, 64)
    codes, scale = weight.codes.clone(), weight.block_scale.view(torch.uint8).clone()
    codes[7, 11] ^= 0x10
    scale[3, 2] ^= 1
    digests = [
        weight_digest(weight),
        weight_digest(nvfp4_weight(codes, weight.block_scale, weight.global_decode_scale)),
        weight_digest(nvfp4_weight(weight.codes, scale.view(torch.float8_e4m3fn), weight.global_decode_scale)),
        weight_digest(nvfp4_weight(weight.codes, weight.block_scale, weight.global_decode_scale * 2)),
        weight_digest(
            nvfp4_weight(weight.codes.view(8, 64), weight.block_scale.view(8, 8), weight.global_decode_scale)
        ),
    ]
    assert len(set(digests)) == len(digests)


def test_views_and_one_element_scales_have_the_digest_of_their_values() -> None:
    weight = random_packed_weight(16, 64)
    wide = torch.stack((weight.codes, weight.codes), dim=-1)[..., 0]
    assert not wide.is_contiguous()
    same = nvfp4_weight(wide, weight.block_scale, weight.global_decode_scale.reshape(1))
    assert weight_digest(same) == weight_digest(weight)


def test_model_digest_ignores_order_but_not_names_or_bits() -> None:
    assert model_digest({"a": "1", "b": "2"}) == model_digest({"b": "2", "a": "1"})
    different = [{"a": "2", "b": "1"}, {"a": "1", "c": "2"}, {"a": "1"}, {"a": "1", "b": "3"}]
    assert len({model_digest(weights) for weights in [*different, {"a": "1", "b": "2"}]}) == 5


def test_the_same_base_passes_in_any_order() -> None:
    check_same_base({"a": "1", "b": "2"}, {"b": "2", "a": "1"})


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"a": "1", "b": "9"}, r"1 of 2 differ, first 'b' \(2, 9\)"),
        ({"a": "1"}, r"1 of 2 differ, first 'b' \(2, None\)"),
        ({"a": "1", "b": "2", "c": "3"}, r"1 of 3 differ, first 'c' \(None, 3\)"),
        ({}, r"2 of 2 differ, first 'a'"),
    ],
)
def test_a_different_base_is_told_with_name_and_both_digests(rollout: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_same_base({"a": "1", "b": "2"}, rollout)


def test_an_actor_without_packed_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="the actor holds no packed weights"):
        check_same_base({}, {})


def test_weights_that_differ_or_are_on_one_side_only_are_named():
    assert differing_weights({"a": "1", "c": "1"}, {"a": "1", "b": "1", "c": "2"}) == ["b", "c"]
    assert differing_weights({"a": "1"}, {"a": "1"}) == []
