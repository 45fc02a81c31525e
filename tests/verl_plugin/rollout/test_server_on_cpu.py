import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, get_format
from verl_qerl.formats.ignore import ignored_modules
from verl_qerl.verl_plugin.rollout.server import describe_checkpoint

needs_hosts = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("verl", "vllm")), reason="verl or vLLM is not installed"
)
OF_THE_YAML = {
    "hf_overrides": {"quantization_config": NVFP4().config(["lm_head", "mine"]), "rope_theta": 1},
    "seed": 2,
}
SERVER = """
import asyncio, json, os, sys
import ray
from types import SimpleNamespace
import verl.workers.rollout.replica as replica
from verl_qerl import verl_plugin
from verl_qerl.verl_plugin.rollout import server as rollout
verl_plugin.activate()
light = "vllm" not in sys.modules
from vllm import envs
from verl_qerl.verl_plugin.config.apply import WORKER_EXTENSION
found = replica.get_rollout_replica_class("vllm")
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
vLLMReplica.__init__ = lambda self, *args: None
remote = found(0, None, None).server_class
Server = remote.__ray_metadata__.modified_class

class Engine:
    errored, resets, cleared = False, [], True

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.resets.append(reset_running_requests)
        return reset_running_requests and self.cleared

    async def reset_mm_cache(self):
        self.resets.append("mm")

    async def reset_encoder_cache(self):
        self.resets.append("encoder")

    async def collective_rpc(self, **kwargs):
        self.asked = kwargs
        return [7, 7]

def described(custom, lora_rank=8):
    server = Server.__new__(Server)
    server.config = RolloutConfig(name="vllm", custom=custom, max_num_seqs=1024)
    server.model_config = SimpleNamespace(local_path=sys.argv[1], lora_rank=lora_rank)
    kwargs = {"hf_overrides": {"a": 1}}
    server._preprocess_engine_kwargs(kwargs)
    return kwargs

def runner_of(extension, named=None):
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if named:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = named
    server = Server.__new__(Server)
    server.config = SimpleNamespace(custom=None, checkpoint_engine=None)
    server._preprocess_engine_kwargs({"worker_extension_cls": extension} if extension else {})
    return envs.VLLM_USE_V2_MODEL_RUNNER

class Busy:
    qerl_ended = Server.qerl_ended

    def __init__(self):
        self.engine = Engine()

    async def generate(self):
        await asyncio.sleep(60)

def ended_beside_requests():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    options = {name: remote._default_options[name] for name in ("concurrency_groups",)}
    busy = ray.remote(**options)(Busy).options(max_concurrency=2, num_cpus=0).remote()
    waiting = [busy.generate.remote() for _ in range(5)]
    return ray.get(busy.qerl_ended.remote(), timeout=30)

server = Server.__new__(Server)
server.engine = Engine()
answer = asyncio.run(server.collective_rpc("qerl_set_noise", kwargs={"sigma": 0.1}))
server.node_rank = 0
asyncio.run(server.qerl_clear_kv_cache())
resets, Engine.cleared = list(Engine.resets), False
try:
    asyncio.run(server.qerl_clear_kv_cache())
except RuntimeError as error:
    uncleared = str(error)
module = SimpleNamespace(RolloutReplicaRegistry=replica.RolloutReplicaRegistry)
rollout.install(module)
print(json.dumps({
    "light": light,
    "replica": [issubclass(found, vLLMReplica), found is not vLLMReplica],
    "server": [issubclass(Server, vLLMHttpServer), Server.__name__],
    "answer": answer,
    "asked": server.engine.asked,
    "resets": resets,
    "uncleared": uncleared,
    "ended": ended_beside_requests(),
    "ours": described({"qerl": {"base": "nvfp4"}}),
    "without_adapter": described({"qerl": {"base": "nvfp4"}}, lora_rank=0),
    "stock": [described(None), described({}), described({"qerl": None}), described({"other": 1})],
    "others": sorted(name for name in replica.RolloutReplicaRegistry._registry),
    "runners": [runner_of(WORKER_EXTENSION), runner_of(WORKER_EXTENSION, "1"), runner_of(None), runner_of("other.Own")],
    "again": issubclass(replica.get_rollout_replica_class("vllm"), vLLMReplica),
}))
"""


def write(path, quantization=None):
    config = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    packed = {} if quantization is None else {"model.layers.1.mlp.up_proj.weight_scale": torch.ones(2, 1)}
    save_file({"model.norm.weight": torch.ones(4)} | packed, path / "model.safetensors")
    return str(path)


def described(path, overrides):
    kwargs = {"hf_overrides": overrides, "seed": 2}
    describe_checkpoint(kwargs, path)
    assert kwargs["seed"] == 2
    return kwargs["hf_overrides"]


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_a_bf16_directory_is_described_as_the_run_asks(tmp_path, form):
    kwargs = {"hf_overrides": {"rope_theta": 1}, "model_loader_extra_config": {"ignore": ["lm_head", "mine"]}}
    describe_checkpoint(kwargs, write(tmp_path), form)
    described = get_format(form).config(["lm_head", "mine"])
    assert kwargs["hf_overrides"] == {"rope_theta": 1, "quantization_config": described}


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4", "nvfp4"])
def test_a_quantized_directory_is_quantized_to_no_other_format(tmp_path, form):
    stored = "int8" if form == "nvfp4" else "nvfp4"
    with pytest.raises(CheckpointFormatError, match=rf"in another format: {stored}, and {form} is asked for\."):
        describe_checkpoint({}, write(tmp_path, get_format(stored).config(["a"])), form)


@pytest.mark.parametrize("form", ["fp8", "int8", "mxfp4"])
def test_a_directory_in_the_format_brings_its_own_list(tmp_path, form):
    kwargs = {"model_loader_extra_config": {"ignore": ["of the run"]}}
    describe_checkpoint(kwargs, write(tmp_path, get_format(form).config(["lm_head", "re:.*o_proj"])), form)
    assert kwargs["hf_overrides"]["quantization_config"] == get_format(form).config(["lm_head", "re:.*o_proj"])


@pytest.mark.parametrize(
    ("stored", "ignore"),
    [
        (NVFP4().config(["lm_head", "re:.*o_proj"]), ["lm_head", "re:.*o_proj"]),
        (NVFP4().config([]), ["lm_head"]),  # no list is the default one
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "m"]}, ["lm_head", "m"]),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["a"]}, ["a"]),
    ],
    ids=["compressed-tensors", "no-list", "modelopt", "modelopt-w4a16"],
)
def test_an_nvfp4_directory_brings_its_own_list(tmp_path, stored, ignore):
    path = write(tmp_path, stored)
    expected = {"quantization_config": NVFP4().config(ignore), "rope_theta": 1}
    assert described(path, dict(OF_THE_YAML["hf_overrides"])) == expected
    assert described(path, json.dumps(OF_THE_YAML["hf_overrides"])) == expected  # as some scripts pass it
    assert described(path, None) == {"quantization_config": NVFP4().config(ignore)}


def targeting(targets):
    config = NVFP4().config(["lm_head"])
    config["config_groups"]["group_0"]["targets"] = targets
    return config


@pytest.mark.parametrize(
    ("stored", "codes"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head", "model.layers.0.*"]},
            "weight",
        ),
        (
            targeting(["re:.*mlp.*"]),
            "weight_packed",
        ),
    ],
    ids=["wildcard of ModelOpt", "targets of compressed-tensors"],
)
def test_linears_that_are_not_packed_are_left_out_by_name(tmp_path, stored, codes):
    path, bf16 = write(tmp_path, stored), torch.ones(2, 16, dtype=torch.bfloat16)
    parts = {codes: torch.zeros(2, 8, dtype=torch.uint8), "weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn)}
    tensors = {f"model.layers.0.mlp.up_proj.{name}": tensor for name, tensor in parts.items()}
    unpacked = [f"model.layers.0.self_attn.{member}_proj" for member in "kqv"]
    tensors |= {f"{module}.weight": bf16.clone() for module in (*unpacked, "lm_head", "model.layers.1.mlp.gate")}
    save_file(tensors | {"model.layers.0.input_layernorm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    ignore = [*ignored_modules(json.loads((tmp_path / "config.json").read_text())), *unpacked]
    assert described(path, None) == {"quantization_config": NVFP4().config(ignore)}


def test_overrides_of_the_caller_are_not_changed(tmp_path):
    overrides = {"quantization_config": "of the YAML"}
    described(write(tmp_path, NVFP4().config(["a"])), overrides)
    assert overrides == {"quantization_config": "of the YAML"}


@pytest.fixture(scope="module")
def server(fresh_json, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("model"), NVFP4().config(["lm_head", "re:.*o_proj"]))
    return fresh_json("-c", SERVER, path)


@needs_hosts
def test_importing_it_leaves_vllm_alone(server):
    assert server["light"]


@needs_hosts
def test_the_name_vllm_is_our_replica_with_our_server(server):
    assert server["replica"] == [True, True]
    assert server["server"][0]
    assert "QerlServer" in server["server"][1]
    assert {"vllm", "sglang", "trtllm"} <= set(server["others"])
    assert server["again"]
    # vLLM's V1 model runner for a worker of ours, unless the environment names one.
    assert server["runners"] == [False, True, None, None]


@needs_hosts
def test_the_answers_of_the_workers_come_back(server):
    assert server["answer"] == [7, 7]
    assert server["asked"] == {"method": "qerl_set_noise", "timeout": None, "args": [], "kwargs": {"sigma": 0.1}}


@needs_hosts
def test_an_engine_tells_beside_all_requests_that_wait_whether_it_has_ended(server):
    assert server["ended"] is False


@needs_hosts
def test_the_cache_is_cleared_of_running_requests_too(server):
    assert server["resets"] == [False, "mm", "encoder", True]
    assert server["uncleared"].startswith(
        "vLLM did not clear its prefix cache: reset_prefix_cache=False. Accepted is T"
    )


@needs_hosts
def test_only_our_runs_describe_their_checkpoint(server):
    ours = server["ours"]
    assert ours["hf_overrides"]["quantization_config"]["ignore"] == ["lm_head", "re:.*o_proj"]
    assert ours["compilation_config"]["cudagraph_capture_sizes"][-1] == 1024
    assert "compilation_config" not in server["without_adapter"]
    assert server["stock"] == [{"hf_overrides": {"a": 1}}] * 4
