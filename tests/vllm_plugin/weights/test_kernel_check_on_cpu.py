"""The shares of tensor-parallel ranks; what a kernel holds is asked in test_reload_on_cpu.py and on two ranks below."""

import pytest
import torch

pytest.importorskip("vllm")

from verl_qerl.vllm_plugin.weights.kernel_check import holds


class Dense:
    """A kernel that multiplies by a weight [N, K]."""

    def __init__(self, weight):
        self.weight = weight

    def apply(self, layer, x, bias):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def linear(kind, weight, rank=0, size=1, **more):
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.__dict__.update(quant_method=Dense(weight), tp_rank=rank, tp_size=size, **more)
    return made


def kinds():
    from vllm.model_executor.layers import linear as layers

    return layers


def random(N, K, seed=0):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def test_a_weight_is_held_when_all_of_it_is(monkeypatch):
    weight = random(48, 100)
    monkeypatch.setattr("verl_qerl.vllm_plugin.weights.kernel_check._ROWS", 32)  # the last chunk is a short one
    column = kinds().ColumnParallelLinear
    assert holds(linear(column, weight), [weight])
    for row, k in ((0, 0), (47, 99), (13, 64)):
        wrong = weight.clone()
        wrong[row, k] *= 1 + 1 / 127  # the next code of INT8
        assert not holds(linear(column, wrong.float()), [weight]) or wrong[row, k].bfloat16() == weight[row, k]
        wrong[row, k] = float("nan")
        assert not holds(linear(column, wrong), [weight])


@pytest.mark.parametrize("codes", [(126, 127), (127, 126), (1, 0), (64, 65)])
def test_neighbouring_codes_of_int8_are_told_apart_after_rounding_to_bf16(codes):
    column = kinds().ColumnParallelLinear
    for scale in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        held, meant = (torch.tensor([[code * scale]]) for code in codes)
        assert not holds(linear(column, held), [meant])
        assert holds(linear(column, meant), [meant])


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_split_within_each_member(rank):
    gate, up = random(8, 6), random(8, 6, 1)
    own = torch.cat([gate[4 * rank : 4 * rank + 4], up[4 * rank : 4 * rank + 4]])
    kind = kinds().MergedColumnParallelLinear
    assert holds(linear(kind, own, rank, 2), [gate, up])
    assert not holds(linear(kind, torch.cat([gate, up])[8 * rank : 8 * rank + 8], rank, 2), [gate, up])


def test_columns_are_split_where_the_input_is():
    weight = random(8, 6)
    assert holds(linear(kinds().RowParallelLinear, weight[:, 3:], 1, 2), [weight])
    assert not holds(linear(kinds().RowParallelLinear, weight[:, :3], 1, 2), [weight])


@pytest.mark.parametrize("rank", range(4))
def test_ranks_share_a_head_where_there_are_fewer_than_ranks(rank):
    q, k, v = random(16, 6), random(4, 6, 1), random(4, 6, 2)  # four query heads, two of keys
    kv = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    own = torch.cat([q[4 * rank : 4 * rank + 4], k[kv], v[kv]])
    made = linear(kinds().QKVParallelLinear, own, rank, 4, num_kv_head_replicas=2)
    assert holds(made, [q, k, v])
    assert not holds(made, [q, v, k])


TWO_RANKS = """
import json, os, sys
os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

def sync(worker, path, form, factor, num_before):
    from safetensors.torch import load_file
    from verl_qerl.formats import get_format
    from verl_qerl.checkpoints.manifest import with_manifest
    from verl_qerl.checkpoints.stream import quantize_stream
    from verl_qerl.checkpoints.groups import linears_among
    from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

    tensors = {name: tensor * factor for name, tensor in load_file(path + "/model.safetensors").items()}
    linears = linears_among({name: tensor.shape for name, tensor in tensors.items()}, None, "the test")
    form = get_format(form)
    reload = InPlaceReload(worker.model_runner.get_model(), worker.vllm_config, form, num_before)
    reload.load(list(with_manifest(quantize_stream(tensors.items(), linears, form), 0)))
    report = reload.finish()
    return [report.num_linears, report.num_checked]

def main():
    from vllm import LLM, SamplingParams
    from verl_qerl.formats import get_format
    path, form = sys.argv[1:]
    name = "verl_qerl_" + form
    llm = LLM(path, dtype="bfloat16", enforce_eager=True, load_format=name, quantization=name, max_model_len=256,
              tensor_parallel_size=2, max_num_seqs=4, kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False,
              hf_overrides={"quantization_config": get_format(form).config()},
              worker_extension_cls="verl_qerl.vllm_plugin.worker.RolloutWorkerExtension")

    def ask():
        ids = [(7 * i) % 500 for i in range(100)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return [entry[i].logprob for i, entry in zip(ids[1:], out.prompt_logprobs[1:])]

    loaded = ask()
    reports = [llm.collective_rpc(sync, args=(path, form, 1.5, 0))]
    changed = ask() != loaded
    reports.append(llm.collective_rpc(sync, args=(path, form, 1.0, 1)))
    print("RESULT", json.dumps({"reports": reports, "changed": changed, "back": ask() == loaded}))

if __name__ == "__main__":
    main()
"""


def test_two_ranks_hold_their_shares(model_dir, run_script):
    found = run_script(TWO_RANKS, str(model_dir("qwen2")), "int8")
    assert found == {"reports": [[[8, 8]] * 2, [[8, 4]] * 2], "changed": True, "back": True}
