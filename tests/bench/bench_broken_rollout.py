"""KL(rollout || actor) of rollouts that are broken on purpose: between what the gate's limit lies.

Rollout and actor are the same float32 model in transformers; one thing of the rollout is changed, it samples, and the
actor scores its tokens. Quantization and kernels are left out; bench_mismatch.py has them, on a sound rollout.

    python tests/bench/bench_broken_rollout.py --model DIR --prompts test.parquet --out FILE.json
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import result_file
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_qerl.algos.mismatch import rollout_mismatch


def factor(f: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: weight * f


def swap_neighbours(weight: torch.Tensor) -> torch.Tensor:
    """As packed bytes of which the halves are read in the wrong order."""
    return weight.view(len(weight), -1, 2).flip(-1).reshape(weight.shape)


def shuffle_columns(weight: torch.Tensor) -> torch.Tensor:
    return weight[:, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))]


def noise(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda weight: weight + sigma * torch.randn(weight.shape, generator=generator)


# Name: part of the names of the weights, what is done to them, other options of sampling.
BREAKS = {
    "nothing": ("", lambda weight: weight, {}),
    "noise of 0.01 on the norms": ("layernorm", noise(0.01), {}),
    "noise of 0.05 on the norms": ("layernorm", noise(0.05), {}),
    "noise of 0.2 on the norms": ("layernorm", noise(0.2), {}),
    "top_p 0.9": ("", lambda weight: weight, {"top_p": 0.9}),
    "all linears x 1.05": ("_proj", factor(1.05), {}),
    "all linears x 1.1": ("_proj", factor(1.1), {}),
    "all linears x 1.25": ("_proj", factor(1.25), {}),
    "all linears x 2": ("_proj", factor(2), {}),
    **{
        f"{name} x {f}": (name, factor(f), {})
        for name in ("q_proj", "o_proj", "gate_proj", "down_proj")
        for f in (0.5, 2)
    },
    **{
        f"halves of bytes swapped: {name} of layer {layer}": (f"layers.{layer}.{part}.{name}", swap_neighbours, {})
        for layer in (0, 1)
        for part, name in (("self_attn", "q_proj"), ("self_attn", "o_proj"), ("mlp", "gate_proj"), ("mlp", "down_proj"))
    },
    "columns shuffled: o_proj of layer 1": ("layers.1.self_attn.o_proj", shuffle_columns, {}),
    "halves of bytes swapped: all": ("_proj", swap_neighbours, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="trained model directory")
    parser.add_argument("--describe", default="", help="what the model is, for the result file")
    parser.add_argument("--prompts", required=True, help="parquet in verl's schema")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows = pd.read_parquet(args.prompts).prompt[: args.num_prompts]
    texts = [tokenizer.apply_chat_template(list(row), tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    actor = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    found = {}
    for name, (part, change, sampling) in BREAKS.items():
        found[name] = measure(broken(actor, part, change), actor, prompts, args.max_tokens, sampling)
        print(name, found[name])
    head = result_file.header({"num_prompts": len(texts), "max_tokens": args.max_tokens})
    result_file.write(args.out, head | {"model": args.describe, "breaks": found})


def broken(actor: torch.nn.Module, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    rollout = copy.deepcopy(actor)
    weights = [weight for name, weight in rollout.named_parameters() if part in name and name.endswith(".weight")]
    assert weights, f"no weight is named {part}"
    with torch.no_grad():
        for weight in weights:
            weight.copy_(change(weight))
    return rollout


@torch.no_grad()
def measure(rollout: torch.nn.Module, actor: torch.nn.Module, prompts: dict, max_tokens: int, sampling: dict) -> dict:
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling
    done = rollout.generate(
        **prompts, **options, max_new_tokens=max_tokens, output_scores=True, return_dict_in_generate=True
    )
    start = prompts["input_ids"].shape[1]
    tokens = done.sequences[:, start:]
    ended = (tokens == rollout.generation_config.eos_token_id).long().cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (tokens == rollout.generation_config.eos_token_id))
    attention = torch.cat([prompts["attention_mask"], mask.long()], dim=1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = actor(input_ids=done.sequences, attention_mask=attention, position_ids=positions).logits[:, start - 1 : -1]
    of_rollout, of_actor = (
        scores.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for scores in (torch.stack(done.scores, 1), logits)
    )
    return rollout_mismatch(of_rollout, of_actor, mask)._asdict()


if __name__ == "__main__":
    main()
