"""What bench_noise.py measures: settings of noise on a base, which of them an engine can have, and their rows so far.

A setting is written BASE or BASE/MODE/DRAW@SIGMA,SIGMA...: `bf16`, `nvfp4:mse/additive/batch@0.01,0.02`. BASE alone is
the base without noise. A base is `bf16` or a format of ours, NVFP4 with its choice of scales.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

_SETTING = re.compile(r"(?P<base>[^/@]+)(/(?P<mode>\w+)/(?P<draw>\w+)@(?P<sigmas>[^/@]+))?")
NO_NOISE = "none"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row.

    Attributes:
        base: `bf16`, or a format, with `:` and its scale choice behind it.
        mode: Of aqn, or NO_NOISE.
        sigma: 0 without noise.
        index: Which draw, from 0: the step that the noise is drawn for. Noise of one index is the same numbers at
            every sigma. Without noise it is a repetition.
    """

    base: str
    mode: str
    draw: str
    sigma: float
    index: int

    @property
    def engine(self) -> tuple[str, str, str]:
        """Settings with the same value can share an engine: only a draw a batch can change its mode."""
        return (self.base, self.draw, "" if self.draw == "batch" else self.mode)


def parse_settings(texts: list[str], draws: int) -> list[Setting]:
    """All settings, first those of draw 0, so that what has been measured when the time is over is even.

    Raises:
        ValueError: A text is not a setting.
    """
    found: dict[Setting, None] = {}
    for index in range(draws):
        for text in texts:
            found |= dict.fromkeys(Setting(*key, index) for key in _parse(text))
    return list(found)


def _parse(text: str) -> list[tuple[str, str, str, float]]:
    match = _SETTING.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        if match["mode"] is None:
            return [(match["base"], NO_NOISE, "batch", 0.0)]
        sigmas = [float(sigma) for sigma in match["sigmas"].split(",")]
        if min(sigmas) <= 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"no setting: {text!r}. Accepted are BASE and BASE/MODE/DRAW@SIGMA,SIGMA with sigmas above 0, such as"
            " nvfp4:mse/additive/batch@0.01,0.02. Write it so."
        ) from None
    return [(match["base"], match["mode"], match["draw"], sigma) for sigma in sigmas]


def by_engine(settings: list[Setting]) -> list[list[Setting]]:
    """Settings that share an engine, in the order in which the first of each came."""
    found: dict[tuple[str, str, str], list[Setting]] = {}
    for setting in settings:
        found.setdefault(setting.engine, []).append(setting)
    return list(found.values())


def engine_options(model: str, setting: Setting) -> dict[str, Any]:
    """Of vllm.LLM: what depends on the base and the noise, for all settings that share this one's engine."""
    from verl_qerl.formats import get_format
    from verl_qerl.vllm_plugin.options import SCHEDULER

    aqn: dict[str, Any] = {"enabled": True}
    own_draws = {}
    if setting.draw != "batch":
        aqn |= {"mode": setting.mode, "draw": setting.draw}
        own_draws = {"scheduler_cls": SCHEDULER}
    options: dict[str, Any] = own_draws | {
        "model": model,
        "worker_extension_cls": "noise_extension.Noise",
        "distributed_executor_backend": "mp",
        "additional_config": {"verl_qerl": {"aqn": aqn}},
    }
    form, _, scale = setting.base.partition(":")
    if form != "bf16":
        options |= {"load_format": f"verl_qerl_{form}", "quantization": f"verl_qerl_{form}"}
        options["hf_overrides"] = {"quantization_config": get_format(form).config()}
        options["model_loader_extra_config"] = {"scale": scale} if scale else {}
    return options


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines; none if it does not exist. A last line that was cut off is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Add an object to a file of JSON lines."""
    whole = path.read_bytes().endswith(b"\n") if path.exists() and path.stat().st_size else True
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")


def setting_of(row: dict[str, Any]) -> Setting:
    """The setting that a row was measured with."""
    return Setting(**row["setting"])
