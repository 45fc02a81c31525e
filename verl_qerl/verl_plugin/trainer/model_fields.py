"""What models are given of a batch: tensors.

verl's trainer names no fields, so that a worker fetches all that dataset, agent loop and reward have left in the
TransferQueue (questions, dictionaries of the reward, metrics), and splits it by micro-batches. No model reads these
objects, and each answer has one of every kind: they take longer to fetch and to split than tensors do.
"""

import copy
from typing import Any

import torch

# Dictionaries of tensors, which a model with images reads.
_KEPT = frozenset({"multi_modal_inputs"})


def with_tensors(batch: Any) -> Any:
    """A copy of a KVBatchMeta whose `fields` are those of its first answer that are tensors."""
    import transfer_queue as tq  # not on the driver, which asks for options only

    found = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
    chosen = copy.copy(batch)
    chosen.fields = [name for name, value in found.items() if isinstance(value, torch.Tensor) or name in _KEPT]
    return chosen
