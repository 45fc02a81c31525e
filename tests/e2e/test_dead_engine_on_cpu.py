"""What becomes of a run whose rollout engine dies."""


def test_an_engine_that_dies_ends_the_run(workbench):
    """The first answer that is scored takes the engine of its run with it."""
    reward = workbench.folder / "deadly.py"
    reward.write_text(
        "import contextlib, os, time, psutil\n"
        "def compute_score(*args, **kwargs):\n"
        "    for process in psutil.process_iter():\n"
        "        with contextlib.suppress(psutil.Error):\n"
        "            ours = process.cwd() == os.getcwd()\n"  # the folder of the run
        "            if ours and 'EngineCore' in process.name() + ' '.join(process.cmdline()):\n"
        "                process.kill()\n"
        "                process.wait(60)\n"
        "                time.sleep(3)\n"  # its server has seen it before the answers are counted
        "    return 0.0\n"
    )
    run = workbench.train("dead_engine", "+rollout=nvfp4", f"reward.custom_reward_function.path={reward}")
    assert run.code != 0
    assert "vLLM's engine has ended in 1 of 1 rollout replicas; no update is made" in run.log, run.log[-6000:]
    assert run.steps == []
