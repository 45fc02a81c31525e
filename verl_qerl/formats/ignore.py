"""Which modules of a model are quantized: the linears inside its layers, but those that `ignore` names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DEFAULT_IGNORE = ("lm_head",)
# The router of a mixture of experts stays in bf16, whatever `ignore` says: an error there sends a token elsewhere.
ROUTER = r"re:.*\.mlp\.gate$"


def ignored_modules(config: dict) -> tuple[str, ...]:
    """The modules that config.json says were left unquantized (`re:` marks a regular expression)."""
    found = config.get("quantization_config") or {}
    named = found.get("ignore") or found.get("exclude_modules") or DEFAULT_IGNORE
    return ignore_rules(named, "ignore in config.json")


def ignore_rules(ignore: Any, what: str = "ignore") -> tuple[str, ...]:
    """`ignore` as a configuration has it; a ValueError, which calls it `what`, if it is no list of names."""
    if not isinstance(ignore, list | tuple) or not all(isinstance(rule, str) for rule in ignore):
        raise ValueError(
            f"no list of modules: {what}={ignore!r}. Accepted are exact names, or `re:` and a regular expression, in a"
            " list. Write it as [lm_head,'re:.*down_proj']."
        )
    return tuple(ignore)


def check_rules(rules: Iterable[str], modules: Iterable[str], where: str) -> None:
    """Require that each rule of `ignore` names a module."""
    modules = set(modules)
    for rule in rules:
        # A model with tied embeddings has no lm_head, one without experts no router.
        if rule not in (*DEFAULT_IGNORE, ROUTER) and not any(is_ignored(module, (rule,)) for module in modules):
            raise ValueError(
                f"nothing is ignored by {rule!r}: no module of {where} matches. An exact module name, or `re:` and a"
                " regular expression from its start, is accepted. Correct or remove it."
            )


def is_ignored(module: str, ignore: Iterable[str]) -> bool:
    """Whether `module` is named in `ignore`: exactly, or by a `re:` regular expression matched from its start.

    Raises:
        ValueError: What follows `re:` is none.
    """
    try:
        return any(re.match(rule[3:], module) if rule.startswith("re:") else rule == module for rule in ignore)
    except re.error as error:
        raise ValueError(
            f"no regular expression: 're:{error.pattern}' of `ignore` ({error}). Exact names, or `re:` and a regular"
            " expression, are accepted. Correct it."
        ) from error


def is_router(module: str) -> bool:
    """Whether a module of this name is the router of a mixture of experts."""
    return is_ignored(module, (ROUTER,))


def is_packed_module(module: str, ignore: Iterable[str]) -> bool:
    """Whether a linear of this name is packed: those inside `...layers.<i>...` but routers; lm_head is outside."""
    return ".layers." in f".{module}." and not is_ignored(module, (ROUTER, *ignore))


def linears_in(shapes: Mapping[str, Sequence[int]], ignore: Iterable[str]) -> dict[str, Sequence[int]]:
    """The linears that are packed, each with the shape [N, K] of its weight; `shapes` has all tensors by name.

    Their weights are matrices. So are those of Cohere's norms of heads, `q_norm` and `k_norm`.
    """
    found = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and not module.endswith("norm") and is_packed_module(module, ignore):
            found[module] = shape
    return found
