"""One engine of bench_noise.py in a process of its own: an engine does not give its memory back.

    python tests/bench/noise_engine.py JOB.json

Adds a line to the job's `out` after each setting, until all are measured or the time is over.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import noise_plan
import rollout_load

from verl_qerl.cli.data.rows import read_rows
from verl_qerl.cli.data.schema import MATH_INSTRUCTION, gsm8k_ground_truth
from verl_qerl.cli.eval.answers import boxed, same
from verl_qerl.cli.prompts import load_tokenizer, token_ids

GRAPHS = (1, 2, 4, 8, 16, 32, 64, 96, *range(128, 1025, 64))
is_right = functools.cache(same)


def main() -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # as runs of ours under verl
    job = json.loads(Path(sys.argv[1]).read_text())
    deadline = time.monotonic() + job["seconds"]
    settings = [noise_plan.Setting(**setting) for setting in job["settings"]]
    bench = Bench(job, settings[0])
    longest = 0.0
    for setting in settings:
        if time.monotonic() + longest > deadline:
            print(f"no time is left for {setting} and what comes after it", flush=True)
            break
        began = time.monotonic()
        row = bench.measure(setting)
        longest = max(longest, time.monotonic() - began)
        noise_plan.append_line(Path(job["out"]), row)
        print(json.dumps({name: value for name, value in row.items() if name != "questions"}), flush=True)
    os._exit(0)  # tearing an engine down takes seconds of the GPU and tells nothing


class Bench:
    """An engine, the questions, and what it answers under noise.

    Args:
        job: As bench_noise.py writes it.
        setting: One of those that share the engine.
    """

    def __init__(self, job: dict[str, Any], setting: noise_plan.Setting) -> None:
        from transformers import GenerationConfig

        self._job, self._mode = job, setting.mode
        self._tokenizer = load_tokenizer(job["model"], chats=True)
        rows = read_rows(Path(job["data"]), "questions", job["questions"])
        if len(rows) < job["questions"]:
            raise ValueError(f"{job['data']} has {len(rows)} questions. Ask for at most as many: {job['questions']=}.")
        self._answers = [gsm8k_ground_truth(row["answer"]) for row in rows]
        chats = [[{"role": "user", "content": f"{row['question']} {MATH_INSTRUCTION}"}] for row in rows]
        self._prompts = [token_ids(self._tokenizer, chat) for chat in chats]
        ends = GenerationConfig.from_pretrained(job["model"]).eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        began = time.monotonic()
        self._llm = self._start(setting)
        self._startup = time.monotonic() - began

    def _start(self, setting: noise_plan.Setting) -> Any:
        import torch
        import vllm

        from verl_qerl.vllm_plugin import register

        register()
        job = self._job
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": max(map(len, self._prompts)) + job["max_tokens"] + 1,
            "max_num_seqs": job["sequences"],
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
        }
        if torch.cuda.device_count():
            options["gpu_memory_utilization"] = job["memory"]
            sizes = [size for size in GRAPHS if size <= job["sequences"]]
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        else:
            options["enforce_eager"] = True
        return vllm.LLM(**options, **noise_plan.engine_options(job["model"], setting))

    def measure(self, setting: noise_plan.Setting) -> dict[str, Any]:
        """A row: what was sampled, its KL, and how long that took."""
        began = time.monotonic()
        self._set_noise(setting)
        sampled = self._sample()
        seconds = time.monotonic() - began
        row: dict[str, Any] = {"setting": dataclasses.asdict(setting)}
        row |= {"startup_s": round(self._startup, 1), "sampling_s": round(seconds, 2)}
        row["tokens_per_s"] = round(sum(len(tokens) for tokens, _ in sampled) / seconds)
        row |= self._kl(sampled)
        row["settings_of_vllm"] = rollout_load.settings(self._llm.llm_engine.vllm_config)
        row["seconds"] = round(time.monotonic() - began, 2)
        return row | {"questions": self._score(sampled)}

    def _set_noise(self, setting: noise_plan.Setting) -> None:
        if setting.sigma and setting.mode != self._mode:
            self._llm.collective_rpc("bench_set_mode", args=(setting.mode,))
            self._mode = setting.mode
        # Step 0 has no noise in a run.
        self._llm.collective_rpc("qerl_set_noise", args=(setting.sigma, setting.index + 1))
        rollout_load.forget_prompts(self._llm)

    def _sample(self) -> list[tuple[list[int], list[float]]]:
        """(tokens, log-probs) of every answer; those to one question follow each other."""
        params = self._params(max_tokens=self._job["max_tokens"], logprobs=0, stop_token_ids=self._ends)
        asked = [prompt for prompt in self._prompts for _ in range(self._job["answers"])]
        outputs = self._generate(asked, params)
        found = [(list(output.outputs[0].token_ids), output.outputs[0].logprobs.logprobs) for output in outputs]
        if any(len(tokens) != len(log_probs) for tokens, log_probs in found):
            raise RuntimeError("an answer has not one log-prob for each token.")
        return found

    def _generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        return self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def _params(self, **options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=1.0, detokenize=False, flat_logprobs=True, **options)

    def _kl(self, sampled: list[tuple[list[int], list[float]]]) -> dict[str, Any]:
        """KL(policy with noise || without) a token, by k3 (Schulman 2020) on some of the answers.

        At sigma 0 it is what decoding and scoring differ by.
        """
        self._llm.collective_rpc("qerl_set_noise", args=(0.0, 0))
        rollout_load.forget_prompts(self._llm)
        every = max(1, len(sampled) // self._job["scored"])
        chosen = range(0, len(sampled), every)
        prompts = [self._prompts[i // self._job["answers"]] for i in chosen]
        texts = [prompt + sampled[i][0] for prompt, i in zip(prompts, chosen, strict=True)]
        outputs = self._generate(texts, self._params(max_tokens=1, prompt_logprobs=0))
        k3s = []
        for i, output in zip(chosen, outputs, strict=True):
            noisy, clean = sampled[i][1], output.prompt_logprobs.logprobs[-len(sampled[i][1]) :]
            k3s += [k3(b - a) for a, b in zip(noisy, clean, strict=True)]
        mean = sum(k3s) / len(k3s)
        error = (sum((one - mean) ** 2 for one in k3s) / len(k3s) ** 2) ** 0.5
        return {"kl": mean, "kl_standard_error": error, "kl_tokens": len(k3s)}

    def _score(self, sampled: list[tuple[list[int], list[float]]]) -> dict[str, list[float]]:
        """Of each question, summed over its answers: tokens, -log p, right ones, ones with a box."""
        texts = self._tokenizer.batch_decode([tokens for tokens, _ in sampled], skip_special_tokens=True)
        found: dict[str, list[float]] = {name: [] for name in ("tokens", "minus_log_p", "right", "boxed")}
        for at, wanted in enumerate(self._answers):
            mine = slice(at * self._job["answers"], (at + 1) * self._job["answers"])
            boxes = [box for text in texts[mine] if (box := boxed(text)) is not None]
            found["tokens"].append(sum(len(tokens) for tokens, _ in sampled[mine]))
            found["minus_log_p"].append(round(-sum(sum(log_probs) for _, log_probs in sampled[mine]), 3))
            found["right"].append(sum(is_right(box, wanted) for box in boxes))
            found["boxed"].append(len(boxes))
        return found


def k3(log_ratio: float) -> float:
    """r - 1 - log r; of log p(without noise) - log p(with noise) it is never negative, and its mean is the KL."""
    return math.expm1(log_ratio) - log_ratio


if __name__ == "__main__":
    main()
