"""A run that resumes goes on with the sigma of its checkpoint, or is refused, or told."""

import logging
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import load_beside

from verl_qerl.algos.aqn import AQNConfig, sigma_at_step
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.trainer import noise_schedule
from verl_qerl.verl_plugin.trainer.noise_schedule import RECORD, NoiseSchedule, read_schedule

featured = load_beside(__file__, "featured")

AQN = AQNConfig(enabled=True, num_stages=4)
OFF = AQNConfig()


class Base(featured.Base):
    """Loads as verl's PPOTrainer does, as far as the feature sees it."""

    def _load_checkpoint(self):
        super()._load_checkpoint()
        mode, trainer = self.config.trainer.resume_mode, self.config.trainer
        self.global_steps = {"disable": 0, "auto": 40}.get(mode, 0)
        if mode == "resume_path":
            self.global_steps = int(trainer.resume_from_path.split("global_step_")[-1])


Trainer = featured.trainer_of(NoiseSchedule, base=Base)


@pytest.fixture
def run(tmp_path):
    """A trainer of a run in `tmp_path` whose checkpoint of step 40 is there; it has neither noise nor workers."""

    def make(aqn, total, **options):
        settings = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None}
        settings |= {"total_epochs": 1} | options
        made = Trainer(OmegaConf.create({"trainer": settings}))
        made.run.aqn, made.total_training_steps, made.global_steps = aqn, total, 40
        return made

    return make


@pytest.fixture
def saved(run, tmp_path):
    """The checkpoint of step 40 of 100; stages are 25 steps long."""
    run(AQN, 100)._save_checkpoint()
    return tmp_path / "global_step_40"


def resume(run, caplog, *args, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=noise_schedule.__name__):
        run(*args, **options)._load_checkpoint()
    return caplog.messages


def test_the_file_has_every_option_and_is_there_before_verl_saves(run, tmp_path):
    made = run(AQN, 100)
    made.log = SimpleNamespace(append=lambda what: found.append((what, read_schedule(tmp_path / "global_step_40"))))
    found = []
    made._save_checkpoint()
    assert found == [("saved", (replace(AQN, total_steps=100, targets=AQN.norms), {}))]
    assert not list(tmp_path.glob("*/*.partial"))


def test_the_same_schedule_goes_on_without_a_word(run, saved, caplog):
    assert resume(run, caplog, AQN, 100) == []
    assert resume(run, caplog, replace(AQN, total_steps=100), 100) == []
    assert resume(run, caplog, replace(AQN, targets=AQN.norms), 100) == []
    assert resume(run, caplog, AQN, 100, resume_mode="resume_path", resume_from_path=str(saved)) == []


@pytest.mark.parametrize(
    ("total", "at", "before", "now"),
    [(200, 41, "0.01", "0"), (60, 41, "0.01", "0.00223607"), (104, 51, "0.00223607", "0.01")],
    ids=["extended", "cut", "other-data"],
)
def test_a_number_of_steps_that_moves_sigma_is_refused(run, saved, caplog, total, at, before, now):
    with pytest.raises(ValueError, match="sigma would move") as caught:
        resume(run, caplog, AQN, total)
    assert str(caught.value) == (
        f"sigma would move with the number of steps: at step {at} it is {before} over the 100 steps of the checkpoint,"
        f" {now} over the {total} steps of this run, in {saved}. Accepted is another number of steps with"
        " aqn.total_steps. Set +aqn.total_steps=100 to keep the schedule (0.0005 after its last step), or"
        f" +aqn.total_steps={total} to spread its stages anew."
    )


def test_the_two_ways_out_of_the_refusal(run, saved, caplog):
    kept, anew = replace(AQN, total_steps=100), replace(AQN, total_steps=200)
    assert resume(run, caplog, kept, 200) == []
    assert [sigma_at_step(kept, step, 200) for step in (41, 76, 100, 101, 200)] == [0.01, 5e-4, 5e-4, 5e-4, 5e-4]
    assert resume(run, caplog, anew, 200) == [
        f"the noise is not that of the checkpoint in {saved}: aqn.total_steps=200 (was 100). Sigma of step 41 is 0, and"
        " was to be 0.01."
    ]


def test_a_number_of_steps_that_moves_nothing_is_no_matter(run, tmp_path, caplog):
    # Both schedules have step 100 in their last stage.
    noise_schedule.write_schedule(tmp_path / "global_step_99", AQN, 100, {})
    path = str(tmp_path / "global_step_99")
    assert resume(run, caplog, AQN, 101, resume_mode="resume_path", resume_from_path=path) == []


def test_changed_options_are_told_once_with_both_sigmas(run, tmp_path, caplog):
    saved = tmp_path / "global_step_49"  # step 50 is the last of its stage
    noise_schedule.write_schedule(saved, AQN, 100, {})
    there = {"resume_mode": "resume_path", "resume_from_path": str(saved)}
    changed = replace(AQN, sigma_start=0.02, seed=1)
    assert resume(run, caplog, changed, 100, **there) == [
        f"the noise is not that of the checkpoint in {saved}: aqn.sigma_start=0.02 (was 0.01), aqn.seed=1 (was 0)."
        " Sigma of step 50 is 0.02, and was to be 0.01."
    ]
    (told,) = resume(run, caplog, OFF, 100, **there)
    assert "aqn.enabled=False (was True)" in told
    assert told.endswith("Sigma of step 50 is 0, and was to be 0.01.")


def test_a_checkpoint_without_a_schedule(run, tmp_path, caplog):
    assert resume(run, caplog, OFF, 100) == []
    assert resume(run, caplog, AQN, 100, resume_mode="disable") == []
    assert resume(run, caplog, AQN, 100) == [
        f"{tmp_path / 'global_step_40'} has no {RECORD}: noise was off in it, or its schedule is not known."
    ]


def test_a_run_without_noise_leaves_no_schedule(run, saved):
    run(OFF, 100)._save_checkpoint()
    assert not (saved / RECORD).exists()
    run(OFF, 100, default_local_dir=str(saved / "new"))._save_checkpoint()
    assert not (saved / "new").exists()


SEARCH = replace(AQN, target_kl=1e-3)


@pytest.fixture
def searching(run, tmp_path):
    """As `saved`, of a run that has found two sigmas."""
    made = run(SEARCH, 100)
    made.run.searched = {1: (26, 0.2), 2: (51, 0.1)}
    made._save_checkpoint()
    return tmp_path / "global_step_40"


def test_a_sigma_that_was_found_goes_on(run, searching, caplog):
    made = run(SEARCH, 100)
    made._load_checkpoint()
    assert made.run.searched == {1: (26, 0.2), 2: (51, 0.1)}
    assert sigma_at_step(SEARCH, 41, 100, made.run.searched) == 0.2
    assert sigma_at_step(SEARCH, 51, 100, made.run.searched) == pytest.approx(0.1 * 0.05**0.5)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changed", "told", "kept"),
    [
        ({"target_kl": 2e-3}, "aqn.target_kl=0.002 (was 0.001). Sigma of step 41 is 0, and was to be 0.2.", {}),
        ({"mode": "relative"}, "aqn.mode=relative (was additive). Sigma of step 41 is 0, and was to be 0.2.", {}),
        ({"targets": ("input_layernorm",)}, "Sigma of step 41 is 0, and was to be 0.2.", {}),
        ({"draw": "token"}, "aqn.draw=token (was batch). Sigma of step 41 is 0, and was to be 0.2.", {}),
        ({"target_kl": None}, "aqn.target_kl=None (was 0.001). Sigma of step 41 is 0.01, and was to be 0.2.", {}),
        ({"seed": 3}, "aqn.seed=3 (was 0). Sigma of step 41 is 0.2, and was to be 0.2.", {1: (26, 0.2), 2: (51, 0.1)}),
    ],
    ids=lambda part: str(part)[:20],
)
def test_a_sigma_found_for_something_else_does_not(run, searching, caplog, changed, told, kept):
    made = run(replace(SEARCH, **changed), 100)
    with caplog.at_level(logging.WARNING, logger=noise_schedule.__name__):
        made._load_checkpoint()
    assert made.run.searched == kept
    (message,) = caplog.messages
    assert message.endswith(told)


@pytest.mark.parametrize(
    ("changed", "stage"),
    [({"total_steps": 400}, {}), ({"total_steps": 120}, {1: (41, 0.1)}), ({"num_stages": 8}, {3: (41, 0.1)})],
    ids=["no noise yet", "spread anew", "other stages"],
)
def test_where_stages_lie_otherwise_the_last_sigma_goes_on_and_the_next_are_searched_for(
    run, searching, changed, stage
):
    made = run(replace(SEARCH, **changed), 100)
    made._load_checkpoint()
    assert made.run.searched == stage


def test_stages_that_stay_where_they_are_keep_their_sigmas(run, searching):
    made = run(replace(SEARCH, total_steps=100), 200)
    made._load_checkpoint()
    assert made.run.searched == {1: (26, 0.2), 2: (51, 0.1)}


def test_the_sentence_about_other_steps_has_the_sigmas_that_were_found(run, searching, caplog):
    with pytest.raises(ValueError, match="sigma would move") as caught:
        resume(run, caplog, SEARCH, 200)
    assert "at step 41 it is 0.2 over the 100 steps of the checkpoint, 0 over" in str(caught.value)
    assert "to keep the schedule (0.005 after its last step)" in str(caught.value)  # 0.05 of 0.1


def test_with_fewer_steps_than_stages_the_sentence_names_the_sigma_that_stays(run, tmp_path, caplog):
    noise_schedule.write_schedule(tmp_path / "global_step_2", replace(AQN, num_stages=10), 4, {})
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_2")}
    with pytest.raises(ValueError, match=r"to keep the schedule \(0\.00105737 after its last step\)"):
        resume(run, caplog, replace(AQN, num_stages=10), 40, **named)
    kept = replace(AQN, num_stages=10, total_steps=4)
    assert sigma_at_step(kept, 40, 40) == pytest.approx(0.00105737, rel=1e-5)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"enabled": 1}', '{"sigma": 1, "total_steps": 3}', '{"enabled": true, "searched": 2}'],
)
def test_a_damaged_file_is_refused(run, saved, text):
    (saved / RECORD).write_text(text)
    with pytest.raises(CheckpointFormatError, match=r"^the schedule of the noise cannot be read: .*\. Remove it to go"):
        run(AQN, 100)._load_checkpoint()


def test_what_is_written_is_what_is_read(saved):
    config, searched = read_schedule(saved)
    assert asdict(config) == asdict(AQN) | {"total_steps": 100, "targets": AQN.norms}
    assert searched == {}


def test_a_named_checkpoint_of_another_run_is_compared_too(run, saved, tmp_path, caplog):
    named = {"resume_mode": "resume_path", "resume_from_path": str(saved)}
    with pytest.raises(ValueError, match="sigma would move"):
        resume(run, caplog, AQN, 200, default_local_dir=str(tmp_path / "new"), **named)
    assert resume(run, caplog, AQN, 100, default_local_dir=str(tmp_path / "new"), **named) == []


def test_the_last_step_counts(run, tmp_path, caplog):
    noise_schedule.write_schedule(tmp_path / "global_step_25", AQN, 100, {})
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_25")}
    with pytest.raises(ValueError, match=r"at step 26 it is 0\.01 over the 100 steps of the checkpoint, 0\.0005 over"):
        resume(run, caplog, AQN, 26, **named)
