from itertools import islice

import torch
from packing import Document, collate, document_stream, packed_rows, single_rows


def documents(lengths):
    return [Document([index] * (length - 2), [index] * 2) for index, length in enumerate(lengths)]


def test_a_pass_repeats_each_source_as_often_as_asked():
    first, second = documents([5, 6]), documents([7])
    a_pass = list(islice(document_stream([first, second], [1, 3], seed=0), 5))
    assert sorted(map(len, a_pass)) == [5, 6, 7, 7, 7]


def test_the_seed_decides_the_order():
    source = [documents(range(3, 60))]
    orders = [list(islice(document_stream(source, [1], seed), 50)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_packing_cuts_nothing_loses_nothing_and_leaves_little_room():
    lengths = torch.randint(40, 200, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    source = documents(lengths)
    seen = []
    for rows in islice(packed_rows(document_stream([source], [1], seed=0), 8, 512), 6):
        sums = [sum(map(len, row)) for row in rows]
        assert max(sums) <= 512
        assert sum(sums) > 0.95 * 8 * 512
        seen += [document.prompt[0] for row in rows for document in row]
    assert len(seen) == len(set(seen)) > 100


def test_what_does_not_fit_comes_in_a_later_batch():
    drawn, seen = [], []

    def recorded(stream):
        for document in stream:
            drawn.append(id(document))
            yield document

    stream = recorded(iter(documents([300] * 50 + [10] * 50)))
    for rows in islice(packed_rows(stream, 4, 512), 5):
        seen += [id(document) for row in rows for document in row]
    assert len(seen) == len(set(seen))
    # The first 13 long ones are more than three batches hold, one per row.
    assert set(drawn[:12]) <= set(seen)


def test_single_rows_hold_one_document():
    (rows,) = islice(single_rows(document_stream([documents([5, 6, 7])], [1], seed=0), 3), 1)
    assert sorted(len(document) for (document,) in rows) == [5, 6, 7]


def test_weights_mark_answers_and_never_the_start_of_a_document():
    one, two = Document([1, 2], [3]), Document([4, 5], [6, 7])
    ids, weights = collate([[one, two], [one]], pad_id=9, prompt_weight=0.5, row_length=None)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9, 9, 9]]
    assert weights.tolist() == [[0.0, 0.5, 1.0, 0.0, 0.5, 1.0, 1.0], [0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]]
    assert collate([[one]], pad_id=9, prompt_weight=0.0, row_length=16)[0].shape == (1, 16)
