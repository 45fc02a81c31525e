import pytest

pytest.importorskip("omegaconf")
from omegaconf import OmegaConf

from verl_qerl.verl_plugin.config.nodes import plain


def test_a_node_becomes_plain_values():
    config = OmegaConf.create({"a": 3, "node": {"b": "${a}", "c": [1, "${a}"]}})
    found = plain(config.node)
    assert found == {"b": 3, "c": [1, 3]}
    assert (type(found), type(found["c"])) == (dict, list)


def test_what_is_no_node_stays():
    assert plain(None) is None
    assert plain(3) == 3
    assert plain({"a": 1}) == {"a": 1}
