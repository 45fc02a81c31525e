"""For stock verl 0.9.1, by VERL_USE_EXTERNAL_MODULES: `use_fused_kernels` under FSDP2 with a head that is not tied.

verl shards such a head by itself and then reads its weight without calling it: "mixed torch.Tensor and DTensor". Here
it stays with the root, as verl's pull request 7427 has it, so that the baseline of train_step.sh has fused kernels too.
"""

from typing import Any

from verl.utils import fsdp_utils

_select = fsdp_utils._select_fsdp2_wrap_targets


def _without_head(model: Any, layers: list[str]) -> list[Any]:
    head = model.get_output_embeddings()
    return [module for module in _select(model, layers) if module is not head]


fsdp_utils._select_fsdp2_wrap_targets = _without_head
