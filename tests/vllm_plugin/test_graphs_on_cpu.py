"""Which graphs a step is dispatched to, in vLLM's own dispatcher; what they compute is test_graphs.py's."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from verl_qerl.vllm_plugin.graphs import WholeStepDispatcher, use_whole_graphs
from verl_qerl.vllm_plugin.worker import prepare_model

BOTH, FULL, PIECEWISE, NONE = (CUDAGraphMode[name] for name in ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE", "NONE"))
AT_ONCE, SIZES = 16, [1, 8, 16, 24, 32]


def layer_of(support):
    builder = type("Builder", (), {"get_cudagraph_support": staticmethod(lambda config, spec: support)})
    backend = SimpleNamespace(get_builder_cls=lambda: builder)
    return SimpleNamespace(get_attn_backend=lambda: backend, get_kv_cache_spec=lambda config: None)


def runner_of(mode=BOTH, support=AttentionCGSupport.ALWAYS, adapters=0, **changed):
    compilation = SimpleNamespace(
        cudagraph_mode=mode, is_attention_compiled_piecewise=lambda: True, mode=3, splitting_ops=["attention"],
        max_cudagraph_capture_size=SIZES[-1], cudagraph_capture_sizes=SIZES, compile_sizes=[],
        cudagraph_specialize_lora=True,
        static_forward_context={"layers.0.experts": object(), "layers.0.attn": layer_of(support)},
    )  # fmt: skip
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=changed.get("speculated", 0),
        lora_config=SimpleNamespace(max_loras=adapters, specialize_active_lora=False) if adapters else None,
        scheduler_config=SimpleNamespace(max_num_seqs=changed.get("at_once", AT_ONCE)),
        parallel_config=SimpleNamespace(
            data_parallel_size=changed.get("ranks", 1),
            decode_context_parallel_size=changed.get("sharing", 1),
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            disable_cascade_attn=not changed.get("cascade", False), is_encoder_decoder=changed.get("encoder", False)
        ),
    )
    cuda = torch.device("cuda")
    return SimpleNamespace(vllm_config=config, cudagraph_dispatcher=CudagraphDispatcher(config), device=cuda)


def dispatcher_of(runner, mode=BOTH):
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.initialize_cudagraph_keys(mode, 1)
    return dispatcher


def test_steps_in_which_requests_begin_have_graphs_of_their_own():
    runner = runner_of()
    use_whole_graphs(runner)
    ours, stock = dispatcher_of(runner), dispatcher_of(runner_of())
    for tokens in range(1, SIZES[-1] + 1):
        mode, key = ours.dispatch(tokens)
        assert (mode, key.uniform) == (FULL, False)
        stocks_mode, stocks_key = stock.dispatch(tokens)
        assert (stocks_mode, stocks_key.num_tokens) == (PIECEWISE, key.num_tokens)
        # Whoever fills in what attention reads of each request needs to know of how many.
        assert key.num_reqs == min(key.num_tokens, AT_ONCE)
    assert ours.dispatch(SIZES[-1] + 1)[0] == NONE


def test_steps_that_decode_keep_theirs():
    runner = runner_of()
    use_whole_graphs(runner)
    ours, stock = dispatcher_of(runner), dispatcher_of(runner_of())
    for tokens in range(1, AT_ONCE + 1):
        assert ours.dispatch(tokens, uniform_decode=True) == stock.dispatch(tokens, uniform_decode=True)
        assert ours.dispatch(tokens, uniform_decode=True)[1].uniform


@pytest.mark.parametrize("at_once", [1, 7, 8, 20, 24, 31, 32, 33, 100])
def test_steps_that_decode_have_graphs_for_any_number_of_sequences(at_once):
    runner = runner_of(at_once=at_once)
    use_whole_graphs(runner)
    ours, stock = dispatcher_of(runner), dispatcher_of(runner_of(at_once=at_once))
    captured = {(mode, key) for mode, keys in ours.get_capture_descs() for key in keys}
    shared = 0
    for tokens in range(1, at_once + 1):
        found, stocks = (one.dispatch(tokens, uniform_decode=True) for one in (ours, stock))
        if stocks[0] != PIECEWISE:
            assert found == stocks
            continue
        shared += 1  # with a step in which requests begin
        assert found in captured
        assert (found[0], found[1].num_tokens, found[1].uniform) == (FULL, stocks[1].num_tokens, False)
        assert found[1].num_reqs >= tokens
    assert shared == {7: 6, 20: 4, 31: 7}.get(at_once, 0)
    eager = {"valid_modes": {NONE}}
    assert ours.dispatch(1, uniform_decode=True, **eager) == stock.dispatch(1, uniform_decode=True, **eager)


@pytest.mark.parametrize("adapters", [0, 1])
def test_all_that_is_dispatched_to_is_captured_by_its_kind(adapters):
    runner = runner_of(adapters=adapters)
    use_whole_graphs(runner)
    ours = dispatcher_of(runner)
    captured = ours.get_capture_descs()
    assert [mode for mode, _ in captured] == [FULL, FULL]
    assert [{key.uniform for key in keys} for _, keys in captured] == [{False}, {True}]
    begins, decodes = (keys for _, keys in captured)
    # The largest first, whose memory the others then use.
    assert [key.num_tokens for key in begins] == sorted((key.num_tokens for key in begins), reverse=True)
    assert len(begins) == len(SIZES) * (1 + adapters)
    for uniform, keys in ((False, begins), (True, decodes)):
        for has_lora in {False, bool(adapters)}:
            found = {
                ours.dispatch(tokens, uniform, has_lora=has_lora, num_active_loras=int(has_lora))[1]
                for tokens in range(1, (AT_ONCE if uniform else SIZES[-1]) + 1)
            }
            assert found == {key for key in keys if key.has_lora == has_lora}


@pytest.mark.parametrize("mode", [PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, NONE])
def test_a_mode_that_vllm_falls_back_to_later_stays(mode):
    runner = runner_of()
    use_whole_graphs(runner)
    assert dispatcher_of(runner, mode).cudagraph_keys == dispatcher_of(runner_of(mode), mode).cudagraph_keys


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"support": AttentionCGSupport.UNIFORM_BATCH}, "Builder of layers.0.attn can be captured for UNIFORM_BATCH"),
        ({"mode": FULL}, "cudagraph_mode is FULL, not FULL_AND_PIECEWISE"),
        ({"mode": PIECEWISE}, "cudagraph_mode is PIECEWISE"),
        ({"mode": NONE}, "cudagraph_mode is NONE"),
        ({"cascade": True}, "taken apart"),
        ({"speculated": 2}, "speculated"),
        ({"ranks": 2}, "ranks of a data-parallel engine"),
        ({"sharing": 2}, "ranks share the keys"),
        ({"encoder": True}, "encoder"),
    ],
)
def test_what_cannot_have_them_says_why(changed, reason):
    runner = runner_of(**changed)
    with pytest.raises(
        ValueError, match=r"^additional_config\.verl_qerl\.graphs='whole' cannot be had: .*stock"
    ) as error:
        use_whole_graphs(runner)
    assert reason in str(error.value)
    assert type(runner.cudagraph_dispatcher) is CudagraphDispatcher


def test_a_runner_of_another_kind_is_refused():
    runner = runner_of()
    other = SimpleNamespace(vllm_config=runner.vllm_config)
    with pytest.raises(ValueError, match=r"types\.SimpleNamespace has another dispatcher"):
        use_whole_graphs(other)
    use_whole_graphs(runner)
    assert type(runner.cudagraph_dispatcher) is WholeStepDispatcher


def test_where_they_are_not_asked_for_vllms_stay_and_the_log_has_the_reason(caplog):
    said = "begin have no CUDA graphs of their own: tokens are speculated"
    runner = runner_of(speculated=3)
    use_whole_graphs(runner, required=False)
    assert caplog.text.count(said) == 1
    chosen = runner_of(mode=PIECEWISE)  # by the user
    host = runner_of()
    host.device = torch.device("cpu")
    for other in (chosen, host):
        use_whole_graphs(other, required=False)
    assert caplog.text.count("CUDA graphs") == 1
    assert {type(one.cudagraph_dispatcher) for one in (runner, chosen, host)} == {CudagraphDispatcher}
    use_whole_graphs(runner_of(), required=False)
    assert caplog.text.count("CUDA graphs") == 1


@pytest.mark.parametrize("graphs", [None, "auto", "stock", "whole"])
def test_an_engine_has_them_unless_it_is_told_not_to(graphs):
    runner = runner_of()
    runner.get_model = lambda: torch.nn.Linear(1, 1)
    worker = SimpleNamespace(load_model=lambda: None, model_runner=runner)
    options = {"sampler": "stock"} | ({"graphs": graphs} if graphs else {})
    prepare_model(worker, SimpleNamespace(additional_config={"verl_qerl": options}))
    worker.load_model()
    kind = CudagraphDispatcher if graphs == "stock" else WholeStepDispatcher
    assert type(runner.cudagraph_dispatcher) is kind


def test_an_engine_that_must_have_them_and_cannot_does_not_start():
    runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    worker = SimpleNamespace(load_model=lambda: None, model_runner=runner)
    prepare_model(worker, SimpleNamespace(additional_config={"verl_qerl": {"sampler": "stock", "graphs": "whole"}}))
    with pytest.raises(ValueError, match=r"graphs='whole' cannot be had: .* has another dispatcher"):
        worker.load_model()
