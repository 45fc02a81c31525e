import json

import pytest
import torch

from verl_qerl.checkpoints.record import RECORD, BaseRecord, damaged_file, file_mark, read_record
from verl_qerl.errors import CheckpointFormatError

WRITTEN = BaseRecord(
    "org/model", "mse", ("lm_head", "re:.*mlp"), {"model.layers.0.a": "0123"}, {"r": 8}, 2, True, {"a.pt": 3}, ("norm",)
)


def test_what_is_written_is_read(tmp_path):
    WRITTEN.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]
    assert read_record(tmp_path) == WRITTEN


def test_a_checkpoint_of_another_engine_has_none(tmp_path):
    assert read_record(tmp_path) is None


OTHER_KINDS = [
    json.dumps({"base": "m", "scale": "mse", "ignore": [], "digests": {}, "adapter": {}} | other)
    for other in (
        *({"base": 3}, {"ignore": 3}, {"adapter": []}, {"digests": "a"}, {"files": None}, {"format": 3}, {"scale": []}),
        *({"ignore": [3]}, {"trained_norms": [["norm"]]}),
    )
]


@pytest.mark.parametrize(
    "content",
    ["", '{"base": "m"', '{"base": "m", "scale": "mse"}', '{"unknown": 1}', "[]", "3", *OTHER_KINDS],
)
def test_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(CheckpointFormatError, match=r"the record of the base cannot be read.* Take another checkpoint"):
        read_record(tmp_path)


def test_a_record_of_before_files_were_listed_is_read(tmp_path):
    older = {"base": "m", "scale": "mse", "ignore": ["lm_head"], "digests": {}, "adapter": {}}
    (tmp_path / RECORD).write_text(json.dumps(older))
    assert read_record(tmp_path) == BaseRecord("m", "mse", ("lm_head",), {}, {}, 1, False, {})


def test_the_first_file_that_is_not_whole_is_named(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"123")
    assert damaged_file(tmp_path, {"a.pt": 3}) is None
    assert damaged_file(tmp_path, {"b.pt": 3, "a.pt": 3}) == "b.pt is missing"
    assert damaged_file(tmp_path, {"b.pt": 3, "a.pt": 4}) == "a.pt has 3 of 4 bytes"


def test_a_file_with_the_bytes_of_another_is_named(tmp_path):
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0), ("again.pt", 1.0)):
        torch.save({"weight": torch.full((3,), value)}, tmp_path / name)
    marks = {name: file_mark(tmp_path / name) for name in ("a.pt", "b.pt")}
    assert damaged_file(tmp_path, json.loads(json.dumps(marks))) is None
    assert damaged_file(tmp_path, {"a.pt": marks["a.pt"][0]}) is None  # as older records have it
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes())
    assert damaged_file(tmp_path, marks) == "b.pt holds something else"
