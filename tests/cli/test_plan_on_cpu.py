import json

import pytest

from verl_qerl.cli import main


@pytest.fixture
def model(tmp_path):
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 40, "num_key_value_heads": 8}))
    return tmp_path


def test_prints_what_fits(model, capsys):
    options = ["--gpu-gib", "79.6", "--tokens", "4736", "--utilization", "0.6"]
    assert main(["plan", "--model", str(model), *options]) == 0
    printed = capsys.readouterr().out
    assert "packed base: 16.35" in printed
    assert "update: 33." in printed
    assert main(["plan", "--model", str(model / "config.json"), *options]) == 0


def test_the_format_of_the_base_counts(model, capsys):
    options = ["--gpu-gib", "141", "--tokens", "4736", "--utilization", "0.6", "--format", "int8"]
    assert main(["plan", "--model", str(model), *options]) == 0
    assert "packed base: 29.06" in capsys.readouterr().out


def test_one_when_the_estimate_is_above(model, capsys):
    options = ["--gpu-gib", "79.6", "--tokens", "65536", "--utilization", "0.6", "--no-checkpointing"]
    assert main(["plan", "--model", str(model), *options]) == 1
    assert "above the GPU's memory by the estimate: update" in capsys.readouterr().out


def test_refuses_what_certainly_does_not_fit(model, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", str(model), "--gpu-gib", "79.6", "--utilization", "0.9"])
    assert stopped.value.code == 1
    assert "too little GPU memory for the configuration: the rollout holds" in capsys.readouterr().err


def test_every_switch_counts(model, capsys):
    printed = set()
    for options in ([], ["--shard-base"], ["--whole-logits"], ["--param-offload"], ["--optimizer-offload"]):
        base = ["--gpu-gib", "141", "--gpus", "2", "--utilization", "0.5", "--tensor-parallel", "2"]
        main(["plan", "--model", str(model), *base, *options])
        printed.add(capsys.readouterr().out)
    assert len(printed) == 5


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path), "--gpu-gib", "80"])
