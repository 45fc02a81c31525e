"""An engine of vLLM in this process, which answers prompts with weights of our formats and an adapter, without verl."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_qerl.checkpoints.model_config import read_object
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import left_out
from verl_qerl.formats import get_format
from verl_qerl.vllm_plugin import PREFIX, register, version_problem
from verl_qerl.vllm_plugin.options import V2_CHOICE

# What vLLM accepts as max_lora_rank.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ADAPTER_CONFIG = "adapter_config.json"


class Sampled(NamedTuple):
    """One answer.

    Attributes:
        text: Without special tokens.
        cut: It reached the limit of tokens.
        log_probs: One a token, where they were asked for.
    """

    text: str
    tokens: list[int]
    cut: bool
    log_probs: list[float]


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is made.

    Attributes:
        form: Weight format of ours that the linears have or get; None leaves the model, and all kernels, to vLLM.
        scale: Scale choice of a bf16 model that gets it; None for the default.
        ignore: Modules that such a model keeps in bf16; None for the default.
        adapter: PEFT directory, which every answer is given with.
        max_model_len: Tokens of the longest prompt and its answer.
        memory: Share of a GPU's memory; None for vLLM's own.
    """

    model: str
    form: str | None = None
    scale: str | None = None
    ignore: tuple[str, ...] | None = None
    adapter: Path | None = None
    max_model_len: int = 4096
    tensor_parallel: int = 1
    memory: float | None = None
    seed: int = 0


class OfflineEngine:
    """One vLLM engine with our kernels, in this process.

    Raises:
        ValueError: vLLM is missing or of another release, or the adapter's rank is none that vLLM takes.
    """

    def __init__(self, options: EngineOptions) -> None:
        problem = version_problem()
        if problem:
            raise ValueError(problem)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault(V2_CHOICE, "0")  # as runs of ours under verl
        import torch
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        register()
        chosen = engine_options(options)
        if not torch.cuda.device_count():
            chosen["enforce_eager"] = True
        self._engine = LLM(**chosen).llm_engine
        self._lora = LoRARequest("evaluated", 1, str(options.adapter)) if options.adapter else None
        self._requests = 0

    def sample(
        self, prompts: Sequence[Sequence[int]], log_probs: bool = False, **sampling: Any
    ) -> Iterator[tuple[int, list[Sampled]]]:
        """Answers to each prompt, with the adapter where there is one, as they are ready.

        Args:
            prompts: Token ids.
            log_probs: Give those of the answers too, of the model itself, whatever the temperature.
            **sampling: Arguments of vLLM's SamplingParams.

        Yields:
            (number of the prompt, its answers).
        """
        for number, output in self._run(prompts, True, logprobs=0 if log_probs else None, **sampling):
            yield number, [_sampled(one) for one in output.outputs]

    def score(self, tokens: Sequence[int], with_adapter: bool) -> list[float]:
        """Log-prob of every token but the first."""
        ((_, output),) = self._run([tokens], with_adapter, max_tokens=1, prompt_logprobs=0, detokenize=False)
        pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return [found[token].logprob for token, found in pairs]

    def _run(self, prompts: Sequence[Sequence[int]], with_adapter: bool, **sampling: Any) -> Iterator[tuple[int, Any]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        numbers = {}
        for number, prompt in enumerate(prompts):
            numbers[str(self._requests)] = number
            lora = self._lora if with_adapter else None
            self._engine.add_request(str(self._requests), {"prompt_token_ids": list(prompt)}, params, lora_request=lora)
            self._requests += 1
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    yield numbers.pop(output.request_id), output
        if numbers:
            raise RuntimeError(f"vLLM lost {len(numbers)} of {len(prompts)} requests.")


def engine_options(options: EngineOptions) -> dict[str, Any]:
    """Arguments of vllm.LLM.

    Raises:
        ValueError: The adapter's rank is none that vLLM takes, or the model is in another format.
    """
    chosen: dict[str, Any] = {
        "model": options.model,
        "dtype": "bfloat16",
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel,
        "seed": options.seed,
    }
    if options.memory is not None:
        chosen["gpu_memory_utilization"] = options.memory
    if options.form is not None:
        source, form = open_source(options.model), get_format(options.form)
        chosen["load_format"] = chosen["quantization"] = f"{PREFIX}{options.form}"
        chosen["hf_overrides"] = {"quantization_config": form.config(left_out(source, form, options.ignore))}
        chosen["worker_extension_cls"] = "verl_qerl.vllm_plugin.worker.RolloutWorkerExtension"
        if source.format is None:
            given = {"scale": options.scale, "ignore": options.ignore and list(options.ignore)}
            chosen["model_loader_extra_config"] = {name: value for name, value in given.items() if value is not None}
    if options.adapter is not None:
        rank = read_object(options.adapter / ADAPTER_CONFIG, "Export the adapter again.").get("r")
        fitting = [one for one in _RANKS if isinstance(rank, int) and one >= rank > 0]
        if not fitting:
            raise ValueError(
                f"the adapter's rank cannot be served: r={rank!r} in {options.adapter / ADAPTER_CONFIG}. 1 to"
                f" {_RANKS[-1]} is accepted. Merge the adapter into its base."
            )
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}
    return chosen


def _sampled(output: Any) -> Sampled:
    """The sample of one of vLLM's completions."""
    tokens = list(output.token_ids)
    found = output.logprobs or []
    log_probs = [at[token].logprob for token, at in zip(tokens, found, strict=False)]
    return Sampled(output.text, tokens, output.finish_reason == "length", log_probs)
