"""Where the time of a decode step goes, beside the least that its bytes and its arithmetic take.

The least of a group is the larger of its bytes over the copy bandwidth and its arithmetic over the dense bf16 rate of
an H200 (results/h200/dequantize.json; 790 TFLOP/s). Weights and KV cache count, activations do not.
"""

import re
from typing import Any

import rollout_arms

COPY_BYTES, BF16_FLOPS = 4.25e12, 790e12  # per second
LINEARS, CUBLAS, LORA, ATTENTION, GAPS = "quantized linears", "cuBLAS", "LoRA", "attention", "gaps"
# The first that matches; fused kernels of the compiler name the operators around them.
GROUPS = (
    ("norms, activations", re.compile(r"^triton_|rms_norm|silu|act_and_mul|rotary", re.IGNORECASE)),
    (ATTENTION, re.compile(r"flash|attention|reshape_and_cache|slot_mapping", re.IGNORECASE)),
    (LORA, re.compile(r"shrink|expand|low_rank", re.IGNORECASE)),
    (
        LINEARS,
        re.compile(r"w4a16_matmul|marlin|dequantize|scaled_mm|c3x|cutlass_3x|fp8", re.IGNORECASE),
    ),
    (CUBLAS, re.compile(r"nvjet|cublas|gemm|gemv|splitk", re.IGNORECASE)),
    ("sampler", re.compile(r"softmax|argmax|distribution|topk|sort|reduce_kernel", re.IGNORECASE)),
    ("copies", re.compile(r"^Mem(cpy|set)")),
)
ORDER = (LINEARS, CUBLAS, LORA, ATTENTION, "norms, activations", "sampler", "copies", "other", GAPS)


def group_of(kernel: str) -> str:
    """The group of a kernel, by its name."""
    return next((name for name, pattern in GROUPS if pattern.search(kernel)), "other")


def grouped(profile: dict[str, Any]) -> dict[str, float]:
    """Group -> us per step; `gaps` is what no kernel ran in."""
    times: dict[str, float] = {}
    for kernel, us in profile["us_per_step"].items():
        times[group_of(kernel)] = times.get(group_of(kernel), 0.0) + us
    return times | {GAPS: max(0.0, profile["wall_us"] - profile["kernels_us"])}


def least(profile: dict[str, Any]) -> dict[str, float]:
    """Group -> us that bytes and arithmetic allow."""
    arm, shape, batch = rollout_arms.ARMS[profile["arm"]], rollout_arms.SHAPES[profile["model"]], profile["batch"]
    weights = shape.layers * sum(rows * columns for rows, columns in shape.linears.values())
    adapter = shape.layers * profile["rank"] * sum(rows + columns for rows, columns in shape.linears.values())
    head = shape.vocabulary * shape.hidden
    tokens = profile.get("context_tokens") or profile["prompt"]

    def us(*parts: tuple[float, float]) -> float:
        return sum(max(size / COPY_BYTES, 2 * products / BF16_FLOPS) for size, products in parts) * 1e6

    linears = (min(arm.linear_bytes, 2.0) * weights, weights * batch)
    dense = arm.linear_bytes == 2.0
    cublas = ((2.0 * head, head * batch), *([linears] if dense else []))
    found = {CUBLAS: us(*cublas), LORA: us((2.0 * adapter, adapter * batch))}
    found[ATTENTION] = us((float(batch * tokens * shape.kv_bytes), 0.0))
    return found if dense else found | {LINEARS: us(linears)}


def tables(data: dict[str, Any]) -> str:
    """Markdown: one table per model, rank and batch, one column per arm; and one of the steps of each rollout."""
    return "\n\n".join(filter(None, [profile_tables(data["profiles"]), *map(steps_table, data.get("steps", []))]))


def steps_table(entry: dict[str, Any]) -> str:
    """Of one arm: how many steps of a kind there were, ms of one, and those in which the host did not wait."""
    kinds = [one for one in entry["kinds"] if one["steps"]]
    if not kinds:
        return ""
    rounds = " and ".join(f"{seconds:.2f}" for seconds in entry["rounds_s"])
    lines = [f"{entry['arm']}, {entry['model']}, steps of a long-tailed rollout of {rounds} s", ""]
    lines += ["| tokens | | steps | ms | of it the host |", "|---|---|---|---|---|"]
    for one in kinds:
        ms, host = (one[name] / one["steps"] * 1e3 for name in ("seconds", "host_s"))
        size = f"up to {one['tokens']}" if one["tokens"] else "more"
        does = "requests begin" if one["begins"] else "all decode"
        lines.append(f"| {size} | {does} | {one['steps']} | {ms:.2f} | {host:.2f} |")
    return "\n".join(lines)


def profile_tables(profiles: list[dict[str, Any]]) -> str:
    """One for each model, rank and batch."""
    keys = sorted({(profile["model"], profile["rank"], profile["batch"]) for profile in profiles})
    return "\n\n".join(
        table(key, [one for one in profiles if (one["model"], one["rank"], one["batch"]) == key]) for key in keys
    )


def table(key: tuple[str, int, int], profiles: list[dict[str, Any]]) -> str:
    """us per group and, in brackets, the least of it."""
    model, rank, batch = key
    columns = {profile["arm"]: (grouped(profile), least(profile)) for profile in profiles}
    lines = [f"| us | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in ORDER:
        cells = [cell(times.get(name), bounds.get(name)) for times, bounds in columns.values()]
        if any(times.get(name) for times, _ in columns.values()):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    totals = [f"{profile['wall_us']:.0f} ({sum(least(profile).values()):.0f})" for profile in profiles]
    lines.append(f"| step | {' | '.join(totals)} |")
    title = f"{model}, rank {rank}, batch {batch}: one decode step, us (least by bytes and arithmetic)"
    return "\n".join([title, "", *lines])


def cell(us: float | None, bound: float | None) -> str:
    """The time, and its bound where there is one."""
    if not us:
        return "-"
    return f"{us:.0f}" + (f" ({bound:.0f})" if bound else "")
