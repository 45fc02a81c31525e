"""Stand-ins of worker_extension_cases.py: vLLM's worker as far as the extension sees it, and what verl sends to it."""

from types import SimpleNamespace
from typing import ClassVar

import torch

from verl_qerl.verl_plugin.weight_sync.worker_extension import WorkerExtension


class ModelOptNvFp4Config:
    """Known to verl by its name."""


class Base:
    """vLLM's worker, as far as the extension sees it. vLLM appends the extension to its bases."""

    def __init__(self, vllm_config):
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        model = torch.nn.Module()
        model.add_module("input_layernorm", SimpleNorm())
        model.add_module("post_attention_layernorm", SimpleNorm())
        model.verl_qerl_digests = vllm_config.digests
        manager = SimpleNamespace(capacity=1, lora_config=SimpleNamespace(lora_dtype=torch.bfloat16))
        self.model_runner = SimpleNamespace(
            load_model=lambda: None,
            get_model=lambda: model,
            lora_manager=SimpleNamespace(_adapter_manager=manager),
            device=self.device,
        )

    def load_model(self):
        self.model_runner.load_model()


class SimpleNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16), requires_grad=False)


def config(quant_config=None, aqn=None, load_format="auto", digests=None, adapter=True, norms=False, **options):
    additional = {"verl_qerl": {"aqn": aqn, "train_norms": norms, **options}}
    family = SimpleNamespace(model_type="qwen2")
    return SimpleNamespace(
        quant_config=quant_config,
        additional_config=additional,
        load_config=SimpleNamespace(load_format=load_format),
        digests=digests or {},
        model_config=SimpleNamespace(hf_text_config=family, dtype=torch.bfloat16, enable_sleep_mode=False),
        lora_config=SimpleNamespace() if adapter else None,
    )


def make(vllm_config):
    class Worker(Base):
        pass

    Worker.__bases__ = (*Worker.__bases__, WorkerExtension)
    worker = Worker(vllm_config=vllm_config)
    worker.load_model()
    return worker


class Sender:
    """What verl's receiver gives on: buckets whose memory the next one overwrites, of the tensors in `queue`."""

    queue: ClassVar[list] = []
    log: ClassVar[list] = []

    def __init__(self, zmq_handle, device, use_shm):
        self.use_shm = use_shm

    def receive_weights(self, on_bucket_received):
        self.log.append(["transfer", self.use_shm])
        bucket = torch.zeros(64)
        for index, (name, tensor) in enumerate(self.queue):
            view = bucket[: tensor.numel()].view(tensor.shape).copy_(tensor)
            on_bucket_received([(name, view)], is_last=index == len(self.queue) - 1)
        bucket.fill_(-1)


A, B = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2) + 10
NAMED = [("q.lora_A.weight", A), ("q.lora_B.weight", B)]
FLAT = [
    ("verl_qerl_adapter.0", torch.cat([A.reshape(-1), B.reshape(-1)[:4]])),
    ("verl_qerl_adapter.10", B.reshape(-1)[4:]),
]
LAYOUTS = [[name, list(tensor.shape)] for name, tensor in NAMED]  # tuples do not survive msgpack
KINDS = ("input_layernorm", "post_attention_layernorm")
SHIFTED = [*LAYOUTS, *([f"base_model.model.{kind}.adapter_shift", [16, 1]] for kind in KINDS)]
SHIFTS = [*FLAT, ("verl_qerl_adapter.14", torch.cat([torch.full((16,), 0.25), torch.full((16,), 2.0**-9)]))]
