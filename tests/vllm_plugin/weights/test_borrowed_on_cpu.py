"""An engine that computes with the base of another process: the same bits, no copy, and an end with its owner."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig

from verl_qerl.modules.placement.lending import Lender, meeting_place
from verl_qerl.modules.placement.shared_base import RepackedGroup, SharedBase
from verl_qerl.vllm_plugin.weights.borrowed import BorrowedKernel, BorrowedNVFP4, attach, borrowed_by, is_borrowing

pytestmark = pytest.mark.usefixtures("sockets")

SHARED = {"scale": "minmax", "share_base": True}


@pytest.fixture
def owner(lend, model_dir, monkeypatch):
    monkeypatch.setenv("VERL_RAY_JOB_ID", "a-run")
    return lend(model_dir("qwen2"), "a-run")


def held(worker) -> dict[str, tuple[bool, str]]:
    """Linear -> whether its tensors are the mapped bytes; device of its words."""
    model = worker.model_runner.get_model()
    storage = borrowed_by(model).base.flat.untyped_storage().data_ptr()
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "qerl_plan"):
            tensors = module.weight, module.weight_scale, module.weight_global_scale
            mapped = all(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)
            found[name.replace(".base_layer", "")] = mapped, str(module.weight.device)
    return found


def digests(worker):
    from verl_qerl.vllm_plugin.weights.loader import base_digests

    return base_digests(worker.model_runner.get_model())


def test_the_engine_computes_with_the_bytes_of_its_owner_until_that_ends(
    owner, start, engine, vllm, model_dir, write_adapter, prompt_log_probs, generate
):
    options = {"enable_lora": True, "max_lora_rank": 8, "model_loader_extra_config": SHARED}
    shared = start(model_dir("qwen2"), aqn={"enabled": True}, **options)
    engine.reset_prefix_cache()
    adapter = vllm.lora.request.LoRARequest("one", 31, str(write_adapter("one", ["q_proj", "v_proj", "down_proj"], 8)))
    assert torch.equal(prompt_log_probs(shared), prompt_log_probs(engine))
    # Without a GPU an engine's own base has no repacked copy, and its adapter is added to outputs that are rounded.
    found, expected = (prompt_log_probs(each, lora_request=adapter) for each in (shared, engine))
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-5)
    assert (found - prompt_log_probs(shared)).abs().max() > 2**-3
    assert shared.collective_rpc(digests) == engine.collective_rpc(digests)
    (found,) = shared.collective_rpc(held)
    assert len(found) == 8
    assert set(found.values()) == {(True, "cpu")}

    before = prompt_log_probs(shared)
    owner.tell("flip 100")
    assert not torch.equal(prompt_log_probs(shared), before)
    owner.tell("flip 100")
    assert torch.equal(prompt_log_probs(shared), before)
    assert len(generate(shared)[0]) == 4

    owner.kill()
    with pytest.raises(RuntimeError, match=r"the actor that owns the packed base has ended: process \d+"):
        generate(shared)


def test_an_nvfp4_directory_too(owner, start, packed_engine, packed_dir, prompt_log_probs):
    shared = start(packed_dir, model_loader_extra_config={"share_base": True})
    assert torch.equal(prompt_log_probs(shared), prompt_log_probs(packed_engine))


def test_without_an_owner_the_engine_stops(start, model_dir):
    with pytest.raises(RuntimeError, match=r"qerl\.base\.share=true, no actor lends its base at .*base-0-0\.sock"):
        start(model_dir("qwen2"), model_loader_extra_config=SHARED)


@pytest.mark.parametrize(
    ("parallel", "options", "backend", "message"),
    [
        (2, {}, "auto", "the rollout has 2 GPUs, each with a part of the base"),
        (1, {"linear": "stock"}, "auto", "linear=stock .* has a layout of its own"),
        (1, {}, "marlin", "linear_backend='marlin' asks for kernels of vLLM"),
    ],
    ids=["two GPUs", "Marlin", "Marlin by vLLM's option"],
)
def test_engines_that_cannot_read_the_layout_are_refused(monkeypatch, parallel, options, backend, message):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size_across_dp=parallel),
        additional_config={"verl_qerl": options},
        kernel_config=SimpleNamespace(linear_backend=backend),
    )
    monkeypatch.setattr("verl_qerl.vllm_plugin.weights.borrowed.get_current_vllm_config_or_none", lambda: config)
    with pytest.raises(ValueError, match=rf"qerl\.base\.share=true .*{message}.* One Hopper GPU a rollout replica is"):
        BorrowedNVFP4()


def test_a_shape_that_only_marlin_takes_is_refused_on_a_gpu():
    words = SimpleNamespace(is_cuda=True)
    layer = SimpleNamespace(
        qerl_borrowed=(words, torch.zeros(2, 64, dtype=torch.uint8), None),
        output_size_per_partition=64,
        input_size_per_partition=32,
        params_dtype=torch.bfloat16,
        logical_widths=[64],
    )
    with pytest.raises(
        ValueError,
        match=r"qerl\.base\.share=true is not possible: a linear of 64 x 32 in torch\.bfloat16: the faster kernel",
    ):
        BorrowedKernel(NvFp4LinearLayerConfig()).process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("extra", "expected"), [(None, False), ({}, False), ({"share_base": False}, False), (SHARED, True)], ids=str
)
def test_whether_an_engine_borrows(extra, expected):
    assert is_borrowing(SimpleNamespace(load_config=SimpleNamespace(model_loader_extra_config=extra))) is expected
    assert is_borrowing(None) is False


def layers(**shapes: tuple[int, int]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, (N, K) in shapes.items():
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = N, K
        model.add_module(name, layer)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (layers(o_proj=(64, 32)), r"the rollout's linear 'o_proj' of \(64, 32\) is not in the actor's base"),
        (layers(o_proj=(64, 16), up_proj=(64, 16)), r"the rollout's linear 'up_proj'"),
        (layers(), r"the actor's base has \('o_proj',\), which the rollout lacks"),
    ],
    ids=["shape", "linear of the rollout", "linear of the actor"],
)
def test_the_base_of_another_model_is_refused(monkeypatch, model, message):
    monkeypatch.setenv("VERL_RAY_JOB_ID", "other")
    monkeypatch.setenv("VERL_REPLICA_RANK", "3")
    group = RepackedGroup(("o_proj",), (64,), 16, 0)
    flat = torch.zeros(group.num_bytes, dtype=torch.uint8)
    lender = Lender(SharedBase(flat, (group,)), meeting_place("other", 3))
    members = {name: [name] for name, _ in model.named_children()}
    with pytest.raises(ValueError, match=message):
        attach(model, members, torch.device("cpu"))
    assert isinstance(lender, Lender)
    assert borrowed_by(model) is None
