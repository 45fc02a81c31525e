"""Actor against rollout: log-prob differences without noise, and the entropy of sampling with noise.

Arms with the same LoRA adapter: bf16, NVFP4, and NVFP4 prepared for noise (norms in float32); with --arms also bases
in INT8, FP8 and MXFP4. The rollout is vLLM, the actor the module the engine trains, in bf16. Log-probs are compared
without noise. The entropy is measured twice: on what the rollout samples at each sigma, and exactly on fixed contexts.

INT8 and FP8 have a float32 scale a channel, which the rollout's kernel multiplies its sums by, where the actor rounds
codes times scale to bf16. `actor_weight_rounding` is what that changes in the actor's own log-probs.

    python tests/bench/bench_mismatch.py --model DIR --prompts train.parquet --out FILE.json [--arms bf16 int8]
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path

import result_file

from verl_qerl.cli.prompts import read_prompts, tokenize

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker is asked for log-probs in this process

SIGMAS = (0.0, 1e-2, 5e-2)
ARMS = ("bf16", "nvfp4", "nvfp4_noise", "int8", "fp8", "mxfp4")


def main() -> None:
    args = parse()
    prompts = tokenize(Path(args.model), read_prompts(args.prompts, args.num_prompts))
    options = {"lora_rank": args.rank, "samples_per_prompt": args.samples, "max_tokens": args.max_tokens}
    result = result_file.header({**options, "num_prompts": len(prompts)}) | {"model": args.describe, "arms": []}
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "adapter"
        make_adapter(args.model, adapter, args.rank)
        for arm in args.arms:
            # One process each: an engine that shares its process does not give its memory back.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result["arms"].append(pool.apply(run_arm, (arm, args, prompts, adapter)))
    result_file.write(args.out, result)
    print(json.dumps(result["arms"], indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="bf16 model directory")
    parser.add_argument("--describe", default="", help="what the model is, for the result file")
    parser.add_argument("--prompts", type=Path, required=True, help="parquet in verl's schema")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--draws", type=int, default=8, help="draws of the noise at every sigma, at least 2")
    parser.add_argument("--contexts", type=int, default=128, help="sequences that the exact entropy is taken on")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's share of the GPU")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS[:3])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_adapter(model: str, out: Path, rank: int) -> None:
    """A LoRA adapter on every linear whose product is about a hundredth of the base: neither zero nor dominant."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=2e-3)
    peft.save_pretrained(out)


def run_arm(arm: str, args: argparse.Namespace, prompts: list[list[int]], adapter: Path) -> dict:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from verl_qerl.formats import get_format

    form = arm.removesuffix("_noise")
    common = {
        "model": args.model,
        "dtype": "bfloat16",
        "max_model_len": max(map(len, prompts)) + args.max_tokens,
        "gpu_memory_utilization": args.memory,
        "enable_lora": True,
        "max_lora_rank": args.rank,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "verl_qerl.vllm_plugin.worker.RolloutWorkerExtension",
    }
    if arm != "bf16":
        common |= {"load_format": f"verl_qerl_{form}", "quantization": f"verl_qerl_{form}"}
        common["hf_overrides"] = {"quantization_config": get_format(form).config()}
    if arm == "nvfp4_noise":
        common["additional_config"] = {"verl_qerl": {"aqn": {"enabled": True}}}
    engine = LLM(**common)
    lora = LoRARequest("adapter", 1, str(adapter))
    samples = sample(engine, args, prompts, lora)
    row: dict = {"arm": arm}
    if arm == "nvfp4_noise":
        row["sampled_entropy"] = entropies(engine, args, prompts, lora)
    return row | compare(arm, args, samples, adapter)


def sample(engine: object, args: argparse.Namespace, prompts: list[list[int]], lora: object) -> list[tuple]:
    """(prompt ids, answer ids, log-probs of the answer) of every sampled sequence."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, n=args.samples, max_tokens=args.max_tokens, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, lora_request=lora)
    return [
        (ids, list(answer.token_ids), [next(iter(entry.values())).logprob for entry in answer.logprobs])
        for ids, output in zip(prompts, outputs, strict=True)
        for answer in output.outputs
    ]


def entropies(engine: object, args: argparse.Namespace, prompts: list, lora: object) -> list[dict]:
    """-log p of the tokens that the rollout samples at every sigma: an unbiased and noisy estimate of its entropy.

    One draw moves the entropy up or down in the first order of sigma; what the noise does on average is what several
    draws have in common, so the error is that between draws.
    """
    rows = []
    for sigma in SIGMAS:
        means = []
        for draw in range(1, args.draws + 1):
            ((num_norms, _),) = engine.collective_rpc("qerl_set_noise", args=(sigma, draw))
            if not engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache was not reset")
            samples = sample(engine, args, prompts, lora)
            means.append(statistics.fmean(-statistics.fmean(log_probs) for _, _, log_probs in samples))
        row = {"sigma": sigma, "num_norms": num_norms, "entropy": statistics.fmean(means)}
        rows.append(row | {"standard_error": error_of_mean(means), "draws": args.draws, "sequences": len(samples)})
    return rows


def exact_entropies(actor: object, args: argparse.Namespace, samples: list[tuple], device: str) -> list[dict]:
    """Entropy of the whole distribution on fixed contexts, those sampled without noise, and its gain by the noise.

    The actor gets the very draws of the rollout, on norms in float32; contexts are their own controls.
    """
    from verl_qerl.algos.aqn import AQNConfig
    from verl_qerl.vllm_plugin.noise.norm_noise import NormNoise

    noise = NormNoise(actor.base_model.model, AQNConfig(enabled=True))
    contexts = samples[:: max(1, len(samples) // args.contexts)]
    noise.apply(0.0, 1)
    without = mean_entropy(actor, contexts, device)
    rows: list[dict] = [{"sigma": 0.0, "entropy": without, "contexts": len(contexts)}]
    for sigma in SIGMAS[1:]:
        gains = []
        for draw in range(1, args.draws + 1):
            noise.apply(sigma, draw)
            gains.append(mean_entropy(actor, contexts, device) - without)
        row = {"sigma": sigma, "entropy": without + statistics.fmean(gains), "gain": statistics.fmean(gains)}
        rows.append(row | {"gain_standard_error": error_of_mean(gains), "gain_of_each_draw": gains})
    noise.apply(0.0, 1)
    return rows


def mean_entropy(actor: object, contexts: list[tuple], device: str) -> float:
    means = []
    for prompt, answer, _ in contexts:
        log_probs = answer_logits(actor, prompt, answer, device).log_softmax(-1)
        means.append(-(log_probs.exp() * log_probs).sum(-1).mean())
    return statistics.fmean(mean.item() for mean in means)


def answer_logits(actor: object, prompt: list[int], answer: list[int], device: str) -> object:
    """[T, V] float32, the logits that each token of the answer was drawn from."""
    import torch

    ids = torch.tensor([prompt + answer], device=device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        return actor(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def error_of_mean(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def compare(arm: str, args: argparse.Namespace, samples: list[tuple], adapter: Path) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    actor = build_actor(arm, args.model, adapter).to(device).eval()
    log_probs = answer_log_probs(actor, samples, device)
    delta = log_probs - torch.cat([torch.tensor(rollout) for _, _, rollout in samples])
    extra = {}
    if arm == "nvfp4_noise":
        extra["exact_entropy"] = exact_entropies(actor, args, samples, device)
    if arm in ("int8", "fp8"):
        unrounded(actor)
        exact = answer_log_probs(actor, samples, device)
        extra["actor_weight_rounding"] = (log_probs - exact).abs().mean().item()
    # k3 estimator of KL(rollout || actor), Schulman 2020
    return {
        "mean_abs_log_prob_difference": delta.abs().mean().item(),
        "max_abs_log_prob_difference": delta.abs().max().item(),
        "kl_k3": (delta.exp() - 1 - delta).mean().item(),
        "tokens": delta.numel(),
        **extra,
    }


def answer_log_probs(actor: object, samples: list[tuple], device: str) -> object:
    """[tokens of all answers] float32, on the CPU."""
    import torch

    found = []
    for prompt, answer, _ in samples:
        chosen = torch.tensor(answer, device=device)[:, None]
        logits = answer_logits(actor, prompt, answer, device)
        found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu())
    return torch.cat(found)


def unrounded(actor: object) -> None:
    """Have the packed linears multiply by codes and, the sums, by scales, rounding the result once, as kernels do."""
    import functools

    from verl_qerl.modules.convert import packed_linears

    def forward(linear: object, x: object) -> object:
        codes, scale = linear.packed().tensors
        y = (x.float() @ codes.float().t()) * scale.t()
        return (y if linear.bias is None else y + linear.bias.float()).to(x.dtype)

    for _, linear in packed_linears(actor):
        linear.forward = functools.partial(forward, linear)


def build_actor(arm: str, model: str, adapter: Path):
    import torch
    from accelerate import init_empty_weights
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    if arm == "bf16":
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    else:
        from verl_qerl.modules.format_linear import PACKED_LINEARS
        from verl_qerl.verl_plugin.actor.packed_model import build_skeleton, load_packed
        from verl_qerl.verl_plugin.config.base_options import BaseOptions

        config = AutoConfig.from_pretrained(model)
        with init_empty_weights(include_buffers=False):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        options = BaseOptions(format=arm.removesuffix("_noise"))
        kind = PACKED_LINEARS[options.format]
        linears = build_skeleton(base, model, options.ignore, kind, options.weight_format)
        load_packed(base, linears, model, options, torch.bfloat16)
    return PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)


if __name__ == "__main__":
    main()
