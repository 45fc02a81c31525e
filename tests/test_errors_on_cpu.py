"""Errors cross a process boundary unchanged and are what callers of the standard library expect."""

import pickle

import pytest

from verl_qerl.errors import CheckpointFormatError, UpstreamDriftError


@pytest.mark.parametrize("kind", [UpstreamDriftError, CheckpointFormatError])
def test_survives_pickling(kind):
    copy = pickle.loads(pickle.dumps(kind("shard 2 of 3 is missing")))
    assert type(copy) is kind
    assert str(copy) == "shard 2 of 3 is missing"


def test_a_damaged_checkpoint_is_a_value_error():
    with pytest.raises(ValueError, match="cut short"):
        raise CheckpointFormatError("cut short")


def test_drift_is_not_taken_for_a_missing_module():
    assert issubclass(UpstreamDriftError, RuntimeError)
    assert not issubclass(UpstreamDriftError, ImportError)
