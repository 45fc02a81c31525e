"""The single-adapter product: its reference against plain matrices, its kernels in Triton's interpreter."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verl_qerl.kernels.rollout import lora
from verl_qerl.kernels.rollout.lora import MAX_SPLITS, lora_expand, lora_shrink, member_of_tile, num_splits

ACTIVE, NONE = torch.tensor([False]), torch.tensor([True])
# Rows below, at and above a tile and every number of splits; members of equal and unequal size; ranks below a tile too.
CASES = [
    (rows, slices, rank)
    for rows in (1, 16, 17, 65, 1025)
    for slices, rank in (((128, 32, 32), 8), ((64, 64), 16), ((48,), 32))
] + [(17, (32, 16), 320)]
# Half, not bf16: the interpreter multiplies bf16 as integers.
SCRIPT = """
import sys
import torch
from verl_qerl.kernels.rollout.lora import launch_expand, launch_shrink

cases, empty = torch.load(sys.argv[1]), torch.empty
torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan"))
outputs = []
for x, a, y, b, members, slots, bias in cases:
    partial = torch.full((x.shape[0] + 960, a.shape[0]), float("nan"))
    launch_shrink(x, a, partial)
    outputs.append((partial, launch_expand(y, partial, b, members, slots, bias, x.shape[1])))
torch.save(outputs, sys.argv[2])
"""


def build(rows: int, slices: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float16) -> tuple:
    generator = torch.Generator().manual_seed(rows + rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    N, K = sum(slices), 208
    slots = torch.zeros(rows + 3, dtype=torch.int64)
    slots[1::3] = -1  # tokens without an adapter
    bias = random(N) if rows % 2 else None
    members = member_of_tile(slices, "cpu")
    return random(rows, K), random(len(slices) * rank, K) / 14, random(rows, N), random(N, rank), members, slots, bias


def plain(x, a, y, b, slots, bias, slices, rank) -> torch.Tensor:
    """Member by member, in float64."""
    total = y.double() if bias is None else y.double() + bias.double()
    low = (x.double() @ a.double().T).to(y.dtype).double()
    start = 0
    for member, size in enumerate(slices):
        columns = slice(start, start + size)
        product = low[:, member * rank : (member + 1) * rank] @ b[columns].double().T
        total[:, columns] += product * (slots[: len(x), None] >= 0)
        start += size
    return total


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_low_rank_product(case):
    rows, slices, rank = case
    x, a, y, b, members, slots, bias = build(rows, slices, rank)
    out = lora_expand(y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, bias, x.shape[1])
    expected = plain(x, a, y, b, slots, bias, slices, rank)
    # Half an ulp of the result, and one of each low-rank value, which float32 may round to the other side.
    assert ((out.double() - expected).abs() <= 2**-10 * expected.abs() + 2**-6).all()
    assert (out.double() - y.double()).abs().max() > 1


def test_kernels_agree_with_the_reference_and_write_everything(interpreter):
    inputs = [build(*case) for case in CASES]
    outputs = interpreter(SCRIPT, inputs, "in.pt", "out.pt")
    for case, (x, a, y, b, members, slots, bias), (partial, out) in zip(CASES, inputs, outputs, strict=True):
        splits = num_splits(case[0], x.shape[1])
        reference = lora_shrink(x, a, ACTIVE)
        assert partial.shape == reference.shape
        assert partial[splits * len(x) :].isnan().all(), case
        parts = partial[: splits * len(x)].view(splits, len(x), -1)
        torch.testing.assert_close(parts.sum(0), reference[: len(x)], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            out, lora_expand(y, partial, b, members, slots, ACTIVE, bias, x.shape[1]), rtol=2e-3, atol=1e-2
        )


@pytest.mark.parametrize(("capability", "limit"), [(89, 101376), (90, 232448)])
def test_kernels_fit_the_shared_memory_of_every_gpu(capability, limit, monkeypatch):
    """Compiled, not run."""
    for rows, slices, rank in ((16, (3584, 512, 512), 32), (64, (18944, 18944), 64), (64, (3584,), 512)):
        with monkeypatch.context() as patched:
            found = launched(patched, limit, rows, slices, rank)
        for name, options in found:
            assert compiled(name, options, capability) <= limit, (name, options)


def launched(monkeypatch, limit: int, rows: int, slices: tuple[int, ...], rank: int) -> list[tuple[str, dict]]:
    """(kernel, constants and options) that the product would be launched with where `limit` bytes are shared."""
    found = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **options: found.append((self.name, options))

    monkeypatch.setattr(lora, "_shared_bytes", lambda _: limit)
    for name in ("_shrink_kernel", "_expand_kernel"):
        monkeypatch.setattr(lora, name, Recorder(name))
    x, N = torch.empty(rows, 3584, dtype=torch.bfloat16), sum(slices)
    a, b = x.new_empty(len(slices) * rank, x.shape[1]), x.new_empty(N, rank)
    partial = lora_shrink(x, a, NONE)
    lora.launch_shrink(x, a, partial)
    slots = torch.zeros(rows, dtype=torch.int64)
    lora.launch_expand(x.new_empty(rows, N), partial, b, member_of_tile(slices, "cpu"), slots, None, x.shape[1])
    return found


def compiled(name: str, options: dict, capability: int) -> int:
    """Bytes of shared memory of a kernel's thread block."""
    kernel = getattr(lora, name)
    settings = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    constants = {key: value for key, value in options.items() if key not in settings}
    types = {"partial_ptr": "*fp32", "members_ptr": "*i32", "slots_ptr": "*i64"}
    types |= {"out_ptr": "*fp32"} if name == "_shrink_kernel" else {}
    signature = {
        key: "constexpr" if key in constants else types.get(key, "*bf16" if key.endswith("_ptr") else "i32")
        for key in kernel.arg_names
    }
    any_number = {*constants, "M", "splits"}
    whole = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(signature) if key not in any_number}
    source = ASTSource(kernel, signature, constants, whole)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings).metadata.shared


def test_without_an_adapter_only_the_bias_is_added():
    x, a, y, b, members, slots, bias = build(17, (64, 64), 16)
    partial = lora_shrink(x, a, NONE)
    assert torch.equal(
        lora_expand(y, partial, b, members, slots, NONE, bias, x.shape[1]), (y.float() + bias.float()).half()
    )
    assert torch.equal(lora_expand(y, partial, b, members, slots, NONE, None, x.shape[1]), y)


def test_a_tile_of_columns_never_spans_two_members():
    assert member_of_tile((256, 128), "cpu").tolist() == [0, 0, 1]
    assert member_of_tile((128, 64), "cpu").tolist() == [0, 0, 1]
    assert member_of_tile((48, 16, 16), "cpu").tolist() == [0, 0, 0, 1, 2]
    with pytest.raises(ValueError, match="not all multiples of 16"):
        member_of_tile((64, 24), "cpu")


def test_every_number_of_splits_fits():
    assert {num_splits(rows, K) for rows in range(1, 5000) for K in (512, 18944)} <= set(range(1, MAX_SPLITS + 1))


def test_operators_can_be_traced():
    x, a, y, b, members, slots, bias = build(5, (64, 64), 16, torch.bfloat16)
    torch.library.opcheck(lora_shrink, (x, a, ACTIVE))
    torch.library.opcheck(lora_expand, (y, lora_shrink(x, a, ACTIVE), b, members, slots, ACTIVE, bias, 208))
