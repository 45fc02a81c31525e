"""A tiny model and questions, and a way to run verl's own command on them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

ON_CPU = ("+platform=cpu",)
ON_GPU = (  # sleep mode and attention as verl and we have them; what +platform=cpu sets of processes
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "++ray_kwargs.ray_init.include_dashboard=False",
    "++ray_kwargs.ray_init.object_store_memory=500000000",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("verl", "vllm") if find_spec(name) is None]  # to import them here would take seconds
    for item in items:
        if Path(__file__).parent in item.path.parents:  # with other folders in one command this hook sees theirs too
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.skipif(bool(missing), reason=f"needs {missing}"))


@dataclass(frozen=True)
class Run:
    """One finished run of main_ppo."""

    code: int
    log: str
    steps: list[dict]  # metrics of each training step, in order

    def check(self) -> "Run":
        assert self.code == 0, self.log[-6000:]
        return self


@dataclass(frozen=True)
class Workbench:
    """Inputs of a run."""

    folder: Path
    model: Path
    data: Path
    warm_python: Any  # WarmPython of tests/conftest.py

    def qwen3(self) -> Path:
        """Another model with the same tokenizer, which normalizes the heads of q and k."""
        return self.random("qwen3")

    def random(self, family: str, **sizes: Any) -> Path:
        """A model of another family, or of other sizes, with the same tokenizer."""
        from qerl_testing import random_decoder
        from transformers import AutoConfig

        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
        base = AutoConfig.from_pretrained(self.model)
        copied = {name: getattr(base, name) for name in (*names, "bos_token_id", "eos_token_id", "pad_token_id")}
        folder = self.folder / "-".join((family, *sizes))
        random_decoder(family, **copied | sizes).save_pretrained(folder)
        for file in (*self.model.glob("*token*"), *self.model.glob("*.jinja")):
            shutil.copy(file, folder)
        return folder

    def train(
        self,
        name: str,
        *options: str,
        model: Path | None = None,
        num_ranks: int = 1,
        on_gpu: bool = False,
    ) -> Run:
        """Run `python -m verl.trainer.main_ppo` on the CPU platform; outputs go to a folder of that name.

        On the CPU the driver and what it starts are forks of warm_python.py (test_study_on_cpu.py starts a run of
        ours as users do), and vLLM leaves its sampler uncompiled: fifty seconds of a core, of which nothing is ours.
        """
        out, env, command = self._command(name, options, model, num_ranks, on_gpu)
        for _ in range(2):
            if on_gpu:
                done = subprocess.run(
                    command, env=env, cwd=out, capture_output=True, text=True, timeout=900, check=False
                )
            else:
                done = self.warm_python(*command[1:], env=env, cwd=out, timeout_s=900)
            log = done.stdout + done.stderr
            # verl looks for a free port and listens later: the tests beside these may have taken it by then.
            if "EADDRINUSE" not in log:
                break
        (out / "log").write_text(log)
        return Run(done.returncode, log, self._steps(out))

    def train_until_killed(self, name: str, delay_s: float, last_step: int, *options: str) -> Run:
        """Start a run as `train` does; `delay_s` after its first checkpoint everything it started gets SIGKILL.

        The run may be faster than the one that `delay_s` was measured with: the checkpoint of `last_step` ends it too.
        """
        out, env, command = self._command(name, options, None, 1, False)
        tracker = out / "checkpoints" / "latest_checkpointed_iteration.txt"
        with (out / "killed.log").open("w") as log:
            started = subprocess.Popen(command, env=env, cwd=out, stdout=log, stderr=subprocess.STDOUT)
            try:
                end, first = time.monotonic() + 600, True
                while started.poll() is None and time.monotonic() < end:
                    saved = tracker.read_text() if tracker.exists() else ""  # empty while verl writes it
                    if first and saved:
                        end, first = time.monotonic() + delay_s, False
                    if saved == str(last_step):
                        break
                    time.sleep(0.02)
            finally:
                # The driver, then Ray's processes and the workers below them.
                rest = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
                started.kill()
                for process in rest:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                started.wait()
                psutil.wait_procs(rest, timeout=30)
        return Run(started.returncode, (out / "killed.log").read_text(errors="replace"), self._steps(out))

    def _steps(self, out: Path) -> list[dict]:
        metrics = out / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return [row["data"] for row in rows if "training/global_step" in row["data"]]

    def _command(
        self,
        name: str,
        options: tuple[str, ...],
        model: Path | None,
        num_ranks: int,
        on_gpu: bool,
    ) -> tuple[Path, dict[str, str], list[str]]:
        out = self.folder / name
        out.mkdir(exist_ok=True)
        env = os.environ | {
            "VERL_PLATFORM": "nvidia" if on_gpu else "cpu",
            "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
            "RAY_AUTH_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "0",
        }
        if not on_gpu:
            env |= self.warm_python.quick
        command = [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *self.arguments(out, model, num_ranks),
            *(ON_GPU if on_gpu else ON_CPU),
        ]
        command += options
        return out, env, command

    def arguments(self, out: Path, model: Path | None, num_ranks: int) -> list[str]:
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={self.data / 'train.parquet'}",
            f"data.val_files={self.data / 'test.parquet'}",
            "data.train_batch_size=4",
            "data.max_prompt_length=96",
            "data.max_response_length=16",
            f"actor_rollout_ref.model.path={model or self.model}",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora_alpha=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.optim.lr=1e-2",  # an adapter that did not arrive shows in the log-probs
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.max_model_len=128",
            "actor_rollout_ref.rollout.max_num_seqs=8",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
            f"reward.custom_reward_function.path={self.folder / 'reward.py'}",
            "reward.custom_reward_function.name=compute_score",
            f"trainer.n_gpus_per_node={num_ranks}",
            "trainer.nnodes=1",
            'trainer.logger=["console","file"]',
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.total_training_steps=2",
            "trainer.resume_mode=auto",
            f"trainer.default_local_dir={out / 'checkpoints'}",
        ]


@pytest.fixture(scope="session")
def workbench(warm_python, tmp_path_factory) -> Workbench:
    import torch
    import word_problems
    from chat_tokenizer import train_tokenizer
    from pretrain import Size, build_model

    folder = tmp_path_factory.mktemp("e2e")
    assert word_problems.main(["--out", str(folder / "data"), "--num-train", "64", "--num-test", "8"]) == 0
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    tokenizer = train_tokenizer([row["question"] + row["answer"] for row in rows], 320)
    torch.manual_seed(0)
    size = Size(128, 256, 2, 2, 1, 320, 0.0, 0, None, 0.0, 0)
    model = build_model(size, tokenizer, "cpu").to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    # Depends on the answer even when nothing is ever right, and on all of it: were the two answers to each of a step's
    # questions worth the same, all advantages would be zero.
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return sum(place * ord(letter) for place, letter in enumerate(solution_str, 1)) % 1009 / 1009\n"
    )
    return Workbench(folder, folder / "model", folder / "data", warm_python)
