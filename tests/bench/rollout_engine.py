"""One engine of bench_rollout.py in a process of its own: an engine does not give its memory back.

    python tests/bench/rollout_engine.py JOB.json

writes one JSON object per line to the job's `events`: `engine`, `row`, `skipped` and `profile`, and `done` at last.
Temperature is 1, as in RL. Prefix caching is on, as verl has it (answers of a group share their prompt's cache), and
emptied before each measurement.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import host_time
import rollout_arms
from rollout_load import (
    LENGTHS,
    PROFILE_TOKENS,
    PROFILED_STEPS,
    capture_sizes,
    decode_ms,
    draw_lengths,
    fixed_seconds,
    forget_prompts,
    kv_tokens,
    memory_options,
    profile_seconds,
    realistic_seconds,
    settings,
)
from rollout_worker import modules_of, peak_gib, sample, sampled, waited, watch


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # host time counts; the worker is asked for its state
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm  # noqa: F401  while the engine before this one still measures

    sys.stdin.readline()
    started = time.monotonic()
    job = json.loads(Path(sys.argv[1]).read_text())
    if (runner := rollout_arms.ARMS[job["arm"]].runner) is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
    if job["own_process"]:  # asked for functions, which vLLM sends as they are if it is allowed to
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    engine = Engine(job, started + job["seconds"])
    engine.report("engine", **engine.describe(time.monotonic() - started))
    first = [pair for pair in job["fixed"] if pair[0] == job["fixed"][0][0]]
    for prompt, batch in first:
        engine.fixed(batch, prompt)
    if job["realistic"]:
        engine.realistic(**job["realistic"])
    for batch in job["profile"]:
        engine.profile(batch, job["profile_prompt"])
    for prompt, batch in job["fixed"][len(first) :]:
        engine.fixed(batch, prompt)
    engine.report("done")
    os._exit(0)  # tearing an engine down takes seconds of the GPU and tells nothing


class Engine:
    """A vLLM engine of one arm, and its measurements.

    Args:
        job: As bench_rollout.py writes it.
        deadline: time.monotonic() after which no further measurement is begun.
    """

    def __init__(self, job: dict[str, Any], deadline: float) -> None:
        self._job, self._deadline = job, deadline
        self._arm, self._shape = rollout_arms.ARMS[job["arm"]], rollout_arms.SHAPES[job["model"]]
        lengths = [prompt + job["new_tokens"] for prompt, _ in job["fixed"]]
        if job["realistic"]:
            lengths.append(job["realistic"]["prompt"] + LENGTHS["max"])
        if job["profile"]:
            lengths.append(job["profile_prompt"] + PROFILE_TOKENS)
        self._longest = max(lengths)
        self._llm: Any = self._start()
        self._llm.collective_rpc(watch)
        self._adapter = self._request() if self._arm.lora else None
        cache = self._llm.llm_engine.vllm_config.cache_config
        self._block, self._capacity = cache.block_size, cache.num_gpu_blocks * cache.block_size
        # Loads the adapter, and compiles what a full prefill needs.
        longest = max((prompt for prompt, _ in job["fixed"]), default=256 if self._longest > 256 else 1)
        self._generate(self._prompts(min(16, job["largest"]), longest), 2)

    def _start(self) -> Any:
        import vllm

        from verl_qerl.vllm_plugin import register

        register()  # the entry point does it too, where the package is installed
        rollout_arms.register_dummy_nvfp4()
        return vllm.LLM(**self._options())

    def _options(self) -> dict[str, Any]:
        job, arm = self._job, dict(self._arm.options)
        options: dict[str, Any] = {
            "model": job["folder"],
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_model_len": self._longest + 1,
            "max_num_seqs": job["largest"],
            "enable_prefix_caching": True,
            "enforce_eager": job["eager"],
            "seed": 0,
        }
        if job["log_probs"]:
            options["logprobs_mode"] = "processed_logprobs"
        if not job["eager"]:
            batches = [batch for _, batch in job["fixed"]] + job["profile"]
            sizes = capture_sizes(batches, job["largest"], bool(job["realistic"]), self._arm.has_larger_graphs)
            # Every request has an adapter: graphs without one would double the time that capturing takes.
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes, "cudagraph_specialize_lora": False}
        options["tensor_parallel_size"] = job["tensor_parallel"]
        if job["tensor_parallel"] > 1 or job["own_process"]:
            arm = rollout_arms.in_processes(arm)
        if self._arm.lora:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(8, job["rank"])}
        memory = memory_options(
            self._shape, self._arm.linear_bytes, job["tensor_parallel"], job["largest"], self._longest
        )
        return options | memory | arm

    def _request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, self._job["adapter"])

    def describe(self, seconds: float) -> dict[str, Any]:
        """How the engine runs, for the result file."""
        found = {"startup_s": round(seconds, 1), **settings(self._llm.llm_engine.vllm_config)}
        return found | {"kv_cache_tokens": self._capacity, "modules": self._llm.collective_rpc(modules_of)[0]}

    def report(self, event: str, **data: Any) -> None:
        """Append an event; flushed, since this process may be killed."""
        with open(self._job["events"], "a") as file:
            file.write(json.dumps({"event": event, **data}) + "\n")

    def _prompts(self, batch: int, length: int) -> list[dict[str, list[int]]]:
        source = random.Random(length)
        tokens = range(self._shape.vocabulary - 1)
        return [{"prompt_token_ids": source.choices(tokens, k=length)} for _ in range(batch)]

    def _params(self, new_tokens: int) -> Any:
        from vllm import SamplingParams

        asked = 0 if self._job["log_probs"] else None
        return SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=asked)

    def _generate(self, prompts: list[dict[str, list[int]]], new_tokens: int | list[int]) -> float:
        """Seconds; those in which the host did not wait are `_host_s`. Every request must get all of its tokens."""
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        params = [self._params(length) for length in lengths]
        forget_prompts(self._llm)
        before, _ = self._llm.collective_rpc(waited)[0]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        seconds = time.perf_counter() - began
        after, self._kinds = self._llm.collective_rpc(waited)[0]
        self._host_s = None if after is None else seconds - after + (before or 0.0)
        self._cached = sum(output.num_cached_tokens or 0 for output in outputs)
        if (found := [len(output.outputs[0].token_ids) for output in outputs]) != lengths:
            raise RuntimeError(f"{sum(found)} tokens were generated, {sum(lengths)} were asked for.")
        return seconds

    def _refuses(self, batch: int, prompt: int, context: int | str, tokens: int, seconds: float) -> bool:
        reason, left = None, self._deadline - time.monotonic()
        if tokens > self._capacity:
            reason = f"needs a KV cache of {tokens} tokens, there is room for {self._capacity}"
        elif left < seconds:
            reason = f"takes about {seconds:.0f} s, {max(left, 0):.0f} s are left of the {self._job['seconds']:.0f}"
        if reason:
            self.report("skipped", **self._key(batch, prompt, context), reason=reason)
        return reason is not None

    def _key(self, batch: int, prompt: int, context: int | str) -> dict[str, Any]:
        keys = {name: self._job[name] for name in ("arm", "model", "rank")}
        return keys | {"batch": batch, "prompt": prompt, "context": context}

    def _row(self, batch: int, prompt: int, context: int | str, **measured: float | None) -> None:
        empty = {"decode_ms_per_step": None, "prefill_s": None, "tokens_per_s": None}
        peaks = [peak for peak in self._llm.collective_rpc(peak_gib) if peak is not None]
        empty |= {"peak_gib": max(peaks, default=None), "cached_prompt_tokens": self._cached}
        rounded = {name: float(f"{value:.5g}") for name, value in measured.items() if value is not None}
        self.report("row", row=self._key(batch, prompt, context) | empty | rounded)

    def fixed(self, batch: int, prompt: int) -> None:
        """Prefill and decode of `batch` sequences; `context` of the row is their length at the last step.

        `host_share` is the part of decoding in which the host did not wait for tokens: near 1 the GPU waits for it.
        """
        new = self._job["new_tokens"]
        expected, room = fixed_seconds(self._shape, batch, prompt, new, self._job["repeats"]), prompt + new
        if self._refuses(batch, prompt, room, kv_tokens(batch, room, self._block), expected):
            return
        prompts = self._prompts(batch, prompt)
        # Beyond two full steps of prefill nothing is new but the number of sequences.
        small = batch * prompt <= 32768
        self._generate(prompts if small else self._prompts(batch, 16), 4)
        (one, host_one, _), (many, host_many, kinds) = (self._best(prompts, tokens) for tokens in (1, new))
        step = decode_ms(one, many, new)
        share = None if host_one is None else (host_many - host_one) / (many - one)
        if not small:  # two long prefills differ by more than what decoding takes is to be known to
            step, share = host_time.steady(kinds, batch) or (step, None)
        rates = {"prefill_s": one, "tokens_per_s": batch * new / many}
        self._row(batch, prompt, room, decode_ms_per_step=step, host_share=share, **rates)

    def _best(self, prompts: list[dict[str, list[int]]], new_tokens: int) -> tuple[float, Any, list[dict[str, Any]]]:
        """Of the fastest round: its seconds, those that the host computed, None if not known, and kinds of steps."""
        rounds = ((self._generate(prompts, new_tokens), self._host_s, self._kinds) for _ in range(self._job["repeats"]))
        return min(rounds, key=lambda round: round[0])

    def realistic(self, prompts: int, samples: int, prompt: int) -> None:
        """`samples` answers to each prompt, their lengths from `draw_lengths`; new tokens per second of the whole.

        As many rounds as there is time for, up to the job's `repeats`; the fastest counts.
        """
        batch = prompts * samples
        expected = realistic_seconds(self._shape, batch, prompt, self._job["largest"])
        if self._refuses(batch, prompt, "realistic", 0, expected):
            return
        inputs = [one for one in self._prompts(prompts, prompt) for _ in range(samples)]
        lengths, rounds = draw_lengths(batch), []
        while len(rounds) < self._job["repeats"]:
            if rounds and time.monotonic() + rounds[-1][0] > self._deadline:
                break
            rounds.append((self._generate(inputs, lengths), self._host_s, self._kinds))
            seconds, host, kinds = min(rounds, key=lambda round: round[0])
            share = None if host is None else host / seconds
            self._row(batch, prompt, "realistic", tokens_per_s=sum(lengths) / seconds, host_share=share)
            taken = {"rounds_s": [round(one, 2) for one, _, _ in rounds], "kinds": kinds}
            self.report("steps", steps=self._key(batch, prompt, "realistic") | taken)
        if self._job["functions"]:
            self._llm.collective_rpc(sample)
            self._generate(inputs, lengths)
            taken["functions"] = self._llm.collective_rpc(sampled)[0]
            self.report("steps", steps=self._key(batch, prompt, "realistic") | taken)

    def profile(self, batch: int, prompt: int) -> None:
        """us per decode step of every kernel, and of the host's functions; `wall_us` is the step without a profiler."""
        import torch

        expected = profile_seconds(self._shape, batch, prompt, PROFILE_TOKENS)
        if self._refuses(batch, prompt, "profile", kv_tokens(batch, prompt + PROFILE_TOKENS, self._block), expected):
            return
        engine = self._llm.llm_engine
        params = self._params(PROFILE_TOKENS)
        forget_prompts(self._llm)
        for index, inputs in enumerate(self._prompts(batch, prompt)):
            engine.add_request(f"profile-{batch}-{index}", inputs, params, lora_request=self._adapter)
        while len({output.request_id for output in engine.step()}) < batch:
            if not engine.has_unfinished_requests():
                raise RuntimeError(
                    f"no step decoded all {batch} sequences. Profile a smaller batch or a shorter prompt."
                )
        self._steps(4)
        wall = self._steps(PROFILED_STEPS) / PROFILED_STEPS
        cuda = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            self._steps(PROFILED_STEPS)
        host = {"host_us_per_step": host_time.functions(self._steps, PROFILED_STEPS)}
        outputs: list[Any] = []  # scheduling ahead, a step may give none
        while not outputs and engine.has_unfinished_requests():
            outputs = engine.step()
        lengths = [prompt + len(output.outputs[0].token_ids) for output in outputs] or [prompt]
        while engine.has_unfinished_requests():
            engine.step()
        field = "self_device_time_total" if cuda else "self_cpu_time_total"
        device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
        entries = [entry for entry in profiler.key_averages() if entry.device_type == device]
        times = {entry.key: getattr(entry, field) / PROFILED_STEPS for entry in entries}
        kernels = {name: round(us, 2) for name, us in sorted(times.items(), key=lambda item: -item[1]) if us > 0}
        total = {"steps": PROFILED_STEPS, "wall_us": round(wall * 1e6, 1), "kernels_us": round(sum(times.values()), 1)}
        total["context_tokens"] = round(sum(lengths) / len(lengths)) - PROFILED_STEPS * 3 // 2  # in the middle of it
        self.report("profile", profile=self._key(batch, prompt, "profile") | total | {"us_per_step": kernels} | host)

    def _steps(self, count: int) -> float:
        """Seconds of `count` steps; the device is idle before and after, so that exactly their kernels are seen."""
        began = time.perf_counter()
        for _ in range(count):
            self._llm.llm_engine.step()
        host_time.synchronize()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
