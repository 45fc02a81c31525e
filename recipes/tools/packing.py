"""Batches for pretrain.py: whole documents in rows, without an attention mask.

A row holds one document, or as many whole ones as fit into `row_length`. Rows always begin with a document and
attention is plainly causal: later documents of a row see the earlier ones, which the model learns to ignore, and in
exchange attention takes the flash kernel and every batch has one shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Document:
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def document_stream(sources: Sequence[Sequence[Document]], repeats: Sequence[int], seed: int) -> Iterator[Document]:
    """Shuffled passes without end; a pass has each document of source i `repeats[i]` times."""
    documents = [doc for source, count in zip(sources, repeats, strict=True) for doc in source for _ in range(count)]
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(documents)):
            yield documents[index]


def single_rows(stream: Iterator[Document], num_rows: int) -> Iterator[list[list[Document]]]:
    """Batches of `num_rows` rows with one document each."""
    while True:
        yield [[next(stream)] for _ in range(num_rows)]


def packed_rows(stream: Iterator[Document], num_rows: int, row_length: int) -> Iterator[list[list[Document]]]:
    """Batches of `num_rows` rows with up to `row_length` tokens, filled longest document first.

    Args:
        stream: Documents of at most `row_length` tokens.
    """
    pending: list[Document] = []
    while True:
        while sum(map(len, pending)) < 1.2 * num_rows * row_length:  # a fifth more than fits leaves choice for the gaps
            pending.append(next(stream))
        pending.sort(key=len, reverse=True)
        rows: list[list[Document]] = [[] for _ in range(num_rows)]
        room = np.full(num_rows, row_length)
        left = []
        for doc in pending:
            row = int(np.argmax(room >= len(doc)))  # the first that has room, or 0 when none has
            if room[row] < len(doc):
                left.append(doc)
                continue
            rows[row].append(doc)
            room[row] -= len(doc)
        pending = left
        yield rows


def collate(
    rows: Sequence[Sequence[Document]], *, pad_id: int, prompt_weight: float, row_length: int | None
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and the loss weight of predicting each of them.

    Args:
        rows: Documents per row.
        pad_id: Fills the end of a row, with weight 0.
        prompt_weight: Weight of prompt tokens; answers have 1.
        row_length: Columns; None takes the longest row.

    Returns:
        ids, int64 [B, T], and weights, float32 [B, T]. The first token of a document is predicted from nothing of
        its own, so its weight is 0.
    """
    import torch

    length = row_length or max(sum(map(len, row)) for row in rows)
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    weights = np.zeros((len(rows), length), dtype=np.float32)
    for row, documents in enumerate(rows):
        at = 0
        for doc in documents:
            middle, end = at + len(doc.prompt), at + len(doc)
            ids[row, at:end] = doc.prompt + doc.answer
            weights[row, at + 1 : middle] = prompt_weight
            weights[row, middle:end] = 1.0
            at = end
    return torch.from_numpy(ids), torch.from_numpy(weights)
