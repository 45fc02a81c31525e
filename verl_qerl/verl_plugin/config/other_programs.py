"""Programs of verl that do not know our options are refused, since they would run without them."""

from collections.abc import Sequence

from verl_qerl.verl_plugin.config.uses_qerl import asks_for_qerl

# Modules, packages or beginnings of names: of programs that do not check the configuration on the driver.
PROGRAMS = (
    "verl.experimental.one_step_off_policy",
    "verl.experimental.fully_async_policy",
    "verl.trainer.main_generation_server",
    "verl.trainer.sft_trainer",
)


def refuse(command: Sequence[str]) -> None:
    """Stop one of PROGRAMS, as a module or a file, by SystemExit if its command line sets an option of ours."""
    started = " ".join(argument.replace("/", ".") for argument in command if "=" not in argument)
    name = next((name for name in PROGRAMS if name in started), None)
    if name and asks_for_qerl(list(command)):
        raise SystemExit(
            f"{name} has no AQN, no ACR, no UAQ, no NVFP4, no gate and no +qerl.rollout. Accepted is"
            " verl.trainer.main_ppo. Start that, or leave these options out."
        )
