import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("verl")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("worker_extension_cases.py")
PEFT = {"r": 8, "lora_alpha": 16}
NVFP4 = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="module")
def found(fresh_json):
    return fresh_json(str(SCRIPT))


def kinds(case):
    return [event[0] for event in case["log"]]


@pytest.mark.parametrize("name", NVFP4)
def test_an_nvfp4_worker_has_no_qat(found, name):
    case = found[name]
    assert case["flags"] == [False, False]
    assert not case["verl saw a quantized model"]
    assert case["the worker keeps it"]


def test_verl_alone_takes_nvfp4_for_qat(found):
    """When this fails, verl has learned it: delete `_without_nvfp4`, and patches/verl/0003."""
    assert found["upstream"] == [True, True]


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_other_models_are_shown_to_verl_as_they_are(found, name):
    assert found[name] == {
        "flags": [False, False],
        "verl saw a quantized model": name == "fp8",
        "the same configuration": True,
        "the worker keeps it": True,
    }


SENT = {
    "q.lora_A.weight": ["torch.bfloat16", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]],
    "q.lora_B.weight": ["torch.bfloat16", [[10.0, 11.0], [12.0, 13.0], [14.0, 15.0], [16.0, 17.0]]],
}
PLACED = [["transfer", True], ["place", 123, SENT, PEFT]]


def test_equal_bases_pass_and_vllm_sees_its_own_keys_only(found):
    case = found["equal"]
    assert case["error"] is None
    assert case["log"] == [PLACED[0], ["look"], PLACED[1]]


def test_differing_bases_stop_the_run_after_the_transfer(found):
    case = found["differing"]
    assert kinds(case) == ["transfer", "look"]  # an error before the transfer would leave the sender waiting
    assert case["error"].startswith("ValueError: two processes hold different base weights: 1 of 1 differ, first")


def test_an_actor_without_a_packed_base_stops_the_run(found):
    """The first adapter brings no digests when our engine is not the one that trains."""
    case = found["without digests"]
    assert kinds(case) == ["transfer", "look"]
    assert case["error"].startswith(
        "ValueError: the actor holds no packed weights. A run with `+rollout=...` and an adapter needs"
    )


def test_a_rollout_without_a_packed_base_stops_the_run(found):
    assert "holds no packed weights of ours" in found["base of others"]["error"]


def test_the_bases_are_compared_once(found):
    case = found["second adapter"]
    assert (kinds(case), case["error"]) == (["transfer", "look", "place", "transfer", "place"], None)


def test_a_bf16_base_is_not_compared(found):
    assert found["bf16 adapter"] == {"log": PLACED, "error": None, "clean": None}


def test_an_adapter_leaves_the_clean_norms_alone(found):
    case = found["noise, adapter"]
    assert (kinds(case), case["clean"]) == (["transfer", "place"], 1.0)


@pytest.mark.parametrize("name", ["noise, whole model", "noise, whole model before the adapter"])
def test_a_whole_model_brings_new_clean_norms(found, name):
    case = found[name]
    assert (kinds(case), case["clean"], case["error"]) == (["verl", "recapture"], 3.0, None)


def test_a_flat_adapter_is_that_of_named_tensors(found):
    assert found["flat"] == {"log": PLACED, "error": None, "clean": None}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("second piece missing", "10 of 14 numbers, 0 strange"),
        ("a strange tensor", "14 of 14 numbers, 1 strange tensors ['q.lora_A.weight']"),
        ("a piece beyond the end", "14 of 14 numbers, 1 strange tensors ['verl_qerl_adapter.12']"),
    ],
)
def test_half_an_adapter_is_never_written(found, name, reason):
    case = found[f"flat, {name}"]
    assert kinds(case) == ["transfer"]
    assert case["error"].startswith(f"ValueError: the adapter did not arrive as it was announced: {reason}")


def test_a_piece_that_comes_twice_is_the_same_piece(found):
    assert found["flat, a piece twice"] == found["flat"]


def test_with_several_adapters_on_the_host_verl_loads_it(found):
    case = found["room for two adapters on the host"]
    assert case["log"] == [["transfer", True], ["remove", 123], ["verl loads", SENT, PEFT]]
    assert case["error"] is None


def test_a_worker_says_which_adapter_it_holds(found):
    case = found["checksum"]
    assert (case["error"], kinds(case)) == (None, ["transfer", "place"] * 2)
    assert case["sync"]["number"] == 2
    # Of named tensors, which verl's own engine sends without a checksum, the worker computes the same.
    assert found["no checksum"]["sync"] == {"number": 1, "checksum": case["sync"]["checksum"]}


def test_an_adapter_that_arrives_otherwise_is_not_written(found):
    case = found["another checksum"]
    assert kinds(case) == ["transfer", "place", "transfer"]
    assert case["error"].startswith("ValueError: the adapter arrived otherwise than the actor sent it: checksum=")
    assert case["sync"]["number"] == 1


@pytest.mark.parametrize("name", ["an adapter", "norms"])
def test_a_lost_adapter_stops_the_run_in_its_sync(found, name):
    case = found[f"{name} that is lost" if name == "an adapter" else "norms that are lost"]
    assert case["error"].startswith(f"ValueError: the rollout does not hold the {name.split()[-1]}")
    assert case["sync"]["number"] == 0


@pytest.mark.parametrize("name", ["norms", "norms, room for two adapters"])
def test_trained_norms_come_with_the_adapter(found, name):
    case = found[name]
    assert case["error"] is None
    if name == "norms":
        assert case["log"] == PLACED
    else:
        assert case["log"][2] == ["verl loads", SENT, PEFT]
    # Noise is off at the end of the case: the clean weights are those that were synced.
    assert case["norms"] == [1.25, 1 + 2.0**-9]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("norms, engine not told", "the actor trains 2 norms and this engine was not told: additional_config."),
        ("norms that do not come", "the actor trains other norms than the rollout has: 'input_layernorm' of None"),
    ],
)
def test_norms_on_one_side_only_stop_the_run(found, name, reason):
    case = found[name]
    assert kinds(case) == ["transfer"]
    assert case["error"].startswith(f"ValueError: {reason}")
    assert case["norms"] == [1.0, 1.0]


def test_a_whole_model_is_reloaded_bucket_by_bucket_where_no_adapter_is(found):
    case = found["whole model, int8"]
    once = [["load", ["first"]], ["load", ["second"]], ["finish"], ["recapture"]]
    assert case["log"] == [["reload", "int8", 0], *once, ["reload", "int8", 1], *once]
    expected = {"sync_bytes": 10, "sync_bytes_bf16": 18, "sync_linears": 8, "sync_checked_linears": 4}
    before, *after = case["told"]
    assert before == {"number": 0, "checksum": None}
    assert [told["number"] for told in after] == [1, 2]
    assert [told | expected for told in after] == after
    assert len({told["checksum"] for told in after}) == 2  # of other tensors


@pytest.mark.parametrize("name", ["whole model, bf16", "whole model, adapter"])
def test_otherwise_verl_loads_a_whole_model(found, name):
    assert found[name]["log"] == [["transfer"], ["recapture", "torch.bfloat16"]] * 2


@pytest.mark.parametrize("name", ["broken bucket", "broken bucket, broken model"])
def test_a_bucket_that_cannot_be_loaded_leaves_no_sender_without_an_answer(found, name):
    case = found[name]
    once = [["load", "first"], ["answer", "first"], ["load", "second"], ["answer", "second"], ["answer", "third"]]
    assert case["log"] == once * 2
    assert case["errors"] == ["AssertionError: a weight of another shape"] * 2
    assert case["held"] == [[None] * 3] * 2  # verl gives shared memory back only when nobody looks into it


def test_no_name_clashes_with_vllms_worker(found):
    assert found["clash"] == []
