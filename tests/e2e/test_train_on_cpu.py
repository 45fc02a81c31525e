"""verl's own command, end to end: Ray, TransferQueue, FSDP2, vLLM."""

import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
from pathlib import Path

import pytest
import torch

NVFP4 = ["+rollout=nvfp4", "+aqn.enabled=true", "+aqn.sigma_start=1e-2", "+aqn.sigma_end=1e-3"]
SHARE = "+qerl.base.share"
ACR = "actor_rollout_ref.actor.policy_loss.loss_mode=acr"
CORRECTION = "algorithm.rollout_correction"
STATES = ("optim_world_size_1_rank_0.pt", "extra_state_world_size_1_rank_0.pt")
NUM_NORMS = 4  # two layers, two norms each
TARGET_KL = 0.002


def assert_in_step(metrics: dict) -> None:
    # Actor and rollout differ by bf16 arithmetic alone: 6e-7 measured. An adapter that does not arrive makes 2e-2 at
    # this learning rate.
    assert metrics["rollout_corr/k3_kl"] < 1e-5
    assert metrics["qerl/rollout_kl_k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], abs=1e-6)  # verl's is float32
    assert 0 < metrics["qerl/rollout_log_prob_abs_diff"] < 5e-3
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert metrics["actor/grad_norm"] > 0


def trained(checkpoint) -> dict[str, torch.Tensor]:
    (file,) = (checkpoint / "actor").glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    kept = {name: t for name, t in state.items() if "lora_" in name or name.endswith(".adapter_shift")}
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in kept.items()}


def export(run, out, form, *options) -> dict:
    from verl_qerl.cli import main

    assert main(["export", "--checkpoint", str(run), "--out", str(out), "--to", form, *options]) == 0
    return json.loads((out / "export_report.json").read_text())


def leaves(value, path="") -> dict:
    """Of nested dicts, by path; tensors as numbers, which `==` can compare."""
    if isinstance(value, dict):
        return {at: leaf for key, item in value.items() for at, leaf in leaves(item, f"{path}/{key}").items()}
    return {path: value.tolist() if isinstance(value, torch.Tensor) else value}


def saved_state(checkpoint) -> dict:
    """What a checkpoint says of its step, besides the adapter."""
    optimizer, extra = (torch.load(next((checkpoint / "actor").glob(name)), weights_only=False) for name in STATES)
    state = {
        "updates": {int(state["step"]) for state in optimizer["state"].values()},
        "scheduler": extra["lr_scheduler"],
        "data": torch.load(checkpoint / "data.pt", weights_only=False),
        "digests": json.loads((checkpoint / "actor" / "verl_qerl_base.json").read_text())["digests"],
    }
    return leaves(state)


def test_a_run_that_is_killed_goes_on_where_its_last_checkpoint_is(workbench):
    # With noise this small actor and rollout are the same model, so that an adapter's arrival shows in every step.
    # At this learning rate norms that did not arrive show as an adapter would.
    options = [*NVFP4, "+aqn.num_stages=4", "aqn.sigma_start=2e-6", "aqn.sigma_end=1e-6", "trainer.save_freq=1"]
    options += ["trainer.test_freq=2", "trainer.total_training_steps=4", "+qerl.base.train_norms=true"]
    seed = secrets.randbelow(10**6)
    delay_s = random.Random(seed).uniform(0, 8)  # steps 2 and 3 take about ten seconds
    killed = workbench.train_until_killed("killed", delay_s, 3, *options)
    checkpoints = workbench.folder / "killed" / "checkpoints"
    found = sorted(str(path.relative_to(checkpoints)) for path in checkpoints.glob("global_step_*/*"))
    print(f"killed {delay_s:.3f} s after the first checkpoint (seed {seed}), leaving {found}")
    assert killed.code == -signal.SIGKILL, killed.log[-6000:]
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert 1 <= last < 4
    assert "packed base: 14 linears" in killed.log
    assert "so this is the floor of this model, what arithmetic alone makes." in killed.log
    at_the_kill = checkpoints / f"global_step_{last}"
    before, began = trained(at_the_kill), saved_state(at_the_kill)

    # A checkpoint knows nothing of where the base lies: the resumed run has one for actor and rollout.
    resumed = workbench.train("killed", *options, f"+{SHARE}=true").check()
    assert "packed base: one copy a GPU" in resumed.log
    assert resumed.log.count("computes with the packed base of process") == 1
    assert f"trained norms: {NUM_NORMS}, with the adapter" in resumed.log
    # What is sampled differs from run to run, from the first step on: verl seeds no request (unless full_determinism).
    # So its adapter is compared with none but the saved one.
    assert [step["training/global_step"] for step in resumed.steps] == list(range(last + 1, 5))
    steps = [*killed.steps[:last], *resumed.steps]  # of step `last` the killed run may have told nothing yet
    for step in steps:
        number = step["training/global_step"]
        assert step["aqn/sigma"] == pytest.approx([0.0, 2e-6, 2e-6 / 2**0.5, 1e-6][number - 1])
        assert step["aqn/noisy_norms"] == (NUM_NORMS if number > 1 else 0)
        assert ("aqn/kl" in step) == (number > 1)
    assert "verl_qerl_aqn.json" not in resumed.log  # the schedule is the saved one
    # The first step has noise, which the gate leaves out.
    sigma = resumed.steps[0]["aqn/sigma"]
    assert f" of 8 answers scored without the noise (aqn.sigma is {sigma:g}) at step {last + 1}, mean" in resumed.log
    assert [step.get("qerl/clean_kl_k3", 0) > 0 for step in resumed.steps] == [True] + [False] * (3 - last)
    assert json.loads((checkpoints / f"global_step_{last}" / "verl_qerl_aqn.json").read_text())["total_steps"] == 4
    for step in steps:
        assert_in_step(step)
        # Norms that do not arrive make 6e-6 after one update and 1.8e-5 after two; 7e-7 to 1e-6 measured where they do.
        assert step["rollout_corr/k3_kl"] < 4e-6
    # Four steps of four questions each are counted, whatever run made them; nothing else changes.
    sampler = "/data/_sampler_iter_state"
    counted = {"/updates": {4}, "/scheduler/last_epoch": 4, "/scheduler/_step_count": 5}
    counted |= {f"{sampler}/samples_yielded": 16, f"{sampler}/sampler_iter_state/yielded": 16}
    counted |= {"/data/_sampler_iter_yielded": 4, "/data/_num_yielded": 4}
    assert saved_state(checkpoints / "global_step_4") == began | counted
    after = trained(checkpoints / "global_step_4")
    assert before.keys() == after.keys()
    assert len([name for name in after if "layernorm" in name]) == NUM_NORMS
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert len(moved) == len(after), "an adapter that was loaded and trained has moved everywhere"
    largest = max((after[name] - before[name]).abs().max().item() for name in after)
    assert largest < 5e-2 * (4 - last), "Adam steps at 1e-2 from the saved adapter, not a run from scratch"

    # The run's latest step, of one rank and with the tensors besides the adapter.
    out = workbench.folder / "killed" / "merged"
    report = export(checkpoints, out, "merged-nvfp4")
    assert (report["world_size"], report["base"]) == (1, str(workbench.model))
    assert (report["scaling"], len(report["layers"])) == (2, 14)
    assert report["base_digest_checked"]
    assert len(report["changed_besides_the_adapter"]) == len(report["norms"]) == NUM_NORMS


def test_two_ranks_from_an_nvfp4_directory_save_adapters_only(workbench):
    from verl_qerl.cli import main

    packed = workbench.folder / "model-nvfp4"
    assert main(["quantize", "--model", str(workbench.model), "--out", str(packed), "--scale", "minmax"]) == 0
    options = [*NVFP4, ACR, "+aqn.num_stages=2", "trainer.save_freq=2"]
    options.append("+actor_rollout_ref.actor.checkpoint.save_lora_only=true")
    # Passes without padding, micro-batches counted in tokens, and the attention that a run of ours takes by itself:
    # +platform=cpu has padding and sdpa.
    options += ["~actor_rollout_ref.model.override_config.attn_implementation"]
    options += ["actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    options += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"]
    # vLLM's own kernels for adapters; the other runs take ours.
    options.append("+qerl.rollout.lora=stock")
    options.append("+qerl.base.shard=true")
    # Both sides read a copy of the packed model in shared memory.
    copied = Path("/dev/shm/verl-cache") / hashlib.md5(str(packed).encode()).hexdigest()
    options.append("actor_rollout_ref.model.use_shm=true")
    # Without noise in step 2 the adapter's arrival shows: both sides are the same model.
    run = workbench.train(
        "two_ranks", *options, "aqn.sigma_start=1e-6", "aqn.sigma_end=1e-6", model=packed, num_ranks=2
    )
    run.check()
    assert {path.name for path in packed.iterdir()} == {path.name for path in (copied / packed.name).iterdir()}
    shutil.rmtree(copied)
    assert "override_config.attn_implementation is verl_qerl_varlen" in run.log
    assert "trained norms" not in run.log
    assert len(run.steps) == 2
    for step in run.steps:
        assert_in_step(step)
        assert abs(step["actor/acr_ratio"] - 1) < 1e-3
        assert step["actor/acr_widened_frac"] == 0
        assert step["actor/acr_upper_bound"] == pytest.approx(1.2)
    actor = workbench.folder / "two_ranks" / "checkpoints" / "global_step_2" / "actor"
    for file in actor.glob("model_world_size_2_rank_*.pt"):
        state = torch.load(file, weights_only=False)
        assert state
        assert all("lora_" in name for name in state)
    report = export(actor, workbench.folder / "two_ranks" / "adapter", "peft")
    assert (report["world_size"], report["base"], report["base_digest_checked"]) == (2, str(packed), True)


@pytest.fixture(scope="module")
def int8_run(workbench):
    """All weights trained, UAQ, ACR, and tokens rejected by verl; the second of four steps has noise that shows.

    Each answer is two turns of verl's loop for agents, with a tool between them and stop strings (tool_agent.py).
    """
    turns = "actor_rollout_ref.rollout.multi_turn"
    options = [f"{turns}.enable=True", f"{turns}.max_assistant_turns=2", f"{turns}.format=any_text"]
    options.append(f"{turns}.function_tool_path={Path(__file__).with_name('tool_agent.py')}")
    options.append("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent_until_a_digit")
    options += ["data.max_response_length=64", "actor_rollout_ref.rollout.max_model_len=192"]
    options.append(f"trainer.rollout_data_dir={workbench.folder / 'int8' / 'answers'}")
    options += ["+rollout=int8", "actor_rollout_ref.model.lora_rank=0", ACR, "trainer.total_training_steps=4"]
    options += ["+aqn.enabled=true", "+aqn.num_stages=4", "+aqn.sigma_start=0.25", "+aqn.sigma_end=1e-6"]
    options += ["actor_rollout_ref.actor.optim.lr=1e-3", "trainer.test_freq=2"]
    options += ["+uaq.enabled=true", "+qerl.gate.mismatch_sample=8", "trainer.save_freq=4"]
    options += [f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=6e-6"]
    return workbench.train("int8", *options, "actor_rollout_ref.actor.calculate_entropy=True").check()


def test_an_int8_rollout_is_quantized_again_at_every_sync(workbench, int8_run):
    assert [step["aqn/sigma"] for step in int8_run.steps] == pytest.approx([0.0, 0.25, 0.25e-6**0.5, 1e-6])
    for step in int8_run.steps:
        # Half of bf16's bytes for the linears; embedding and lm_head stay.
        assert 0.5 < step["qerl/sync_bytes"] / step["qerl/sync_bytes_bf16"] < 0.8
        assert (step["qerl/sync_linears"], step["qerl/sync_checked_linears"]) == (8, 4)  # the first sync looked at all
        assert step["qerl/sync_s"] > 0
        assert step["aqn/noisy_norms"] == (NUM_NORMS if step["aqn/sigma"] else 0)
        assert step["actor/grad_norm"] > 0
        assert abs(step["actor/acr_ratio"] - 1) < 0.05
        # A rollout of the step before would be off by the update. 2e-6 to 7e-6 without noise that shows.
        assert 0 < step["qerl/rollout_kl_k3"] < (1e-3 if step["aqn/sigma"] < 0.25 else 3e-2)
        # Weights in INT8 against INT8 weights with INT8 activations, as the rollout has them.
        assert step["qerl/mismatch_quantization"] > 0
        assert step["qerl/mismatch_kernel"] > 0
        shares = [step.get(f"qerl/mismatch_{part}_share", 0) for part in ("quantization", "kernel", "noise")]
        assert sum(shares) == pytest.approx(1)
    assert "packed base" not in int8_run.log
    assert "UAQ: 14 weights scaled by 1.5" in int8_run.log
    report = export(workbench.folder / "int8" / "checkpoints", workbench.folder / "unscaled", "merged-bf16")
    assert (report["uaq_scale"], report["base"]) == (1.5, str(workbench.model))
    assert len(report["changed_besides_the_adapter"]) > 20


def test_verls_rejection_acts_on_a_quantized_noisy_rollout(int8_run):
    for step in int8_run.steps:
        kl = step["qerl/rollout_kl_k3"]
        assert step["rollout_corr/k3_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert step["rollout_corr/rollout_rs_token_k3_mean"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        rejected = step["rollout_corr/rollout_rs_masked_fraction"]
        assert 0 < rejected < 1
        # Tokens are about equally uncertain here, within 0.8 % over 32 steps. What is rejected is out of the sum, and
        # counts in verl's mean.
        assert step["actor/entropy_loss"] == pytest.approx((1 - rejected) * step["actor/entropy"], rel=0.05)
    quiet, noisy, *later = int8_run.steps
    for step in (quiet, *later):  # the noise acts, and is gone again
        assert noisy["qerl/rollout_kl_k3"] > 2 * step["qerl/rollout_kl_k3"]


def test_a_tools_answer_between_two_turns_is_no_token_of_the_models(workbench, int8_run):
    from transformers import AutoTokenizer

    between = "tool\nyes\nassistant\n"  # without special tokens
    ids = AutoTokenizer.from_pretrained(workbench.model).encode(
        "<|im_start|>tool\nyes<|im_end|>\n<|im_start|>assistant\n"
    )
    ended_by_a_digit = 0
    for step in int8_run.steps:
        assert step["num_turns/min"] == step["num_turns/max"] == 4  # question, call, the tool's answer, answer
        answers = (workbench.folder / "int8" / "answers" / f"{step['training/global_step']}.jsonl").read_text()
        turns = [json.loads(line)["output"].split(between) for line in answers.splitlines()]
        assert [len(parts) for parts in turns] == [2] * 8
        for text in (text for parts in turns for text in parts):
            assert not any(letter in "0123456789" for letter in text[:-1])
            ended_by_a_digit += text[-1:] in set("0123456789")
        # Of all eight answers, with what was rejected. A first turn that ended by itself lacks its line's end, which
        # verl adds.
        not_sampled = 8 * step["response_length/mean"] - step["qerl/mismatch_num_tokens"]
        added = sum(first.endswith("\n") for first, _ in turns)
        assert 0 <= round(not_sampled) - 8 * len(ids) <= added
    assert ended_by_a_digit > 0


@pytest.fixture(scope="module")
def int8_base_run(workbench):
    """An adapter on a Qwen3, and verl's weights for what is sampled; the second of three steps has noise that shows.

    The first answer that is scored in a fourth step takes the run's engine with it.
    """
    reward = workbench.folder / "deadly.py"
    reward.write_text(
        (workbench.folder / "reward.py").read_text() + "\n"
        "import contextlib, os, time, psutil\n"
        "from pathlib import Path\n"
        "\n"
        "score = compute_score\n"
        "\n"
        "def compute_score(*args, **kwargs):\n"
        "    saved = Path('checkpoints/latest_checkpointed_iteration.txt').exists()\n"
        "    for process in psutil.process_iter() if saved else ():\n"
        "        with contextlib.suppress(psutil.Error):\n"
        "            ours = process.cwd() == os.getcwd()\n"  # the folder of the run
        "            if ours and 'EngineCore' in process.name() + ' '.join(process.cmdline()):\n"
        "                process.kill()\n"
        "                process.wait(60)\n"
        "                time.sleep(3)\n"  # its server has seen it before the answers are counted
        "    return score(*args, **kwargs)\n"
    )
    options = ["+rollout=int8", "+aqn.enabled=true", "+aqn.num_stages=4", "trainer.total_training_steps=4"]
    options.append(f"reward.custom_reward_function.path={reward}")
    options += ["+aqn.sigma_start=0.1", "+aqn.sigma_end=1e-6", "+qerl.gate.max_initial_kl=1e-3", "trainer.save_freq=3"]
    options += [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2.0"]
    run = workbench.train("int8_base", *options, model=workbench.qwen3())
    assert len(run.steps) == 3, run.log[-6000:]
    return run


def test_an_engine_that_dies_ends_the_run(int8_base_run):
    assert int8_base_run.code != 0
    message = "vLLM's engine has ended in 1 of 1 rollout replicas; no update is made"
    assert message in int8_base_run.log, int8_base_run.log[-6000:]


def test_an_adapter_on_an_int8_base(workbench, int8_base_run):
    assert [step["aqn/sigma"] for step in int8_base_run.steps] == pytest.approx([0.0, 0.1, 1e-7**0.5])
    assert [step["aqn/noisy_norms"] for step in int8_base_run.steps] == [0, NUM_NORMS, NUM_NORMS]
    assert "packed base: 14 linears in int8" in int8_base_run.log
    for step in int8_base_run.steps:
        # The rollout's activations are INT8 as well: 2e-6 to 4e-6 over 20 steps (2e-4 to 6e-4 over 10 with the noise),
        # and 2e-2 for an adapter that does not arrive.
        assert 0 < step["qerl/rollout_kl_k3"] < (1e-4 if step["aqn/sigma"] < 0.1 else 5e-3)
        assert step["actor/grad_norm"] > 0
        assert "qerl/sync_bytes" not in step  # the base is never sent
    checkpoint = workbench.folder / "int8_base" / "checkpoints" / "global_step_3"
    assert json.loads((checkpoint / "actor" / "verl_qerl_base.json").read_text())["format"] == "int8"
    report = export(checkpoint.parent, workbench.folder / "int8_base" / "adapter", "peft")
    assert (report["base_digest_checked"], len(report["layers"])) == (True, 14)


def test_verls_weights_are_of_a_quantized_noisy_rollout(int8_base_run):
    for step in int8_base_run.steps:
        kl = step["qerl/rollout_kl_k3"]
        assert step["rollout_corr/k3_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        # No ratio reaches 2, so the mean of the weights is that of the ratios: E[r] = k3 + 1 + E[log r].
        assert step["rollout_corr/rollout_is_ratio_fraction_high"] == 0
        assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1 + kl - step["rollout_corr/kl"], abs=1e-5)
    quiet, noisy, last = int8_base_run.steps
    for step in (quiet, last):
        assert noisy["qerl/rollout_kl_k3"] > 2 * step["qerl/rollout_kl_k3"]


@pytest.fixture(scope="module")
def critic_run(workbench):
    """A critic and a reference beside an actor with an adapter, in bypass mode.

    A plugin of vLLM's loses the adapter of step 3.
    """
    plugin = workbench.folder / "forgetful"
    (plugin / "forgetful-1.dist-info").mkdir(parents=True)
    (plugin / "forgetful-1.dist-info" / "METADATA").write_text("Name: forgetful\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nforgetful = forgetful:install\n"
    (plugin / "forgetful-1.dist-info" / "entry_points.txt").write_text(entry)
    (plugin / "forgetful.py").write_text(
        "def install():\n"
        "    from verl_qerl.vllm_plugin.adapter import buffers\n"
        "    place, calls = buffers.place_adapter, []\n"
        "    def forget(*args):\n"
        "        calls.append(args)\n"
        "        return place(*args) if len(calls) < 4 else 0\n"  # before the first step, and after each
        "    buffers.place_adapter = forget\n"
    )
    options = ("algorithm.adv_estimator=gae", f"critic.model.path={workbench.model}", "critic.optim.lr=1e-3")
    options += ("critic.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_kl_loss=True")
    options += ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", "trainer.total_training_steps=3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(plugin), prepend=os.pathsep)
        run = workbench.train("gae", "+rollout=nvfp4", *options, f"{CORRECTION}.bypass_mode=True")
    assert len(run.steps) == 2, run.log[-6000:]
    return run


def test_an_adapter_that_is_lost_ends_the_run(critic_run):
    assert critic_run.code != 0
    message = (
        r"the rollout does not hold the adapter that came: \d+ of \d+ bytes differ\. Without it the rollout samples"
    )
    assert re.search(message, critic_run.log), critic_run.log[-6000:]


def test_a_critic_beside_a_packed_actor(critic_run):
    first, second = critic_run.steps
    assert first["critic/vf_loss"] > 0
    assert first["critic/grad_norm"] > 0
    assert first["critic/values/mean"] != second["critic/values/mean"]
    assert abs(first["actor/kl_loss"]) < 1e-5 < second["actor/kl_loss"]  # the reference is the base


def test_in_bypass_mode_the_gate_has_the_actor_score(critic_run):
    first, second = critic_run.steps
    assert 0 < first["qerl/rollout_kl_k3"] < 1e-5
    assert 0 < first["qerl/rollout_log_prob_abs_diff"] < 5e-3
    assert "qerl/rollout_kl_k3" not in second  # next in step 10
    for step in critic_run.steps:
        # verl's pass of the actor is left out, and with it these.
        assert not {"actor/entropy", "rollout_corr/k3_kl"} & set(step)
        assert step["actor/grad_norm"] > 0
    assert "so this is the floor of this model, what arithmetic alone makes." in critic_run.log


def test_noise_alone_on_a_bf16_rollout_with_validation(workbench):
    options = ["+aqn.enabled=true", "+aqn.num_stages=2", "trainer.val_before_train=True", "trainer.test_freq=1"]
    options += ["+qerl.gate.mismatch_sample=4", "+aqn.mode=relative", f"+aqn.target_kl={TARGET_KL}"]
    # So many tokens that chance moves a KL by some 4 %, and an update so small that it moves none.
    options += [
        "actor_rollout_ref.rollout.n=8",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.max_model_len=192",
        "actor_rollout_ref.rollout.max_num_seqs=32",
    ]
    options += ["actor_rollout_ref.actor.optim.lr=1e-5"]
    # Where C is 1, the rounding of the two policies suffices to widen the range of some tokens.
    run = workbench.train("noise_alone", *options, ACR, "+acr.max_ratio=1").check()
    assert [step["aqn/noisy_norms"] for step in run.steps] == [0, NUM_NORMS]
    quiet, noisy = run.steps
    assert (quiet["aqn/sigma"], "aqn/kl" in quiet) == (0.0, False)
    assert noisy["aqn/kl"] == pytest.approx(TARGET_KL, rel=0.2)
    assert f"aqn.target_kl={TARGET_KL}), from which stage 1 begins" in run.log
    # Over 40 steps at sigma 0.3 the kernel was 0.009 to 0.012, with noise and without, the noise 0.04 to 0.07, its
    # share 0.93 to 1.00. Parts of a few short answers scatter; the share does least.
    assert "qerl/mismatch_noise" not in quiet
    assert quiet["qerl/mismatch_kernel_share"] == pytest.approx(1)
    assert noisy["qerl/mismatch_noise_share"] > 0.5
    assert noisy["qerl/mismatch_noise_share"] + noisy["qerl/mismatch_kernel_share"] == pytest.approx(1)
    assert noisy["qerl/mismatch_noise"] > 0
    # The noise was on when the rollout sampled, too.
    assert quiet["qerl/rollout_log_prob_abs_diff"] < 0.02 < noisy["qerl/rollout_log_prob_abs_diff"] < 0.5
    for step in run.steps:
        assert "qerl/mismatch_staleness" not in step
        assert 4 <= step["qerl/mismatch_num_tokens"] <= 4 * 96
        assert 0 < step["qerl/mismatch_kernel"] < 0.03
        assert 0 < step["actor/acr_widened_frac"] < 1
        assert step["actor/acr_upper_bound"] > 1.2
        assert step["actor/acr_ratio"] < 1
        assert step["qerl/rollout_log_prob_abs_diff"] > 0
    assert "packed base" not in run.log


def test_a_stock_command_stays_stock(workbench):
    run = workbench.train("stock", "trainer.total_training_steps=1").check()
    assert len(run.steps) == 1
    assert not [key for key in run.steps[0] if key.startswith(("aqn/", "qerl/"))]
    assert "packed base" not in run.log
    assert "VERL_QERL_ACTIVE" not in run.log  # verl prints what it hands to ray.init


def test_bad_input_is_refused_before_ray_starts(workbench):
    run = workbench.train("bad", "+rollout=int8", "+qerl.base.shard=true")
    assert run.code != 0
    assert "qerl.base.shard=True does not go together with +rollout=int8" in run.log
    assert "Started a local Ray instance" not in run.log
