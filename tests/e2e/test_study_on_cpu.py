"""recipes/study/run.py with verl itself: what it asks verl to write is there, and its reward is what verl uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

STUDY = Path(__file__).resolve().parents[2] / "recipes" / "study"
ON_CPU = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import run; run.visible_gpus = lambda: {'0': 'CPU'}; run.main()"
)
SMALL = [
    "+platform=cpu",
    "data.train_batch_size=4",
    "data.max_prompt_length=96",
    "data.filter_overlong_prompts=False",  # the small tokenizer makes more of them
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.model.use_liger=False",  # kernels for GPUs
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "ray_kwargs.ray_init.num_cpus=32",
    "++ray_kwargs.ray_init.object_store_memory=500000000",
]


def test_a_run_leaves_its_steps_its_groups_and_its_answers_to_the_test_questions(workbench, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "gsm8k").symlink_to(workbench.data)
    env = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    places = ["--model", workbench.model, "--data", data, "--out", tmp_path / "out", "--work", tmp_path / "work"]
    asked = ["--arms", "nvfp4_aqn", "--steps", "2", "--minutes", "12", "--samples", "2", "--tag", "small", "--"]
    command = [sys.executable, "-c", ON_CPU, STUDY, *places, "--earlier", tmp_path / "out", *asked, *SMALL]
    subprocess.run([str(part) for part in command], env=os.environ | env, check=True, timeout=900)
    (file,) = (tmp_path / "out").glob("*.json")
    content = json.loads(file.read_text())
    run = content["runs"]["nvfp4_aqn.small-gsm8k-seed1"]
    assert (run["state"], run["metrics"]["step"]) == ("done", [1, 2]), run.get("error")
    expected = {"critic/score/mean", "actor/entropy", "rollout_corr/rollout_log_ppl", "qerl/rollout_kl_k3", "aqn/sigma"}
    expected |= {"timing_s/step", "timing_s/gen", "response_length/mean"}
    expected |= {"study/form", "study/all_right", "study/all_wrong"}
    for key in expected:
        assert None not in run["metrics"][key], key
    # Of random weights, but by chance the last number of a text is the answer now and then.
    reward, all_wrong = run["metrics"]["critic/score/mean"], run["metrics"]["study/all_wrong"]
    assert [share == 1 for share in all_wrong] == [mean == 0 for mean in reward]
    right = run["validation"]["2"].pop("right")
    assert run["validation"] == {"2": {"samples": 2, "form": 0.0, "boxed_right": None}}
    assert len(right) == 8
    pass1 = sum(map(int, right)) / 16
    assert run["metrics"]["val-core/openai/gsm8k/acc/mean@1"] == [None, pass1]
    assert max(*reward, pass1) < 0.5
