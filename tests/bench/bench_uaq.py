"""What UAQ does under AdamW, beside a larger learning rate: paired runs of one small model, on the CPU.

    python tests/bench/bench_uaq.py --out tests/bench/results/cpu/uaq.json

A Qwen2 of two layers learns one rule and is then trained on another, with the same batches in every arm:

    plain      model and optimizer as they are
    uaq        scaled by s, then the same optimizer
    lr         not scaled; the linears that UAQ would scale have lr s
    twin       not scaled; those linears have lr s, eps / s, weight decay / s, those norms lr / s, eps s, weight decay s

By the algebra `uaq` and `twin` are one run: `distance_to_twin` is how far apart they end, as a share of the update. All
weights are compared as they are without the scaling. `update_over_error` is ||dW|| / ||Q(W) - W|| on those linears, by
INT8 per output channel, and `codes_changed` the share of their codes that training moved: what the rollout notices.
"""

import argparse
import copy
import time
from pathlib import Path

import result_file
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_qerl.algos.uaq import fold_, scaled_parameters, unfold_
from verl_qerl.formats import INT8
from verl_qerl.formats.reference import dequantize

VOCAB, LENGTH, BATCH = 61, 32, 16
PRETRAIN_STEPS, PRETRAIN_LR = 200, 2e-3
DECAY, EPS = 0.01, 1e-8  # verl's


def sequences(count: int, factor: int, seed: int) -> torch.Tensor:
    """[count, LENGTH] of x -> factor x + 7 mod VOCAB, one token in ten at random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)
    keep = torch.rand((count, LENGTH), generator=generator) < 0.9
    for at in range(1, LENGTH):
        tokens[:, at] = torch.where(keep[:, at], (factor * tokens[:, at - 1] + 7) % VOCAB, tokens[:, at])
    return tokens


def pretrained(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=1, **sizes))
    train(model, [{"params": list(model.parameters()), "lr": PRETRAIN_LR}], PRETRAIN_STEPS, 3, seed, None)
    return model


def train(model, groups, steps: int, factor: int, seed: int, clip: float | None) -> None:
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY, eps=EPS, betas=(0.9, 0.999))
    for step in range(steps):
        batch = sequences(BATCH, factor, 1000 * (seed + 1) + step)
        model(batch, labels=batch).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model, roles: dict[str, str], arm: str, scale: float, lr: float) -> list[dict]:
    """Parameter groups of an arm; see the module's text."""
    factors = {"linear": scale if arm in ("lr", "twin") else 1.0, "norm": 1 / scale if arm == "twin" else 1.0}
    groups = []
    for role in ("linear", "norm", None):
        s = factors.get(role, 1.0)
        group = {"params": [p for name, p in model.named_parameters() if roles.get(name) == role], "lr": lr * s}
        if arm == "twin":
            group |= {"eps": EPS / s, "weight_decay": DECAY / s}
        groups.append(group)
    return groups


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, decoded weight) of symmetric INT8 per output channel."""
    packed = INT8().quantize(weight)
    return packed.codes, dequantize(packed, weight.dtype)


@torch.no_grad()
def log_probs(model) -> torch.Tensor:
    return model(sequences(64, 5, 7)).logits.log_softmax(-1)


@torch.no_grad()
def compare(base, model, roles: dict[str, str], lost: float | None) -> dict[str, float]:
    """Both without the scaling."""
    before, after = (dict(m.named_parameters()) for m in (base, model))
    linears = [name for name, role in roles.items() if role == "linear"]
    norms = [name for name, role in roles.items() if role == "norm"]

    def size(names, of):
        return sum(of(name).double().square().sum() for name in names).sqrt().item()

    update = size(linears, lambda name: after[name] - before[name])
    error = size(linears, lambda name: int8(after[name])[1] - after[name])
    moved = [(int8(before[name])[0] != int8(after[name])[0]).float().mean() for name in linears]
    quantized = copy.deepcopy(model)
    for name in linears:
        quantized.get_parameter(name).copy_(int8(after[name])[1])
    exact, start = log_probs(model), log_probs(base)
    return {
        "loss": model(sequences(64, 5, 7), labels=sequences(64, 5, 7)).loss.item(),
        "relative_update_linears": update / size(linears, lambda name: before[name]),
        "relative_update_norms": size(norms, lambda name: after[name] - before[name])
        / size(norms, lambda name: before[name]),
        "update_over_error": update / error,
        "codes_changed": torch.stack(moved).mean().item(),
        "kl_from_start": (exact.exp() * (exact - start)).sum(-1).mean().item(),
        "kl_of_int8": (exact.exp() * (exact - log_probs(quantized))).sum(-1).mean().item(),
        **({} if lost is None else {"logits_change_by_folding": lost}),
    }


def run(base, arm: str, scale: float, options: argparse.Namespace, seed: int, clip: float | None):
    """(trained model without the scaling, change of the log-probs by folding alone)."""
    model, roles = copy.deepcopy(base), scaled_parameters(name for name, _ in base.named_parameters())
    lost = None
    if arm == "uaq":
        scale_weights(model, roles, scale, fold_)
        lost = (log_probs(model) - log_probs(base)).abs().max().item()
    train(model, groups_of(model, roles, arm, scale, options.lr), options.steps, 5, seed, clip)
    if arm == "uaq":
        scale_weights(model, roles, scale, unfold_)
    return model, roles, lost


@torch.no_grad()
def scale_weights(model, roles: dict[str, str], scale: float, change) -> None:
    for name, role in roles.items():
        change(role, model.get_parameter(name).data, scale)


@torch.no_grad()
def distance(a, b, base, roles: dict[str, str]) -> float:
    """||W_a - W_b|| / ||W_b - W_base|| on what UAQ scales."""
    far, near = (
        sum(
            (dict(x.named_parameters())[name] - dict(y.named_parameters())[name]).double().square().sum()
            for name in roles
        )
        for x, y in ((a, b), (b, base))
    )
    return (far / near).sqrt().item()


def measure(options: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(1)  # of a model this small more threads wait for each other
    rows = []
    for seed in range(options.seeds):
        base = pretrained(seed)
        arms = [("plain", 1.0, None)]
        for scale in (1.5, 2.0):
            arms += [(arm, scale, None) for arm in ("uaq", "lr", "twin")]
        arms += [(arm, 1.5, options.clip) for arm in ("uaq", "twin")]
        models = {}
        for arm, scale, clip in arms:
            model, roles, lost = run(base, arm, scale, options, seed, clip)
            models[arm, scale, clip] = model
            rows.append({"seed": seed, "arm": arm, "scale": scale, "clip": clip} | compare(base, model, roles, lost))
        for row in rows:
            key = ("uaq", row["scale"], row["clip"])
            if row["seed"] == seed and row["arm"] == "uaq":
                row["distance_to_twin"] = distance(models[key], models[("twin", *key[1:])], base, roles)
                if row["clip"] is None:
                    row["distance_to_lr"] = distance(models[key], models[("lr", *key[1:])], base, roles)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--clip", type=float, default=1.0, help="of the arms that clip the gradient")
    options = parser.parse_args()
    started = time.perf_counter()
    rows = measure(options)
    head = result_file.header({name: value for name, value in vars(options).items() if name != "out"})
    head |= {"weight_decay": DECAY, "pretrain": {"steps": PRETRAIN_STEPS, "lr": PRETRAIN_LR}}
    result_file.write(options.out, head | {"seconds": round(time.perf_counter() - started, 1), "rows": rows})
    print(table(rows))


def table(rows: list[dict]) -> str:
    """Means over the seeds, a line an arm."""
    names = ["relative_update_linears", "relative_update_norms", "update_over_error", "codes_changed", "kl_from_start"]
    names += ["kl_of_int8", "loss", "distance_to_twin", "distance_to_lr"]
    lines = ["| arm | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for key in dict.fromkeys((row["arm"], row["scale"], row["clip"]) for row in rows):
        same = [row for row in rows if (row["arm"], row["scale"], row["clip"]) == key]
        means = [sum(row[n] for row in same) / len(same) if n in same[0] else None for n in names]
        arm = f"{key[0]} {key[1]:g}" + (f", clipped at {key[2]:g}" if key[2] else "")
        lines.append(f"| {arm} | " + " | ".join("-" if mean is None else f"{mean:.3g}" for mean in means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
