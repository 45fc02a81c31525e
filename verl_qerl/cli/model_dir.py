"""What the commands that write a model share: tensors to disk in threads, the files beside them, and checks."""

import shutil
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.writer import ShardedWriter
from verl_qerl.formats import PackedWeight
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.tensor_spec import TensorSpec

EXPORT_REPORT, QUANTIZATION_REPORT = "export_report.json", "quantization_report.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
# Say of the source what is not true of the output.
_OF_THE_SOURCE = ("hf_quant_config.json", QUANTIZATION_REPORT, EXPORT_REPORT)
_NUM_STORING = 4  # threads; SHA-256 and writing both release the GIL
_MAX_WAITING = 8  # results between arithmetic and disk; bounds memory when the disk is slower


def store(
    writer: ShardedWriter, items: Iterable[tuple[str, PackedWeight | torch.Tensor]], layout: str = "compressed-tensors"
) -> dict[str, str]:
    """Write tensors, and packed weights in `layout`, while the next ones are computed.

    Returns:
        module -> digest of each packed weight.
    """
    digests: dict[str, str] = {}
    waiting: deque[Future[None]] = deque()

    def write(name: str, item: PackedWeight | torch.Tensor) -> None:
        if isinstance(item, torch.Tensor):
            writer.add(name, item)
            return
        item = item.to("cpu")
        for key, tensor in named_tensors(name, item, layout).items():
            writer.add(key, tensor)
        digests[name] = weight_digest(item)

    with ThreadPoolExecutor(_NUM_STORING) as pool:
        for name, item in items:
            waiting.append(pool.submit(write, name, item))
            if len(waiting) == _MAX_WAITING:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    return digests


def total_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Bytes of all tensors."""
    return sum(spec.size_bytes for spec in specs.values())


def check_free_space(folder: Path, wanted: int) -> None:
    """Require `wanted` bytes of room on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise ValueError(
            f"the disk is too full: free={free / 1e9:.1f} GB. The output takes {wanted / 1e9:.1f} GB. "
            "Free some space or choose another --out."
        )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse with a ValueError a norm, embedding or the like that would make answers NaN."""
    is_weight = name.endswith((".weight", ".bias")) and tensor.is_floating_point() and tensor.element_size() > 1
    if is_weight and tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):  # no copy of the tensor
        raise ValueError(
            f"{name!r} holds NaN or infinite values. Finite weights are accepted. Download the model again."
        )


def in_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model computing in bf16."""
    name = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5
    return {**config, name: "bfloat16"}


def pick_device(wanted: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`; the last is refused where there is none."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError("torch finds no GPU: device='cuda'. With a GPU, cuda is accepted. Use --device cpu.")
    return "cuda" if available and wanted != "cpu" else "cpu"


def device_name(device: str) -> str:
    """What a report calls it."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, generation configuration and the like: everything but weights and what describes them."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _OF_THE_SOURCE:
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":  # transformers' name
            shutil.copytree(path, folder / path.name)
