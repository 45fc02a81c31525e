"""The engine whose base is shared: as the others to the bit, in one piece of memory that stays where it is."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch

SCRIPT = Path(__file__).with_name("lend_base_cases.py")


@pytest.fixture(scope="module")
def alone(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("lent")
    fresh_process(str(SCRIPT), str(models), str(out), "shared", "norms", "plain", "base", "resume")
    return torch.load(out / "0.pt")


@pytest.fixture(scope="module")
def ranks(models, fresh_process, tmp_path_factory):
    out = tmp_path_factory.mktemp("lent2")
    fresh_process(str(SCRIPT), str(models), str(out), "shared", "base", ranks=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_all_packed_linears_are_in_one_piece_that_offloading_does_not_move(alone, ranks):
    for found in (alone, *ranks):
        assert found["shared"] | {"error": None} == {"error": None, "linears": 14, "in one piece": True, "stays": True}


def test_a_first_sync_with_a_rollout_that_did_not_ask_stops_the_run(alone, ranks):
    assert all("the rollout holds a base of its own" in found["shared"]["error"] for found in (alone, *ranks))


def test_bits_and_logits_are_those_of_a_base_of_its_own(alone, ranks):
    plain, shared = alone["plain"], alone["base"]
    assert shared["digests"] == shared["sent digests"] == plain["digests"]
    for key in ("logits", "base"):
        assert torch.equal(shared[key], plain[key])
        assert torch.equal(shared[key], shared[f"expected {key}" if key == "base" else "expected"])
    assert all(found["base"]["digests"] == plain["digests"] for found in ranks)
    assert all(torch.equal(found["base"]["base"], plain["base"]) for found in ranks)


def test_an_update_is_the_same_to_the_bit(alone):
    plain, shared, peft, plain_peft = alone["norms"]
    assert plain == shared > 0
    assert peft == plain_peft > 0


def test_a_checkpoint_is_resumed_without_sharing(alone):
    found = alone["resume"]
    assert all(found["restored"].values())
    assert found["same next step"]
    assert found["digests"]
    assert not [key for key in found["keys"] if "packed" in key or "tiles" in key]
