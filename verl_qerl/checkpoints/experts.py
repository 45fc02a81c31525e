"""Mixtures of experts in a checkpoint: which are read, and whether their experts are all there.

The linears of experts are matrices named `...layers.<i>.mlp.experts.<e>.{gate,up,down}_proj`. Each is packed by itself,
gate and up of one expert with one global scale, which is what vLLM's kernel expects of w1 and w3.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from verl_qerl.errors import CheckpointFormatError

# Families whose experts actor and rollout both compute with; `model_type` of config.json.
FAMILIES = ("qwen3_moe",)
LINEARS = ("gate_proj", "up_proj", "down_proj")
# The linears that carry adapters in a mixture of experts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what families call it in config.json
_OF_EXPERTS = re.compile(r"\.(experts|shared_experts?)\b")


def is_expert(module: str) -> bool:
    """Whether a linear of this name belongs to an expert."""
    return _EXPERT.fullmatch(module) is not None


def check_experts(where: str, config: Mapping, names: Iterable[str]) -> None:
    """Require experts that are read here, every one of them.

    Raises:
        CheckpointFormatError: config.json or a tensor tells of experts of another kind, or an expert lacks a linear.
    """
    names = [name for name in names if _OF_EXPERTS.search(name)]
    family = config.get("model_type")
    if family not in FAMILIES and (names or states_experts(config)):
        first = f"first {min(names)!r}" if names else "by config.json"
        raise CheckpointFormatError(
            f"experts of this family are not supported: model_type={family}, {first} of {where}."
            f" Accepted are {', '.join(FAMILIES)} and models without experts. Use one of them."
        )
    if not names:
        return
    found: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for layer, expert, linear in linears_of_experts(where, names):
        found[layer].add((expert, linear))
    count = number_of_experts(config)
    if not isinstance(count, int):
        raise CheckpointFormatError(
            f"{where} does not say how many experts it has: num_experts={count} in config.json. A number is accepted."
            " Download the model again."
        )
    wanted = {(e, linear) for e in range(count) for linear in LINEARS}
    for layer, linears in sorted(found.items()):
        if linears != wanted:
            e, linear = min(linears ^ wanted)
            raise CheckpointFormatError(
                f"the experts of {layer!r} are not those of config.json: {len(linears)} of {len(wanted)} linears in"
                f" {where}, first difference 'experts.{e}.{linear}'. All of {count} experts are needed."
                " Check that config.json belongs to these weights, or download the model again."
            )


def states_experts(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a mixture, whatever its tensors are called; dense models may have one expert."""
    return any(isinstance(count, int) and count > 1 for count in map(config.get, _COUNTS))


def number_of_experts(config: Mapping[str, Any]) -> Any:
    """`num_experts` of config.json, or what transformers 5 calls it; None where neither is."""
    return config.get("num_experts", config.get("num_local_experts"))


def linears_of_experts(where: str, names: Iterable[str]) -> list[tuple[str, int, str]]:
    """(layer, expert, linear) of every tensor of experts among `names`; a CheckpointFormatError for other forms."""
    found = []
    for name in filter(_OF_EXPERTS.search, names):
        match = _EXPERT.fullmatch(name.rpartition(".")[0])
        if match is None or ".layers." not in f".{name}":
            raise CheckpointFormatError(
                f"{where} holds experts in a form that is not read: {name!r}. Matrices named"
                " `...mlp.experts.<e>.{gate,up,down}_proj` are accepted, no stacked or shared experts. Save the model"
                " again with transformers 5; a mixture is trained with adapters on +rollout=nvfp4."
            )
        found.append((match[1], int(match[2]), match[3]))
    return found


def check_all_packed(where: str, dense: Iterable[str]) -> None:
    """Require that none of the modules which stay dense is a linear of an expert."""
    left_out = sorted(filter(is_expert, dense))
    if left_out:
        raise ValueError(
            f"experts are not packed: {len(left_out)} of their linears in {where}, first {left_out[0]!r}. All experts"
            " of a mixture are packed. Remove the rule of `ignore` that names them, or quantize the bf16 model again."
        )
