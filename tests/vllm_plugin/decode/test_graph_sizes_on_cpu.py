import pytest

from verl_qerl.vllm_plugin.decode.graph_sizes import VLLMS, larger_sizes


@pytest.mark.parametrize("sequences", [1, 256, 512])
def test_vllms_own_sizes_hold_that_many_sequences(sequences):
    assert larger_sizes(sequences) == []


@pytest.mark.parametrize("sequences", [513, 575, 576, 577, 1000, 1024])
def test_no_batch_is_padded_by_more_than_an_eighth_beyond_vllms_own_sizes(sequences):
    sizes = [*VLLMS, *larger_sizes(sequences)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == sequences
    for batch in range(513, sequences + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < 64


def test_vllm_takes_the_sizes_and_has_those_up_to_512_by_itself():
    pytest.importorskip("vllm")
    from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig, VllmConfig

    def sizes_of(**options):
        config = VllmConfig()  # of no model; on a CPU it drops graphs, whose sizes are the same code
        config.model_config = type("", (), {"enforce_eager": False, "is_encoder_decoder": False})()
        config.compilation_config = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **options)
        config.scheduler_config = SchedulerConfig(
            max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=64, is_encoder_decoder=False
        )
        config._set_cudagraph_sizes()
        return config.compilation_config

    assert tuple(sizes_of().cudagraph_capture_sizes) == VLLMS
    asked = [*VLLMS, *larger_sizes(1024)]
    chosen = sizes_of(cudagraph_capture_sizes=asked)
    assert chosen.cudagraph_capture_sizes == asked
    assert chosen.max_cudagraph_capture_size == 1024
