"""An NVFP4Linear whose packed bytes FSDP2 shards: each rank holds its part, a layer is gathered while it computes.

FSDP2 of torch 2.11 takes floating-point parameters only, casts them to the dtype of the mixed precision, and gathers
them with `_foreach_copy_`, whose CUDA kernel copies bf16 through float32, which changes the bits of a NaN: 0.2 % of the
words of an NVFP4 weight look like one, and lost this way they are as much as the error of the format. So the bytes of a
linear are one bf16 parameter that is never computed with, and a tensor subclass hands them to the all-gather as uint8
(`fsdp_pre_all_gather`, the extension point of FSDP2 that torchao's quantized tensors use).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from verl_qerl.checkpoints.manifest import checksum
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.nvfp4 import BLOCK_SIZE, nvfp4_weight
from verl_qerl.modules.format_linear import NVFP4Linear
from verl_qerl.modules.placement.shards import sharding_group

_HEAD = 16  # bytes of the decode scale with its padding: what follows starts where a kernel can load it in one piece


class PackedBytes(torch.Tensor):
    """Bytes that look like bf16 to FSDP2; every operation that gives bf16 keeps the class, the all-gather sees uint8.

    Kept where tensors are dispatched: DTensor detaches what it holds below `__torch_function__`.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def over(cls, data: torch.Tensor) -> torch.Tensor:
        """Wrap a plain bf16 tensor as PackedBytes over the same storage."""
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation on plain tensors."""
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
            return tree_map_only(torch.Tensor, cls._keep, found)

    @classmethod
    def _keep(cls, found: torch.Tensor) -> torch.Tensor:
        return cls.over(found) if type(found) is torch.Tensor and found.dtype == torch.bfloat16 else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        """The bytes of this rank."""
        return (self.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The bytes of all ranks as the parameter; from the second time on, `out` lies over them already."""
        (gathered,) = all_gather_outputs
        if out is None:
            return gathered.view(torch.bfloat16), ()
        if out.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr():
            raise RuntimeError("the gathered bytes are not those of the parameter. FSDP2 has changed. Report this.")
        return None


class ShardedNVFP4Linear(NVFP4Linear):
    """NVFP4Linear with its packed tensors as views of one parameter.

    Attributes:
        packed_bytes: [L] bf16, never computed with: 16 bytes with the decode scale, codes, block scales, and zeros up
            to a length that every rank gets an equal part of. A DTensor while it is sharded; then only `packed` works.
            It is part of `state_dict` until `persistent` is False.
    """

    packed_bytes: nn.Parameter
    persistent = True
    _checksum: torch.Tensor | None = None  # of what `packed` gathered, until a pass has seen the same

    def _allocate(self, device: torch.device | str) -> None:
        num_bytes = _HEAD + self.out_features * (self.in_features // 2 + self.in_features // BLOCK_SIZE)
        multiple = _HEAD * (dist.get_world_size() if dist.is_initialized() else 1)
        self._set(torch.zeros(-(-num_bytes // multiple) * multiple, dtype=torch.uint8, device=device))

    def _set(self, flat: torch.Tensor) -> None:
        self.packed_bytes = nn.Parameter(PackedBytes.over(flat.view(torch.bfloat16)), requires_grad=False)

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        N, K = self.out_features, self.in_features
        codes, scale, _ = flat[_HEAD:].split([N * K // 2, N * K // BLOCK_SIZE, flat.numel() - _HEAD - N * K * 9 // 16])
        return codes.view(N, K // 2), scale.view(N, K // BLOCK_SIZE), flat[:4]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `PackedLinear.tensors`; the bytes must have been gathered.

        Raises:
            RuntimeError: They are sharded, or not what `packed` gathered before; that is looked at once.
        """
        if isinstance(self.packed_bytes, DTensor):
            raise RuntimeError("the packed weight is sharded: it can be read within its layer's forward and backward.")
        flat = self.packed_bytes.detach().view(torch.uint8)
        if self._checksum is not None:
            self._check(flat, self._checksum)
        return self._cut(flat)

    def _check(self, flat: torch.Tensor, expected: torch.Tensor) -> None:
        # A copy through another dtype, or one that was not awaited, would change bits and no shape.
        if not torch.equal(checksum(flat), expected.to(flat.device)):
            raise RuntimeError(
                "the packed bytes of a linear that FSDP2 gathered for a pass are not those that its digest was taken"
                " of. The same bits are needed. Leave +qerl.base.shard out, and report this."
            )
        self._checksum = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[N, K / 2] uint8, the codes."""
        return self.tensors()[0]

    def fill(self, packed: PackedWeight) -> None:
        """Copy the tensors of a packed weight of this size, to their own device."""
        flat = torch.zeros(self.packed_bytes.numel() * 2, dtype=torch.uint8, device=packed.codes.device)
        codes, scale, decode_scale = self._cut(flat)
        codes.copy_(packed.codes)
        scale.copy_(packed.block_scale.view(torch.uint8))
        decode_scale.copy_(packed.global_decode_scale.reshape(1).view(torch.uint8))
        self._set(flat)

    def packed(self) -> PackedWeight:
        """The weight; where it is sharded, gathered: then all ranks must call this."""
        parameter = self.packed_bytes
        if not isinstance(parameter, DTensor):
            return super().packed()
        part = parameter.to_local().view(torch.uint8).to(parameter.device_mesh.device_type)
        group = sharding_group(parameter.device_mesh)
        flat = part.new_empty(dist.get_world_size(group) * part.numel())
        dist.all_gather_into_tensor(flat, part, group)
        self._checksum = checksum(flat)
        codes, scale, decode_scale = self._cut(flat)
        return nvfp4_weight(codes, scale.view(torch.float8_e4m3fn), decode_scale.view(torch.float32))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.persistent:
            del destination[f"{prefix}packed_bytes"]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        name = f"{prefix}packed_bytes"
        if not self.persistent and name in missing:  # a checkpoint names the base, it does not hold it
            missing.remove(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def but_no_dtype(tensor: torch.Tensor) -> torch.Tensor:
            found = fn(tensor)
            if tensor is not self.packed_bytes or found.dtype == tensor.dtype:
                return found
            return tensor.to(found.device)

        return super()._apply(but_no_dtype, recurse)
