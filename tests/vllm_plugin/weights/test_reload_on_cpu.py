"""A running engine gets new weights: bit for bit those of an engine that is started with them, or an error."""

import weakref

import pytest
import torch
from qerl_testing import float32_norms
from safetensors.torch import load_file

pytest.importorskip("vllm")

from verl_qerl.checkpoints.groups import linears_among
from verl_qerl.checkpoints.manifest import NAME, with_manifest
from verl_qerl.checkpoints.stream import quantize_stream
from verl_qerl.formats import get_format
from verl_qerl.formats.reference import dequantize

FORMATS = ("int8", "fp8", "nvfp4", "mxfp4")
DOWN = "model.layers.1.mlp.down_proj"


def stream_of(tensors, form, change=lambda name, tensor: tensor):
    """What an actor with these weights sends; `change` spoils a tensor on the way, or drops it (None)."""
    linears = linears_among({name: tensor.shape for name, tensor in tensors.items()}, None, "the test")
    numel = sum(tensor.numel() for tensor in tensors.values())
    for name, tensor in with_manifest(quantize_stream(tensors.items(), linears, get_format(form)), 2 * numel):
        changed = change(name, tensor)
        if changed is not None:
            yield name, changed


def sync(engine, stream, form, num_before=0, bucket=3):
    """A sync in buckets whose memory is overwritten as soon as they are loaded; the report."""
    from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

    def run(worker):
        reload = InPlaceReload(worker.model_runner.get_model(), worker.vllm_config, get_format(form), num_before)
        items = [(name, tensor.clone()) for name, tensor in stream]
        for start in range(0, len(items), bucket):
            part = items[start : start + bucket]
            reload.load(part)
            for _, tensor in part:
                tensor.zero_()
        return reload.finish()

    found = engine.collective_rpc(run)[0]
    assert engine.reset_prefix_cache()
    return found


def changed_weights(weights):
    generator = torch.Generator().manual_seed(1)
    return {
        name: (tensor.float() * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))).bfloat16()
        for name, tensor in weights.items()
    }


@pytest.fixture(scope="module")
def weights(model_dir):
    return load_file(model_dir("qwen2") / "model.safetensors")


@pytest.fixture(scope="module")
def other(weights):
    return changed_weights(weights)


@pytest.fixture
def expected_log_probs(reference_log_probs):
    """What transformers makes of these weights in a format: the weights that a rollout holds, in float32."""
    import transformers

    def ask(folder, tensors, form):
        held = dict(stream_of(tensors, form))
        del held[NAME]
        modules = linears_among({name: tensor.shape for name, tensor in tensors.items()}, None, "the test")
        for module in modules:
            parts = {part: held.pop(f"{module}.{part}") for part in get_format(form).parts}
            held[f"{module}.weight"] = dequantize(get_format(form).from_tensors(module, parts), torch.float32)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
        model.load_state_dict({name: tensor.float() for name, tensor in held.items()}, strict=False)
        model.tie_weights()
        return reference_log_probs(model.eval())

    return ask


# Every format, every family of the README, both ways for a head; vLLM ties Qwen's otherwise than Llama's and Mistral's.
ENGINES = [
    ("int8", "qwen2"),
    ("fp8", "mistral"),
    ("nvfp4", "llama-tied"),
    ("mxfp4", "qwen2-tied"),
    ("int8", "llama-tied"),
    ("fp8", "qwen3-tied"),
    ("nvfp4", "qwen3"),
    ("nvfp4", "qwen2"),
    ("mxfp4", "mistral-tied"),
]


@pytest.mark.parametrize(("form", "family"), ENGINES, ids=str)
def test_new_weights_act_and_the_old_ones_come_back_as_they_were_loaded(
    form, family, start, model_dir, prompt_log_probs, expected_log_probs
):
    folder = model_dir(family)
    weights = load_file(folder / "model.safetensors")
    other = changed_weights(weights)
    engine = start(folder, form=form)
    loaded = prompt_log_probs(engine)
    bf16 = sum(2 * tensor.numel() for tensor in weights.values())
    for turn, (model, same) in enumerate([(weights, True), (other, False), (other, False), (weights, True)]):
        report = sync(engine, stream_of(model, form), form, num_before=turn)
        assert (report.num_linears, report.num_checked) == (8, 8 if turn == 0 else 4)
        assert report.manifest.num_bytes_bf16 == bf16
        assert report.manifest.num_bytes < bf16 * 0.85
        found = prompt_log_probs(engine)
        assert torch.equal(found, loaded) is same
        # At most 0.054 here; a tied head that kept its older weights is off by 0.185.
        assert (found - expected_log_probs(folder, model, form)).abs().mean() < 0.1
        if turn == 1:
            changed = found
        if turn == 2:
            assert torch.equal(found, changed)


@pytest.fixture(scope="module")
def int8(start, model_dir):
    return start(model_dir("qwen2"), form="int8")


@pytest.fixture
def engine(int8, weights, prompt_log_probs):
    """Whole again after a sync that failed, which no run survives."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    yield int8
    model_config = int8.llm_engine.model_config
    int8.collective_rpc(lambda worker: finalize_layerwise_reload(worker.model_runner.get_model(), model_config))
    sync(int8, stream_of(weights, "int8"), "int8")


def flipped(tensor):
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[5] ^= 1
    return changed


K = "model.layers.0.self_attn.k_proj"
BAD = {
    "a lost weight": (lambda n, t: None if n == f"{DOWN}.weight" else t, rf"left out 1 of \d+ .*'{DOWN}\.weight'"),
    "a lost member": (lambda n, t: None if n == f"{K}.weight_scale" else t, rf"left out 1 of .*'{K}\.weight_scale'"),
    "a lost bias": (lambda n, t: None if n == f"{K}.bias" else t, rf"left out 1 of \d+ tensors .*'{K}\.bias'"),
    "a lost norm": (lambda n, t: None if n == "model.norm.weight" else t, r"left out 1 of \d+ .*'model\.norm\.weight'"),
    "a flipped bit": (lambda n, t: flipped(t) if n == f"{DOWN}.weight" else t, rf"1 of \d+ .* first '{DOWN}\.weight'"),
    "no manifest": (lambda n, t: None if n == NAME else t, r"^the actor sent no list of its tensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_did_not_come_as_it_was_sent_is_an_error(case, engine, other):
    change, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        sync(engine, stream_of(other, "int8", change), "int8")


def test_a_name_nobody_knows_is_an_error(engine, other):
    more = other | {"model.layers.7.input_layernorm.weight": other["model.norm.weight"]}
    with pytest.raises(ValueError, match=r"sent 'model\.layers\.7\.input_layernorm\.weight', which the rollout lacks"):
        sync(engine, stream_of(more, "int8"), "int8")


def test_an_error_that_is_kept_lets_go_of_the_bucket(engine, other, caplog):
    """On a CPU a bucket is a view of shared memory, which verl cannot give back while somebody holds one."""
    from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

    def run(worker):
        reload = InPlaceReload(worker.model_runner.get_model(), worker.vllm_config, get_format("int8"), 0)
        bucket = [(name, tensor.clone()) for name, tensor in stream_of(other, "int8")][:2]
        bucket += [("nobody.weight", torch.ones(3))]
        views = [weakref.ref(tensor) for _, tensor in bucket]
        reload.load(bucket)
        del bucket
        left = [view() for view in views]
        with pytest.raises(ValueError, match=r"sent 'nobody\.weight', which the rollout lacks"):
            reload.finish()
        return left

    assert engine.collective_rpc(run)[0] == [None] * 3
    assert "in _load\n" in caplog.text  # where it happened is told


def test_a_linear_is_looked_at_when_all_of_it_has_come(engine, other):
    biases_last = sorted(stream_of(other, "int8"), key=lambda item: (item[0] == NAME, item[0].endswith(".bias")))
    assert sync(engine, biases_last, "int8").num_checked == 8


def test_a_name_that_comes_twice_is_an_error(engine, other):
    twice = [*stream_of({"model.norm.weight": other["model.norm.weight"]} | other, "int8")]
    with pytest.raises(ValueError, match=r"sent 'model\.norm\.weight', a second time"):
        sync(engine, [item for item in twice if item[0] == "model.norm.weight"] + twice, "int8")


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (
            "bf16",
            r"sent 'model\.\S+_proj\.weight', in torch.bfloat16 instead of torch.int8\. The par",
        ),
        ("fp8", r"sent 'model\.\S+_proj\.weight', in torch.float8_e4m3fn instead of torch.int8\."),
        (
            "mxfp4",
            r"sent 'model\.\S+_proj\.weight_packed', which the rollout lacks\. .* its linears in INT8",
        ),
    ],
)
def test_another_format_is_an_error(engine, other, form, sentence):
    stream = other.items() if form == "bf16" else stream_of(other, form)
    with pytest.raises(ValueError, match=sentence):
        sync(engine, stream, "int8")


@pytest.mark.parametrize("num_before", [0, 2])  # the third sync looks at layer 1
def test_a_kernel_that_holds_something_else_is_an_error(engine, other, monkeypatch, num_before):
    from verl_qerl.vllm_plugin.weights.reference_kernels import W8A8Reference

    real = W8A8Reference.process_weights_after_loading

    def spoil(self, layer):
        if layer.prefix == DOWN:
            layer.weight.data[3, 5] += 1 if layer.weight.data[3, 5] < 127 else -1
        real(self, layer)

    monkeypatch.setattr(W8A8Reference, "process_weights_after_loading", spoil)
    with pytest.raises(ValueError, match=rf"the rollout's linear '{DOWN}' does not hold what the actor sent"):
        sync(engine, stream_of(other, "int8"), "int8", num_before)


def test_tensors_that_are_no_parameters_stay_where_graphs_have_them(engine, other, monkeypatch):
    from verl_qerl.vllm_plugin.weights.reference_kernels import W8A8Reference

    real, workspaces = W8A8Reference.process_weights_after_loading, []

    def make_workspace(self, layer):
        real(self, layer)
        layer.workspace = torch.zeros(4)  # as Marlin's
        workspaces.append(layer.workspace)

    monkeypatch.setattr(W8A8Reference, "process_weights_after_loading", make_workspace)
    sync(engine, stream_of(other, "int8"), "int8")
    first = workspaces[:]
    for workspace in first:
        workspace.fill_(7)
    sync(engine, stream_of(other, "int8"), "int8")
    held = engine.collective_rpc(
        lambda worker: [m.workspace for m in worker.model_runner.get_model().modules() if hasattr(m, "workspace")]
    )[0]
    assert {id(tensor) for tensor in held} == {id(tensor) for tensor in first}
    assert all(bool((tensor == 0).all()) for tensor in held)


def test_noise_on_the_norms_survives_a_sync(start, model_dir, weights, other):
    engine = start(model_dir("qwen2"), form="int8", aqn={"enabled": True})
    (before,) = engine.collective_rpc(float32_norms)
    engine.collective_rpc("qerl_set_noise", args=(0.01, 3))
    sync(engine, stream_of(other, "int8"), "int8")
    engine.collective_rpc(lambda worker: worker._qerl_noise.recapture())
    (noisy,) = engine.collective_rpc(float32_norms)
    engine.collective_rpc("qerl_set_noise", args=(0.0, 0))
    (clean,) = engine.collective_rpc(float32_norms)
    for name in before:
        assert noisy[name].dtype == torch.float32
        assert torch.equal(clean[name], other[f"{name}.weight"].float())
        assert 0.005 < (noisy[name] - clean[name]).std() < 0.02
