"""`python -m verl_qerl plan`: GPU memory of a run with LoRA on a packed base, before it is started."""

import argparse
from typing import Any

from verl_qerl.cli.quantize.arguments import FORMATS


def add_parser(subparsers: Any) -> None:
    """Add the command to the program's parser."""
    parser = subparsers.add_parser("plan", help="memory of rollout and update on each GPU", description=__doc__)
    parser.add_argument("--model", required=True, help="directory, config.json of one, or a hub id")
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of one GPU: 79.2 for an 80 GB H100")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="(default: %(default)s)")
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="of a bf16 model, modules left in bf16 besides lm_head and routers, as by `quantize`; a quantized one says"
        " itself what it left out",
    )
    default = "(default: %(default)s)"
    parser.add_argument("--rank", type=int, default=32, help=f"of the adapters, on all linears, at least 1 {default}")
    parser.add_argument("--gpus", type=int, default=1, help=f"that FSDP2 shards over {default}")
    parser.add_argument(
        "--tokens", type=int, default=16384, help=f"of a micro-batch, as ppo_max_token_len_per_gpu {default}"
    )
    parser.add_argument("--utilization", type=float, default=0.5, help=f"rollout.gpu_memory_utilization {default}")
    parser.add_argument("--tensor-parallel", type=int, default=1, help=f"of the rollout {default}")
    switches = {
        "no-checkpointing": "of gradients",
        "share-base": "qerl.base.share: one packed base for actor and rollout",
        "shard-base": "qerl.base.shard: each GPU has a part of the packed base",
        "param-offload": "fsdp_config.param_offload",
        "optimizer-offload": "fsdp_config.optimizer_offload",
        "offload-policy": "fsdp_config.offload_policy",
    }
    for name, what in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument(
        "--fused-kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="model.use_fused_kernels, which `+rollout=...` sets; without it the logits of a micro-batch exist at once",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan, and at last whether the run fits: 1 when it does not, certainly or by the estimate.

    Raises:
        ValueError: There is no plan for the model or no config.json, an option is out of range, or a run refuses the
            options together, or the format of the model or what is ignored of it with them.
    """
    _check_ranges(args)
    # What follows imports torch, which takes seconds.
    _check_together(args)
    from verl_qerl.checkpoints.quantization_config import stored_format
    from verl_qerl.checkpoints.source import stored_config
    from verl_qerl.checkpoints.stream import check_format
    from verl_qerl.cli.dense_model import is_tied
    from verl_qerl.planning import memory_plan
    from verl_qerl.planning.memory_plan import GIB
    from verl_qerl.planning.model_shape import ModelShape

    config = stored_config(args.model)
    stored = stored_format(config, args.model)[0]
    check_format(args.model, stored, args.format)
    shape = ModelShape.from_config({**config, "tie_word_embeddings": is_tied(config)})
    heads, parts = config["num_attention_heads"], args.tensor_parallel
    shared = config.get("num_key_value_heads") or heads
    if heads % parts or (shared % parts and parts % shared):
        raise ValueError(
            f"no such rollout: --tensor-parallel {parts} of {args.model}, which has {heads} attention heads and"
            f" {shared} of keys and values. Divisors of {heads} that divide {shared}, or are multiples of it, are"
            " accepted, as by vLLM. Change --tensor-parallel."
        )
    switches = ("shard_base", "share_base", "param_offload", "optimizer_offload", "offload_policy")
    values = ("format", "rank", "gpus", "tokens", "utilization", "tensor_parallel")
    settings = memory_plan.Settings(
        **{name: getattr(args, name) for name in (*values, *switches)},
        checkpointing=not args.no_checkpointing,
        whole_logits=not args.fused_kernels,
        ignore=_left_out(args, config, stored, shape),
    )
    total = args.gpu_gib * GIB
    try:
        phases = memory_plan.plan(shape, settings, total)
        print(memory_plan.table(phases, total))
        if share := settings.utilization * total:
            left = share - memory_plan.rollout_weights(shape, settings)
            print(f"of vLLM's {share / GIB:.2f} GiB, {left / GIB:.2f} are left for its cache and its passes")
        memory_plan.check(phases, total)
        fits, line = memory_plan.verdict(phases, total)
    except memory_plan.DoesNotFitError as error:
        fits, line = False, f"does not fit: {error}"
    print(line)
    return 0 if fits else 1


def _left_out(args: argparse.Namespace, config: dict[str, Any], stored: str | None, shape: Any) -> tuple[str, ...]:
    """What stays in bf16: of a quantized model what it says, else what the command names, checked as by `quantize`."""
    from verl_qerl.checkpoints.experts import check_all_packed
    from verl_qerl.checkpoints.groups import linears_among
    from verl_qerl.formats import get_format
    from verl_qerl.formats.ignore import DEFAULT_IGNORE, ignored_modules, is_ignored

    if stored is None:
        rules = (*DEFAULT_IGNORE, *args.ignore)
        sizes = {f"{name}.weight": size for name, size in shape.modules().items()}
        linears_among(sizes, rules, args.model, get_format(args.format))
        return rules
    if args.ignore:
        raise ValueError(
            f"an option has no meaning here: --ignore {' '.join(args.ignore)} with {args.model}, which is quantized"
            f" ({stored}) and says itself what it left out. It is accepted with a bf16 model. Leave it out."
        )
    rules = ignored_modules(config)
    check_all_packed(args.model, (name for name in shape.modules() if is_ignored(name, rules)))
    return rules


def _check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers that no run has, and a run without an adapter."""
    if args.rank == 0:
        raise ValueError("no plan: --rank 0 trains all weights. 1 or more is accepted. Name an adapter's rank.")
    for name in ("gpu_gib", "rank", "gpus", "tokens", "tensor_parallel", "utilization"):
        value, (low, high) = getattr(args, name), (0, 1) if name == "utilization" else (1, 10**9)
        if not low <= value <= high:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"no such run: {option} {value}. {low} to {high} is accepted. Change {option}.")


def _check_together(args: argparse.Namespace) -> None:
    """Refuse what a run refuses, by the same table of rules."""
    from verl_qerl.options import rules

    run = {
        "qerl.base.format": args.format,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": args.gpus,
        "qerl.base.share": args.share_base,
        "qerl.base.shard": args.shard_base,
        rules.LORA_RANK: args.rank,
        f"{rules.ROLLOUT}.tensor_model_parallel_size": args.tensor_parallel,
        f"{rules.ROLLOUT}.gpu_memory_utilization": args.utilization,
        f"{rules.FSDP}.param_offload": args.param_offload,
        f"{rules.FSDP}.offload_policy": args.offload_policy,
    }
    rules.check(run.get)
    rules.check_gpus(run.get)
