"""Batches of uneven rows as verl's TransferQueue hands them out, without the queue."""

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta


def nested(rows):
    """Rows of numbers or tensors of any lengths as one jagged tensor."""
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def first(rows, count):
    """So many of them, of tensors or objects."""
    return nested(rows.unbind()[:count]) if isinstance(rows, torch.Tensor) else rows[:count]


class Queue:
    """TransferQueue's two calls that verl uses from `old_log_probs` to its loss, on a dictionary."""

    def __init__(self, fields):
        self.fields = fields

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        names = [name for name in select_fields or self.fields if name in self.fields]
        return TensorDict({name: first(self.fields[name], len(keys)) for name in names}, len(keys))

    def kv_batch_put(self, keys, partition_id, fields):
        self.fields.update(fields.items())
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys])
