import logging

import pytest

from verl_qerl.verl_plugin.warnings_kept import keep_warnings


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR], ids=["root-takes-it", "root-drops-it"])
def test_a_warning_is_written_once_whatever_the_root_takes(monkeypatch, capsys, level):
    root, ours, handler = logging.getLogger(), logging.getLogger("verl_qerl"), logging.StreamHandler()
    held = ours.level
    handler.setLevel(level)
    # In the test's body: pytest has handlers of its own on the root, which take everything.
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", level)
    monkeypatch.setattr(ours, "handlers", [])
    try:
        keep_warnings()
        keep_warnings()
        logging.getLogger("verl_qerl.verl_plugin.trainer.noise_effect").warning("sigma is %g", 0.5)
    finally:
        ours.setLevel(held)
    assert capsys.readouterr().err.count("sigma is 0.5") == 1


def test_the_trainer_keeps_them():
    pytest.importorskip("verl")
    from verl.trainer.ppo.v1 import get_trainer_cls

    get_trainer_cls("sync")
    assert logging.getLogger("verl_qerl").level == logging.WARNING
    assert logging.getLogger("verl_qerl").handlers
