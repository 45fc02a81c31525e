"""Weight sync and throughput of rollouts that are quantized at every sync, against bf16.

    python tests/bench/bench_requantized_sync.py --out tests/bench/results/<gpu>/requantized_sync.json

For each arm a vLLM engine over dummy weights, and beside it, in a process of its own on the same GPU, an actor with
random float32 weights. A sync is verl's: its sender and receiver with CUDA IPC, the actor's side quantizing. Its
seconds are those of the receiver, from the call to weights that can be sampled from; the first, which looks at every
kernel, is reported apart. The rollout is of answers of equal length, its tokens per second with and without one sync.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_file
import rollout_arms
import torch

from verl_qerl.formats import get_format

ARMS = ("bf16", "int8", "fp8", "nvfp4", "mxfp4")
HANDLE = "ipc:///tmp/verl-qerl-bench-{}.sock"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS[:3]))
    parser.add_argument("--model", choices=sorted(rollout_arms.SHAPES), default="7B")
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=512)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--arm-seconds", type=int, default=150, help="an arm that takes longer is given up")
    args = parser.parse_args(arguments)
    rows, head = [], result_file.header({name: value for name, value in vars(args).items() if name != "out"})
    for arm in args.arms:
        with tempfile.TemporaryDirectory() as folder:
            job = {name: value for name, value in vars(args).items() if name not in ("out", "arms")}
            job |= {"arm": arm, "folder": folder, "handle": HANDLE.format(os.getpid())}
            rows.append(run_arm(job, Path(folder)))
        result_file.write(args.out, head | {"rows": rows})
        print(json.dumps(rows[-1]), flush=True)


def run_arm(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row of one arm, or the reason why there is none."""
    rollout_arms.write_model(folder, rollout_arms.SHAPES[job["model"]], packed=False)
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, "--engine", str(folder / "job.json")]
    done = None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=job["arm_seconds"], check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        return json.loads(lines[-1].removeprefix("ROW "))
    except subprocess.TimeoutExpired:
        return {"arm": job["arm"], "error": f"not done within {job['arm_seconds']} s"}
    except IndexError:
        output = done.stdout + done.stderr if done else ""
        return {"arm": job["arm"], "error": "the engine stopped", "output": output[-12000:]}


def tensor_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the Qwen2.5 model, in the order of a state_dict."""
    shape = rollout_arms.SHAPES[model]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, size in shape.linears.items():
            found[f"{prefix}.{name}.weight"] = size
            if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
                found[f"{prefix}.{name}.bias"] = size[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = (shape.hidden,)
    return found | {"model.norm.weight": (shape.hidden,), "lm_head.weight": (shape.vocabulary, shape.hidden)}


def actor(job: dict[str, Any]) -> None:
    """Waits for lines; each asks for one sync, an empty one ends."""
    import asyncio

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from verl_qerl.verl_plugin.weight_sync.requantize import quantized_for_rollout

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = tensor_shapes(job["model"])
    generator = torch.Generator(device).manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator, device=device) * 0.02 for name, shape in shapes.items()}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        if job["arm"] == "bf16":
            return ((name, tensor.bfloat16()) for name, tensor in weights.items())
        form = get_format(job["arm"])
        return quantized_for_rollout(weights.items(), shapes, form, ("lm_head",), tied=False)

    print("READY", flush=True)
    while sys.stdin.readline().strip():
        sender = BucketedWeightSender(job["handle"], job["bucket_mb"], use_shm=device == "cpu")
        asyncio.run(sender.async_send_weights(stream()))
        print("SENT", flush=True)


class Engine:
    """A vLLM engine of one arm with its actor."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.num_syncs = job, 0
        self.cuda = torch.cuda.is_available()
        command = [sys.executable, __file__, "--actor", str(Path(job["folder"]) / "job.json")]
        pipe = subprocess.PIPE
        self.actor = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.llm = self.start()
        self.wait("READY")

    def start(self) -> Any:
        import vllm

        from verl_qerl.vllm_plugin import register

        register()
        job = self.job
        largest = max(job["batches"])
        longest = job["prompt"] + max(job["new_tokens"], job["answer_tokens"])
        sizes = sorted({1, 2, 4, *job["batches"]})
        options: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        if not self.cuda:
            options = {"enforce_eager": True}
        if job["arm"] != "bf16":
            options["quantization"] = f"verl_qerl_{job['arm']}"
            options["hf_overrides"] = {"quantization_config": get_format(job["arm"]).config()}
        block = 16 if self.cuda else 128
        tokens = largest * (-(-longest // block) + 1) * block + 64 * block
        cache = tokens * rollout_arms.SHAPES[job["model"]].kv_bytes
        return vllm.LLM(
            job["folder"], skip_tokenizer_init=True, dtype="bfloat16", load_format="dummy", max_model_len=longest + 1,
            max_num_seqs=largest, enable_prefix_caching=False, kv_cache_memory_bytes=cache, gpu_memory_utilization=0.4,
            **options,
        )  # fmt: skip

    def wait(self, word: str) -> None:
        assert self.actor.stdout is not None
        for line in self.actor.stdout:
            if line.strip() == word:
                return
        raise RuntimeError(f"the actor stopped with exit code {self.actor.wait()} before it said {word}.")

    def sync(self) -> dict[str, float]:
        assert self.actor.stdin is not None
        handle, arm, num_before = self.job["handle"], self.job["arm"], self.num_syncs
        self.actor.stdin.write("sync\n")
        self.actor.stdin.flush()
        (found,) = self.llm.collective_rpc(lambda worker: receive(worker, handle, arm, num_before))
        self.wait("SENT")
        self.num_syncs += 1
        return found

    def generate(self, batch: int, new_tokens: int) -> float:
        """Seconds."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        vocabulary = rollout_arms.SHAPES[self.job["model"]].vocabulary
        prompts = [
            {"prompt_token_ids": [(7 * i + 31 * j) % (vocabulary - 1) for i in range(self.job["prompt"])]}
            for j in range(batch)
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch * new_tokens
        return seconds

    def measure(self) -> dict[str, Any]:
        job = self.job
        first, *later = [self.sync() for _ in range(job["syncs"])]
        sync_s = sorted(found["seconds"] for found in later)[len(later) // 2]
        decode, prefill = {}, {}
        for batch in job["batches"]:
            self.generate(batch, 4)
            prefill[batch] = self.generate(batch, 1)
            decode[batch] = (self.generate(batch, job["new_tokens"]) - prefill[batch]) / (job["new_tokens"] - 1) * 1e3
        answers = max(job["batches"])
        rollout_s = self.generate(answers, job["answer_tokens"])
        tokens = answers * job["answer_tokens"]
        return {
            "arm": job["arm"],
            "sync_s": sync_s,
            "first_sync_s": first["seconds"],
            "all_sync_s": [found["seconds"] for found in later],
            "sync_bytes": first["bytes"],
            "sync_peak_gib": max(found["peak_gib"] for found in (first, *later)),
            "prefill_s": prefill,
            "decode_ms_per_step": decode,
            "rollout": {"answers": answers, "tokens": job["answer_tokens"], "prompt": job["prompt"]},
            "rollout_s": rollout_s,
            "tokens_per_s": tokens / rollout_s,
            "tokens_per_s_with_sync": tokens / (rollout_s + sync_s),
        }


def receive(worker: Any, handle: str, arm: str, num_before: int) -> dict[str, float]:
    """One sync as verl's worker extension (bf16) or ours does it."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from verl_qerl.vllm_plugin.weights.reload import InPlaceReload

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    num_bytes = 0
    model, config = worker.model_runner.get_model(), worker.vllm_config
    began = time.perf_counter()
    reload = InPlaceReload(model, config, get_format(arm), num_before) if arm != "bf16" else None

    def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        nonlocal num_bytes
        num_bytes += sum(tensor.nbytes for _, tensor in weights)
        if reload is not None:
            reload.load(weights)
        else:
            model.load_weights(weights)

    BucketedWeightReceiver(handle, worker.device, use_shm=not cuda).receive_weights(load)
    if reload is not None:
        reload.finish()
    else:
        process_weights_after_loading(model, config.model_config, worker.device)
    if cuda:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return {"seconds": time.perf_counter() - began, "bytes": num_bytes, "peak_gib": round(peak / 2**30, 2)}


def engine(job: dict[str, Any]) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = Engine(job)
    try:
        print("ROW", json.dumps(found.measure()), flush=True)
    finally:
        found.actor.kill()
    os._exit(0)  # tearing an engine down takes seconds and tells nothing


if __name__ == "__main__":
    roles = {"--engine": engine, "--actor": actor}
    if len(sys.argv) == 3 and sys.argv[1] in roles:
        roles[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
