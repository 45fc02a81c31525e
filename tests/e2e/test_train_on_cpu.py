"""verl's own command, end to end: Ray, TransferQueue, FSDP2, vLLM."""

import json
import shutil

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("verl")
pytestmark = pytest.mark.e2e

NVFP4 = ["+rollout=nvfp4", "+aqn.enabled=true", "+aqn.sigma_start=1e-2", "+aqn.sigma_end=1e-3"]
ACR = "actor_rollout_ref.actor.policy_loss.loss_mode=acr"
NUM_NORMS = 4  # two layers, two norms each


def assert_in_step(metrics: dict) -> None:
    # Actor and rollout differ by bf16 arithmetic alone: 6e-7 measured. An adapter that does not arrive makes 2e-2 at
    # this learning rate.
    assert metrics["rollout_corr/k3_kl"] < 1e-5
    assert metrics["qerl/rollout_kl_k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], abs=1e-6)  # verl's is float32
    assert 0 < metrics["qerl/rollout_log_prob_abs_diff"] < 5e-3
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert metrics["actor/grad_norm"] > 0


def adapter(checkpoint) -> dict[str, torch.Tensor]:
    (file,) = (checkpoint / "actor").glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items() if "lora_" in name}


def export(run, out, form, *options) -> dict:
    from verl_qerl.cli import main

    assert main(["export", "--checkpoint", str(run), "--out", str(out), "--to", form, *options]) == 0
    return json.loads((out / "export_report.json").read_text())


def test_two_steps_with_noise_then_resume(workbench):
    options = [*NVFP4, "+aqn.num_stages=2", "trainer.save_freq=1", "trainer.test_freq=2"]
    first = workbench.train("resume", *options).check()
    assert [step["aqn/sigma"] for step in first.steps] == [0.0, 1e-3]
    assert [step["aqn/num_norms"] for step in first.steps] == [NUM_NORMS, NUM_NORMS]
    assert "packed base: 14 linears" in first.log
    assert_in_step(first.steps[0])

    checkpoints = workbench.folder / "resume" / "checkpoints"
    before = adapter(checkpoints / "global_step_1")
    shutil.rmtree(checkpoints / "global_step_2")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    second = workbench.train("resume", *options).check()
    assert [step["training/global_step"] for step in second.steps] == [2]
    assert second.steps[0]["aqn/sigma"] == 1e-3
    after = adapter(checkpoints / "global_step_2")
    assert before.keys() == after.keys()
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert len(moved) == len(after), "an adapter that was loaded and trained has moved everywhere"
    largest = max((after[name] - before[name]).abs().max().item() for name in after)
    assert largest < 5e-2, "one Adam step at 1e-2 from the saved adapter, not a run from scratch"

    # The run's latest step, of one rank and with the tensors besides the adapter.
    out = workbench.folder / "resume" / "merged"
    prompts = ["--prompts", str(workbench.data / "test.parquet"), "--num-prompts", "2"]
    report = export(checkpoints, out, "merged-nvfp4", *prompts)
    assert (report["world_size"], report["base"]) == (1, str(workbench.model))
    assert (report["scaling"], len(report["layers"])) == (2, 14)
    assert (report["base_digest_checked"], report["changed_besides_the_adapter"]) == (True, [])
    assert report["log_probs"]["prompts"] == 2


def test_two_ranks_from_an_nvfp4_directory_save_adapters_only(workbench):
    from verl_qerl.cli import main

    packed = workbench.folder / "model-nvfp4"
    assert main(["quantize", "--model", str(workbench.model), "--out", str(packed), "--scale", "mse"]) == 0
    options = [*NVFP4, ACR, "+aqn.num_stages=2", "trainer.save_freq=2"]
    # The path for one adapter; from the second sync on the adapter is written in place.
    options.append("+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.verl_qerl.lora=single")
    options.append("+actor_rollout_ref.actor.checkpoint.save_lora_only=true")
    # Without noise in step 2 the adapter's arrival shows: both sides are the same model.
    run = workbench.train(
        "two_ranks", *options, "aqn.sigma_start=2e-6", "aqn.sigma_end=1e-6", model=packed, num_ranks=2
    )
    run.check()
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


def test_noise_alone_on_a_bf16_rollout_with_validation(workbench):
    options = ["+aqn.enabled=true", "+aqn.num_stages=2", "trainer.val_before_train=True", "trainer.test_freq=1"]
    # Where C is 1, the rounding of the two policies suffices to widen the range of some tokens.
    run = workbench.train("noise_alone", *options, ACR, "+acr.max_ratio=1").check()
    assert [step["aqn/num_norms"] for step in run.steps] == [NUM_NORMS, NUM_NORMS]
    assert run.steps[1]["aqn/sigma"] == 5e-4
    for step in run.steps:
        assert 0 < step["actor/acr_widened_frac"] < 1
        assert step["actor/acr_upper_bound"] > 1.2
        assert step["actor/acr_ratio"] < 1
        assert 0 < step["qerl/rollout_log_prob_abs_diff"] < 0.1
    assert "packed base" not in run.log


def test_a_stock_command_stays_stock(workbench):
    run = workbench.train("stock", "trainer.total_training_steps=1").check()
    assert len(run.steps) == 1
    assert not [key for key in run.steps[0] if key.startswith(("aqn/", "qerl/"))]
    assert "packed base" not in run.log


def test_bad_input_is_refused_before_ray_starts(workbench):
    run = workbench.train("bad", *NVFP4, "actor_rollout_ref.model.lora_rank=0")
    assert run.code != 0
    assert "model.lora_rank=0 leaves nothing to train on a frozen NVFP4 base" in run.log
    assert "Started a local Ray instance" not in run.log
