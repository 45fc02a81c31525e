import json

import pytest

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.nvfp4.record import RECORD, BaseRecord, read_record

WRITTEN = BaseRecord("org/model", "mse", ("lm_head", "re:.*mlp"), {"model.layers.0.a": "0123"}, {"r": 8})


def test_what_is_written_is_read(tmp_path):
    WRITTEN.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]
    assert read_record(tmp_path) == WRITTEN


def test_a_checkpoint_of_another_engine_has_none(tmp_path):
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("content", ["", '{"base": "m"', '{"base": "m", "scale": "mse"}', json.dumps({"unknown": 1})])
def test_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(CheckpointFormatError, match="the record of the base cannot be read"):
        read_record(tmp_path)
