"""Answers through verl's server with vLLM's engine beside it: asked after every token as verl does, and once as we do.

    python tests/bench/bench_answers.py --out tests/bench/results/<gpu>/answers_7b.json

One engine over dummy weights in a process of its own, NVFP4 with LoRA and our kernels; the answers have log-probs, the
tokenizer as many tokens as the model. `verl` is verl's vLLMHttpServer, `ours` what +rollout=... puts in its place, by
turns on the same engine. Beside tokens per second the seconds that the process with the server and that of the engine
computed: the first takes what the engine made apart, and where it computes all the time, the rollout waits for it.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import result_file
import rollout_arms
import rollout_load

ARMS = ("verl", "ours")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=list(rollout_arms.SHAPES), default="7B")
    parser.add_argument("--engine", choices=["nvfp4_lora_ours", "bf16_lora_ours"], default="nvfp4_lora_ours")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--realistic", type=int, nargs=2, metavar="N", help="prompts, and answers of each")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    args = parser.parse_args(arguments)
    options = {name: value for name, value in vars(args).items() if name != "out"}
    report = result_file.header(options) | {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder), report))
    return 0


async def measure(args: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Rows of all batches, written as they come."""
    engine = await start(args, folder)
    servers = {arm: await server_over(engine, arm) for arm in ARMS}
    core = engine_process()
    # What their length is called, the lengths, answers to a prompt, and rounds.
    batches = [(args.new_tokens, [args.new_tokens] * batch, 1, args.repeats) for batch in sorted(args.batches)]
    if args.realistic:
        prompts, samples = args.realistic
        batches.append(("realistic", rollout_load.draw_lengths(prompts * samples), samples, 1))
    await answers(servers["ours"], args, [8] * 8, "first", 8)
    for length, lengths, samples, rounds in batches:
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for turn in range(rounds):
            for arm, server in servers.items():
                await engine.reset_prefix_cache()
                name = f"{arm} {length} {len(lengths)} {turn}"
                found[arm].append(await timed(server, args, lengths, name, samples, core))
        for arm, measured in found.items():
            best = min(measured, key=lambda one: one["seconds"])
            rounded = {name: float(f"{value:.5g}") for name, value in best.items()}
            report["rows"].append({"arm": arm, "answers": len(lengths), "new_tokens": length, **rounded})
            print(json.dumps(report["rows"][-1]), flush=True)
        result_file.write(args.out, report)
    engine.shutdown()


async def timed(
    server: Any, args: argparse.Namespace, lengths: list[int], name: str, samples: int, core: Any
) -> dict[str, float]:
    """Seconds, tokens per second, and what two processes computed of the time, as shares of it."""
    began, front_began, core_began = time.perf_counter(), time.process_time(), sum(core.cpu_times()[:2])
    await answers(server, args, lengths, name, samples)
    seconds = time.perf_counter() - began
    front, behind = time.process_time() - front_began, sum(core.cpu_times()[:2]) - core_began
    rates = {"tokens_per_s": sum(lengths) / seconds, "server_share": front / seconds, "engine_share": behind / seconds}
    return {"seconds": seconds, **rates}


async def answers(server: Any, args: argparse.Namespace, lengths: list[int], name: str, samples: int) -> None:
    """All at once, as agent loops ask for them; every one must get its tokens and their log-probs."""
    source = random.Random(0)
    tokens = range(rollout_arms.SHAPES[args.model].vocabulary - 1)
    prompts = [source.choices(tokens, k=args.prompt) for _ in range(-(-len(lengths) // samples))]

    async def one(index: int, length: int) -> None:
        params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": length, "logprobs": True}
        answer = await server.generate(prompts[index // samples], params, f"{name} {index}")
        if not len(answer.token_ids) == len(answer.log_probs) == length:
            raise RuntimeError(f"{len(answer.token_ids)} tokens with {len(answer.log_probs)} log-probs, not {length}.")

    await asyncio.gather(*(one(index, length) for index, length in enumerate(lengths)))


async def start(args: argparse.Namespace, folder: Path) -> Any:
    """vLLM's engine as verl starts it, with an adapter in the place of verl's."""
    import torch
    from verl.workers.rollout.vllm_rollout import vllm_async_server as verls
    from vllm import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_qerl.vllm_plugin import register

    register()
    rollout_arms.register_dummy_nvfp4()
    shape, arm = rollout_arms.SHAPES[args.model], rollout_arms.ARMS[args.engine]
    rollout_arms.write_model(folder / "model", shape, arm.packed)
    write_tokenizer(folder / "model", shape.vocabulary)
    rollout_arms.write_adapter(folder / "adapter", shape, 32)
    cuda, largest = torch.cuda.device_count() > 0, max(args.batches)
    longest = args.prompt + max(args.new_tokens, rollout_load.LENGTHS["max"] if args.realistic else 0)
    block = 16 if cuda else 128
    room = rollout_load.kv_tokens(largest, longest, block) + 64 * block
    sizes = rollout_load.capture_sizes(args.batches, largest, bool(args.realistic), larger=True)
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sizes}} if cuda else {"enforce_eager": True}
    common = {"dtype": "bfloat16", "load_format": "dummy", "seed": 0, "logprobs_mode": "processed_logprobs"}
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 32}
    options = common | lora | graphs | rollout_arms.in_processes(arm.options)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder / "model"),
            max_model_len=longest + 1,
            max_num_seqs=largest,
            kv_cache_memory_bytes=room * shape.kv_bytes,
            disable_log_stats=True,  # as verl has it
            **options,
        )
    )
    await engine.add_lora(LoRARequest(verls.VLLM_LORA_NAME, verls.VLLM_LORA_INT_ID, str(folder / "adapter")))
    return engine


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One that decodes as real ones do, of random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters, source = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    words: dict[str, int] = {letter: index for index, letter in enumerate(letters)}
    while len(words) < vocabulary:
        words.setdefault("".join(source.choices(letters, k=source.randint(2, 8))), len(words))
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0]).save_pretrained(folder)


async def server_over(engine: Any, arm: str) -> Any:
    """verl's server, or ours, without its `__init__`, which wants Ray."""
    import verl.workers.rollout.replica as replica
    from verl.workers.rollout.vllm_rollout import vllm_async_server as verls

    from verl_qerl.verl_plugin.rollout import server as rollout

    rollout.install(replica)
    verls.vLLMReplica.__init__ = lambda self, *args: None
    ours = replica.get_rollout_replica_class("vllm")(0, None, None).server_class.__ray_metadata__.modified_class
    server = object.__new__(ours)
    form = {"qerl": {"base": "nvfp4"}} if arm == "ours" else None
    server.config = SimpleNamespace(
        max_model_len=engine.model_config.max_model_len, response_length=0, prompt_length=0, full_determinism=False,
        mtp=None, enable_rollout_routing_replay=False, custom=form, get=lambda name, default: default,
    )  # fmt: skip
    server.model_config = SimpleNamespace(lora_rank=32, lora={}, processor=None)
    server.global_steps = server.replica_rank = server.node_rank = server._admitting = 0
    server._submission_paused, server._disaggregation_role, server._pd_decode_peers = False, None, ()

    async def started(self: Any, args: Any) -> None:
        self.engine = args

    verls.vLLMHttpServer.run_server = started
    await server.run_server(engine)
    return server


def engine_process() -> Any:
    """The busiest of vLLM's processes: on a GPU there is one, a CPU has its worker in another."""
    import psutil

    return max(psutil.Process().children(recursive=True), key=lambda process: sum(process.cpu_times()[:2]))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sys.exit(main())
