"""A worker fetches the tensors of a batch by verl's own bridge, and leaves the texts where they are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import transfer_queue
from qerl_testing import load_beside
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from verl_qerl.verl_plugin.trainer.model_fields import with_tensors
from verl_qerl.verl_plugin.trainer.trainer import FeaturedTrainer

nested = load_beside(__file__, "transfer_queue_fakes").nested
KEYS = ["a_0_0", "b_0_0"]
TENSORS = ["input_ids", "loss_mask", "rm_scores"]


@pytest.fixture
def batch(monkeypatch):
    """Of two answers; as verl's trainer has it, it names no fields."""

    def get(keys, partition_id):
        count = len(keys)
        texts = {
            "raw_prompt": [{"role": "user"}] * count,
            "uid": ["a", "b"][:count],
            "multi_modal_inputs": [{}] * count,
        }
        tensors = {name: nested([[1, 2], [3]][:count]) for name in TENSORS}
        return TensorDict(tensors | {name: NonTensorStack(*rows[:count]) for name, rows in texts.items()}, count)

    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    return KVBatchMeta(partition_id="train", keys=KEYS, tags=[{"seq_len": 2}, {"seq_len": 1}], extra_info={"seed": 1})


def test_tensors_are_chosen_and_the_batch_stays_as_it_is(batch):
    chosen = with_tensors(batch)
    assert sorted(chosen.fields) == sorted([*TENSORS, "multi_modal_inputs"])
    assert (chosen.keys, chosen.tags, chosen.partition_id) == (KEYS, batch.tags, "train")
    assert chosen.extra_info is batch.extra_info  # verl's trainer leaves marks in it for later passes
    assert batch.fields is None


@pytest.mark.parametrize("bypasses", [False, True])
@pytest.mark.parametrize(
    "method",
    ["_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values", "_update_critic", "_update_actor"],
)
def test_every_pass_of_a_model_gets_tensors_alone(monkeypatch, batch, method, bypasses):
    monkeypatch.setattr(trainer_base.PPOTrainer, method, lambda self, batch, metrics: batch)
    trainer = type("Trainer", (FeaturedTrainer, trainer_base.PPOTrainer), {"__init__": lambda self: None})()
    trainer.features, trainer.run = [], SimpleNamespace(bypasses=bypasses)
    given = getattr(trainer, method)(batch, {})
    scores_nothing = bypasses and method == "_compute_old_log_prob"
    assert (given.fields is None) == scores_nothing


def test_a_worker_fetches_what_was_chosen(batch):
    """The method of verl's bridge, given the store's answer to a question for metadata."""
    from verl.utils import transferqueue_utils

    asked = []

    class Meta:
        extra_info = None

        def select_fields(self, fields):
            asked.append(fields)
            return self

    async def retrieve(keys, partition_id, create):
        return Meta()

    client = SimpleNamespace(async_kv_retrieve_meta=retrieve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transferqueue_utils, "TQ_INITIALIZED", True)
        patch.setattr(transferqueue_utils.tq, "get_client", lambda: client)
        transferqueue_utils.kv_batch_meta2batch_meta(with_tensors(batch))
    assert [sorted(fields) for fields in asked] == [sorted([*TENSORS, "multi_modal_inputs"])]
