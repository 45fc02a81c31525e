"""Measures, random inputs and the state of the code, shared by tests of all folders and benchmarks.

Benchmarks find it beside them, pytest by `pythonpath` of pyproject.toml.
"""

import functools
import importlib.util
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.nvfp4 import SCALE_CHOICES

# Options that every run of verl needs.
RUN = (
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
)
# [1, 64], ids below 300: what the models of tests/cli are trained on, and their exports are asked for.
TOKENS = torch.tensor([[(7 * i) % 300 for i in range(64)]])
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def rms_error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN in `actual` gives NaN."""
    expected = expected.double()
    norm = expected.norm()
    error = (actual.double() - expected).norm()
    return float(error / norm) if norm > 0 else float(error)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ratio: float) -> None:
    """Assert that the RMS error is at most `ratio` of the RMS of `expected` (scale free; NaN never passes).

    Raises:
        AssertionError: Shapes differ or the error is larger.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    found = rms_error_ratio(actual, expected)
    assert found <= ratio, f"RMS error ratio {found:.3e} > {ratio:.3e}"


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    ratio = rms_error_ratio(actual, expected)
    return math.inf if ratio == 0 else -20 * math.log10(ratio)


def foreach_copy_as_cuda(there: Any, sources: Any, non_blocking: bool = False) -> None:
    """`torch._foreach_copy_`, with which FSDP2 gathers, as its CUDA kernel copies: bf16 through float32.

    Bits of a NaN become 0x7fff. Arguments as torch's.
    """
    for to, source in zip(there, sources, strict=True):
        to.copy_(source, non_blocking)
        if to.dtype == source.dtype == torch.bfloat16:
            to.view(torch.int16).masked_fill_(to.isnan(), 0x7FFF)


def quantize(weight: torch.Tensor, scale: str = SCALE_CHOICES[0]) -> PackedWeight:
    """One weight in NVFP4, with a choice of its block scales."""
    return NVFP4(scale=scale).quantize(weight)


def quantize_group(weights: Mapping[str, torch.Tensor], scale: str = SCALE_CHOICES[0]) -> dict[str, PackedWeight]:
    """The same of weights with a common global scale."""
    return NVFP4(scale=scale).quantize_group(weights)


def random_packed_weight(N: int, K: int, seed: int = 0, device: str | torch.device = "cpu") -> PackedWeight:
    """A Gaussian weight of standard deviation 0.02, quantized."""
    generator = torch.Generator().manual_seed(seed)
    return quantize((torch.randn(N, K, generator=generator) * 0.02).to(device))


def random_qwen2(seed: int = 0, gain: float = 1.0, **sizes: Any) -> Any:
    """`random_decoder` of Qwen2."""
    return random_decoder("qwen2", seed, gain, **sizes)


def random_decoder(family: str, seed: int = 0, gain: float = 1.0, **sizes: Any) -> Any:
    """A bf16 model of transformers without experts: two layers of two heads, embeddings that are not tied.

    Args:
        family: A `model_type` of config.json.
        gain: Matrices are multiplied by it: with 3, log-probs are far from uniform.
        sizes: What is otherwise in its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = _TINY | sizes
    if family == "qwen3":  # whose heads have 128 columns otherwise
        sizes = {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]} | sizes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(gain)
    return model


def random_qwen3_moe(seed: int = 0, **sizes: Any) -> Any:
    """A bf16 Qwen3-MoE of transformers: a dense layer and one of four experts, two of which see a token.

    Args:
        sizes: What is otherwise in its configuration.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    defaults = {
        "moe_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "head_dim": 64,
        "norm_topk_prob": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_TINY | defaults | sizes)).bfloat16().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that log-probs are far from uniform, and experts from each other
    return model


def draw_adapter(model: Any, seed: int, dtype: torch.dtype | None = None) -> None:
    """Fill A and B of all LoRA layers as if trained, with bf16 numbers; None keeps the dtype of each."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator).mul(0.05).bfloat16()
            parameter.data = values.to(dtype or parameter.dtype)


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of every token of `ids` [1, N] but the first: [N - 1], in float64 of the model's logits."""
    found = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    return found.gather(1, ids[0, 1:, None]).squeeze(1)


def float32_norms(worker: Any) -> dict[str, torch.Tensor]:
    """Name -> weight, on the CPU, of the norms that a vLLM worker holds in float32: with noise, or trained."""
    weights = worker.model_runner.get_model().named_parameters()
    found = {name: weight for name, weight in weights if "norm" in name and weight.dtype == torch.float32}
    return {name.removesuffix(".weight"): weight.detach().cpu().clone() for name, weight in found.items()}


def set_linear(model: Any, module: str, weight: torch.Tensor) -> None:
    """Give a transformers model, which stacks experts, the dense weight of a linear by its name in a checkpoint."""
    parent, of_expert, linear = module.partition(".experts.")
    if not of_expert:
        model.get_submodule(module).weight.data = weight
        return
    expert, _, leaf = linear.partition(".")
    experts = model.get_submodule(f"{parent}.experts")
    stack = experts.down_proj if leaf == "down_proj" else experts.gate_up_proj
    rows = {"gate_proj": slice(None, len(weight)), "up_proj": slice(len(weight), None), "down_proj": slice(None)}[leaf]
    stack.data[int(expert), rows] = weight


def run_config(*overrides: str) -> Any:
    """The configuration of a run with these options, beside those that every run needs."""
    return verl_config(*RUN, *overrides)


def verl_config(*overrides: str) -> Any:
    """What Hydra makes of a command line of verl's `main_ppo`, in a process that knows ACR, as those of a run do.

    Its files, which take half a second, are read once for each choice of groups. Hydra's own code applies the other
    overrides to a copy.
    """
    _parse_once()
    from hydra import initialize_config_module
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    from verl_qerl.verl_plugin.trainer import policy_loss

    policy_loss.install(core_algos)
    with initialize_config_module("verl.trainer.config", version_base=None):
        loader = GlobalHydra.instance().config_loader()
        groups, others = [], []
        for override in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
            name = override.key_or_group
            is_group = name.startswith("hydra.") or loader.repository.group_exists(name)
            (groups if is_group else others).append(override)
        config = pickle.loads(_of_groups(*(group.input_line for group in groups)))
        OmegaConf.set_struct(config, True)
        ConfigLoaderImpl._apply_overrides_to_config(others, config)
        return config


@functools.cache
def _of_groups(*overrides: str) -> bytes:
    from hydra import compose

    # Pickled: copy.deepcopy takes ten times as long as to read it.
    return pickle.dumps(compose("ppo_trainer", overrides=list(overrides)))


@functools.cache
def _parse_once() -> None:
    """Have OmegaConf keep what it parsed: a look at every value of a configuration parses the same texts again.

    They are two thirds of the time of such a look. What is kept is the form of a text, not its value.
    """
    from omegaconf import base

    base.parse = functools.cache(base.parse)


def flat(node: Any, resolve: bool = True, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a configuration, interpolations resolved or as they are written."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=resolve)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items()]
    return {key: value for path, child in items for key, value in flat(child, resolve, path).items()}


def current_commit() -> str:
    """What a result file names: QERL_COMMIT where it is set (a copy of the tree is measured), else git's short hash."""
    named = os.environ.get("QERL_COMMIT")
    if named:
        return named
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Compared(NamedTuple):
    """Greedy answers of two engines beside each other.

    Attributes:
        differences: Of log-probs, up to the first token of an answer that differs: two of random weights nearly as
            probable, and what follows is another text.
        agreed: Share of these tokens that are the same.
    """

    differences: list[float]
    agreed: float


def compare_greedy(
    answers: Iterable[Sequence[tuple[int, float]]], others: Iterable[Sequence[tuple[int, float]]]
) -> Compared:
    """What two engines answered to the same prompts.

    Args:
        answers: Tokens of each, with their log-probs.
        others: The other engine's, as many and of the same lengths.
    """
    differences, agreed = [], 0
    for one, other in zip(answers, others, strict=True):
        for (token, log_prob), (its_token, its_log_prob) in zip(one, other, strict=True):
            differences.append(abs(log_prob - its_log_prob))
            if token != its_token:
                break
            agreed += 1
    return Compared(differences, agreed / len(differences))


def answer_of(script: Path, argument: Any, **env: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """What a script prints as JSON behind `RESULT `, started with JSON as its argument; and its process."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env, command = os.environ | {"PYTHONPATH": path} | env, [sys.executable, str(script), json.dumps(argument)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(lines[0].removeprefix("RESULT ")), done


def load_beside(file: str, name: str) -> Any:
    """The module `name` in the folder of `file`, a benchmark or its test, which are in no package.

    Raises:
        FileNotFoundError: There is no such file.
    """
    spec = importlib.util.spec_from_file_location(name, Path(file).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
