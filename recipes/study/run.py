"""Runs arms x seeds of the study over the GPUs of a machine, each in a verl of its own, within a time limit.

    python3 recipes/study/run.py --model DIR --data DIR --out DIR --arms bf16 nvfp4 --seeds 1 2 --minutes 25

Leaves one small file, OUT/<time of the start>.json, with every step of every run. It is written anew every 20 s: all
there is to copy from a machine that goes away. Files of several sessions add up: a run that is whole in OUT or in
results/ is not repeated, and report.py reads all of them. A run that fails in its first steps is begun once more. At
the limit all are ended; what they have is kept, and a later session runs them from the start. Overrides of main_ppo
behind `--` go to all runs, whose names then need a --tag. Exit code 1 when a run failed.
"""

import argparse
import datetime
import importlib.metadata
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arms
import psutil
import results
from arms import Run
from records import Records

from verl_qerl.checkpoints.model_config import read_config
from verl_qerl.checkpoints.record import read_whole
from verl_qerl.cli.model_dir import QUANTIZATION_REPORT

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "bench"))
from qerl_testing import current_commit

HERE = Path(__file__).resolve().parent
MARK = "QERL_STUDY_RUN"  # in the environment of all that a run starts
WRITE_S = 20.0
REPEATED_BEFORE = 5  # a run that fails before this step is begun once more
STALL_S = 600.0  # without a new step: it has hung. A start takes three minutes, the validation at the end five
LOG_TAIL = 20000
MADE_BY = {
    "calibrated": "`python -m verl_qerl quantize --method gptq`, on calibration.jsonl of prepare.py,",
    "dequantized": "recipes/study/dequantize.py, of what `python -m verl_qerl quantize` wrote,",
}


class Job:
    """A run, what it has done, and its process while it has one."""

    def __init__(self, run: Run, options: list[str], base: str = "") -> None:
        self.run, self.options, self.base = run, options, base
        self.state, self.attempts, self.took_s, self.error = "not begun", 0, 0.0, ""
        self.gpu = ""
        self.metrics: dict[str, list[Any]] = {"step": []}
        self.validation: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = self.ray_folder = Path()
        self.began = self.last_step_at = 0.0

    @property
    def mark(self) -> str:
        """Of its processes; another study may run beside this one."""
        return f"{os.getpid()} {self.run.name} {self.attempts}"

    def read(self, records: Records, ended: bool = False) -> None:
        """Take what is new; an earlier attempt stays until this one has more steps."""
        found = records.read(ended)
        if len(found["step"]) > len(self.metrics["step"]):
            self.last_step_at = time.monotonic()
        if len(found["step"]) >= len(self.metrics["step"]):
            self.metrics, self.validation = found, records.validation

    def outlook(self, steps: int) -> str:
        """`10 of 60, 17 min more`: those of the steps that are left, at the median of those that were made."""
        last, took = max(self.metrics["step"], default=0), [one for one in self.metrics.get("timing_s/step", ()) if one]
        more = f", {(steps - last) * statistics.median(took) / 60:.0f} min more" if took else ""
        return f"{last} of {steps}{more}"

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        took = self.took_s + (time.monotonic() - self.began if self.process else 0.0)
        told = {"arm": self.run.arm, "task": self.run.task, "seed": self.run.seed, "tag": self.run.tag}
        told |= {"state": self.state, "attempts": self.attempts, "took_s": round(took), "gpu": self.gpu}
        told |= {"error": self.error} if self.error else {}
        told |= {"base": self.base} if self.base else {}
        return told | {"options": self.options, "validation": self.validation, "metrics": self.metrics}


class Study:
    """Runs jobs until all ended or the time is over.

    Args:
        jobs: In order.
        places: (name for CUDA_VISIBLE_DEVICES, kind as `NVIDIA H100`) of each run that there is room for.
        command: Of a job and a folder for metrics.jsonl, rollouts/ and validation/: what to start.
        steps: Of each run.
        seconds: Time limit.
        least: Seconds that have to be left when a run begins.
        file: Result file.
        work: Folder for logs and for what verl writes.
        session: What the result file says of machine and options.
    """

    def __init__(
        self,
        jobs: list[Job],
        places: Sequence[tuple[str, str]],
        command: Callable[[Job, Path], list[str]],
        steps: int,
        seconds: float,
        least: float,
        file: Path,
        work: Path,
        session: dict[str, Any],
    ) -> None:
        self.jobs, self._places, self._command, self._steps, self._least = jobs, places, command, steps, least
        self._file, self._work, self._session = file, work, session
        self._start, self._seconds = time.monotonic(), seconds
        self._running: dict[int, tuple[Job, Records]] = {}  # by number of the place
        self._written = float("-inf")

    def run(self) -> int:
        """Exit code of the command."""
        try:
            while self._left() > 0:
                self._look()
                self._begin_what_can()
                if not self._running:
                    break
                self._write()
                time.sleep(0.2)
        finally:
            for place in list(self._running):
                self._end(place, "cut")
            for job in self.jobs:
                job.state = "failed" if job.state == "to be repeated" else job.state
            self._write(always=True)
        return int(any(job.state == "failed" for job in self.jobs))

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def _look(self) -> None:
        for place, (job, _) in list(self._running.items()):
            assert job.process is not None
            code = job.process.poll()
            if code is not None:
                self._end(place, "done" if code == 0 else "failed")
            elif time.monotonic() - job.last_step_at > STALL_S:
                self._end(place, "failed", f"no step in {STALL_S:.0f} s")

    def _begin_what_can(self) -> None:
        if self._left() < self._least:
            return
        for place in range(len(self._places)):
            waiting = [job for job in self.jobs if job.state == "not begun"]
            again = [job for job in self.jobs if job.state == "to be repeated"]
            if place not in self._running and (again or waiting):
                self._begin((again or waiting)[0], place)

    def _begin(self, job: Job, place: int) -> None:
        gpu, kind = self._places[place]
        job.attempts += 1
        job.state, job.gpu, job.began = "running", kind, time.monotonic()
        job.last_step_at = job.began
        job.folder = self._work / job.run.name / str(job.attempts)
        job.folder.mkdir(parents=True)
        job.ray_folder = Path(tempfile.mkdtemp(prefix="qs", dir="/tmp"))  # the path of a socket must be short
        own = {MARK: job.mark, "CUDA_VISIBLE_DEVICES": gpu, "RAY_TMPDIR": str(job.ray_folder)}
        own |= {"VERL_FILE_LOGGER_PATH": str(job.folder / "metrics.jsonl"), "RAY_AUTH_MODE": "disabled"}
        # Each of Ray's clusters would end its own workers when all of them together fill the host.
        own |= {"RAY_memory_monitor_refresh_ms": "0", "TOKENIZERS_PARALLELISM": "false"}
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self._places)))}
        with open(job.folder / "log", "w") as log:
            job.process = subprocess.Popen(
                self._command(job, job.folder),
                cwd=job.folder,
                env=threads | os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[place] = job, Records(job.folder)
        self._say(f"{job.run.name}: begun on GPU {gpu} ({job.gpu})")

    def _end(self, place: int, state: str, why: str = "") -> None:
        job, records = self._running.pop(place)
        assert job.process is not None
        job.process.kill()
        kill_marked(job.mark)
        job.process.wait()
        job.took_s += time.monotonic() - job.began
        job.process = None
        job.read(records, ended=True)
        last = max(job.metrics["step"], default=0)
        if last >= self._steps:
            state = "done"  # also one that did not get to its own end
        elif state == "done":
            state, why = "failed", f"ended after step {last} of {self._steps}"
        shutil.rmtree(job.ray_folder, ignore_errors=True)
        job.error = ""
        if state == "failed":
            log = (job.folder / "log").read_text(errors="replace")
            job.error = why or last_error(log)
            (self._file.parent / f"{job.run.name}.log").write_text(log[-LOG_TAIL:])
            if last < REPEATED_BEFORE and job.attempts == 1:
                state = "to be repeated"
        job.state = state
        self._say(f"{job.run.name}: {state} at step {last}{': ' * bool(job.error)}{job.error}")
        self._written = float("-inf")

    def _write(self, always: bool = False) -> None:
        if not always and time.monotonic() - self._written < WRITE_S:
            return
        for job, records in self._running.values():
            job.read(records)
        at = [f"{job.run.name} {job.outlook(self._steps)}" for job, _ in self._running.values()]
        if at:
            self._say(f"{self._left() / 60:.0f} min left. Steps: {'; '.join(at)}")
        runs = {job.run.name: job.as_json() for job in self.jobs if job.attempts}
        results.write(self._file, {"session": self._session, "runs": runs})
        self._written = time.monotonic()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:7.1f}] {text}", flush=True)


def kill_marked(mark: str) -> None:
    """End all processes of a run, and wait until they are gone and the GPU is free; Ray's leave session and tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
                found.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(found, timeout=10)


def last_error(log: str) -> str:
    """The last line of a log that tells an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "error:" in line]
    return (lines or log.strip().splitlines() or ["it said nothing"])[-1][:400]


def visible_gpus() -> dict[str, str]:
    """Name -> kind; asked in another process, as CUDA would keep memory of the GPUs here."""
    code = "import torch; print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kinds = [line for line in asked.stdout.splitlines() if line]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(index) for index in range(len(kinds))]
    return dict(zip(names, kinds, strict=False))


def in_groups(gpus: dict[str, str], size: int) -> dict[str, str]:
    """As many groups of so many GPUs as there are, each like one GPU: `0,1` -> `2 x NVIDIA H100`."""
    names = list(gpus)
    groups = [names[start : start + size] for start in range(0, len(names) - size + 1, size)]
    return {",".join(group): f"{size} x " * (size > 1) + gpus[group[0]] for group in groups}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Arguments of the command, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a bf16 model that can answer")
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py has made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result file")
    for arm, option in arms.BASES.items():
        parser.add_argument(f"--{option}", type=Path, help=f"what {MADE_BY[option]} made of it, for {arm}")
    parser.add_argument("--arms", nargs="+", required=True, choices=list(arms.ARMS), metavar="ARM")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"], choices=list(arms.TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--per-gpu", type=int, default=1, choices=range(1, 5), help="runs that share a GPU")
    parser.add_argument("--gpus-per-run", type=int, default=1, choices=range(1, 9), help="GPUs that share a run")
    parser.add_argument("--least", type=float, default=6, help="minutes that must be left when a run begins")
    parser.add_argument(
        "--validate", default="end", choices=arms.VALIDATE, help="when questions of the test set are asked"
    )
    parser.add_argument("--samples", type=int, default=4, choices=range(1, 10), help="answers to each, at the end")
    parser.add_argument("--tag", default="", help="added to the names of runs with overrides")
    parser.add_argument("--earlier", type=Path, default=HERE / "results", help="results of earlier sessions")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "verl_qerl_study")
    parser.add_argument(
        "--save",
        action="store_true",
        help="keep what a run has learned, in WORK/<time of the start>/NAME/<attempt>/saved",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("overrides", nargs="*", help="of main_ppo, behind `--`")
    args = parser.parse_args(arguments)
    if bool(args.overrides) != bool(args.tag):
        parser.error("--tag and overrides of main_ppo go together, so that a name stands for one set of options")
    if args.steps < 1 or not 0 <= args.least <= args.minutes:
        parser.error(
            f"nothing would run: --steps {args.steps}, --minutes {args.minutes:g}, --least {args.least:g}. A step or"
            " more, and minutes that are not below --least are accepted."
        )
    args.bases = {arm: getattr(args, option) for arm, option in arms.BASES.items() if arm in args.arms}
    for arm, option in arms.BASES.items():
        if arm not in args.arms and getattr(args, option):
            parser.error(f"--{option} is for {arm}, which is none of --arms. Add the arm, or leave the option out.")
    for arm, base in args.bases.items():
        if not base:
            option = arms.BASES[arm]
            parser.error(
                f"{arm} needs --{option}. What {MADE_BY[option]} writes is accepted. Make it, or leave the arm out."
            )
    folders = [args.model, *args.bases.values(), *(args.data / task for task in args.tasks)]
    if args.earlier not in (parser.get_default("earlier"), args.out):
        folders.append(args.earlier)
    for folder in folders:
        if not folder.is_dir():
            parser.error(
                f"no such folder: {folder}. --model, --calibrated, --dequantized, --data as of"
                " prepare.py and --earlier are folders. Check the path."
            )
    return args


def command_of(args: argparse.Namespace) -> Callable[[Job, Path], list[str]]:
    """What starts a job."""

    def command(job: Job, folder: Path) -> list[str]:
        task, data = arms.TASKS[job.run.task], args.data.resolve() / job.run.task
        model = args.bases.get(job.run.arm, args.model)
        places = [
            f"{arms.MODEL}.path={arms.quoted(model.resolve())}",
            f"data.train_files={arms.quoted(data / 'train.parquet')}",
            f"reward.custom_reward_function.path={arms.quoted(HERE / 'reward.py')}",
            f"trainer.rollout_data_dir={arms.quoted(folder / 'rollouts')}",
            f"trainer.validation_data_dir={arms.quoted(folder / 'validation')}",
            f"trainer.experiment_name={job.run.name}",
        ]
        if args.save:
            places += [f"trainer.save_freq={args.steps}", f"trainer.default_local_dir={arms.quoted(folder / 'saved')}"]
        given = [
            *arms.machine(task, args.per_gpu, args.gpus_per_run),
            *arms.validation(args.validate, args.steps, args.samples, data),
            *arms.seeds(job.run),
            *arms.sampler(job.options),
        ]
        return [sys.executable, "-m", "verl.trainer.main_ppo", *given, *places, *job.options]

    return command


def to_run(args: argparse.Namespace) -> list[Job]:
    """The list without what earlier sessions have whole.

    Raises:
        ValueError: An earlier run had other options or another model; a name is no folder; a base has no report.
    """
    earlier = results.merged([args.earlier, args.out])
    runs = [Run(arm, task, seed, args.tag) for seed in args.seeds for task in args.tasks for arm in args.arms]
    for run in runs:
        if not results.RUN.fullmatch(run.name):
            raise ValueError(
                f"no name of a run: {run.name!r}. Lower-case letters, digits, `_`, `-` and `.` in --tag, and seeds of"
                " at least 0 are accepted. Change it."
            )
    digests = {arm: digest(base, arms.BASES[arm]) for arm, base in args.bases.items()}
    jobs = [
        Job(run, arms.experiment(run, args.steps, args.overrides), digests.get(run.arm, ""))
        for run in dict.fromkeys(runs)
    ]
    session = {"model": args.model.resolve().name}
    ours = {job.run.name: job.run._asdict() | {"options": job.options, "session": session} for job in jobs}
    results.check_same_options([*earlier.values(), *ours.values()])
    done = {name for name, run in earlier.items() if run["state"] == "done"}
    for name in sorted(done & ours.keys()):
        print(f"{name}: there already, in {earlier[name]['session']['file']}")
    return [job for job in jobs if job.run.name not in done]


def digest(base: Path, option: str) -> str:
    """Of a base, as `quantize` has written it down and a run's log has it: other codes give another."""
    file, remedy = base / QUANTIZATION_REPORT, "Quantize the model again."
    found = read_whole(file, lambda report: (str(report["model_digest"]), report["method"]), f"--{option}", remedy)
    accepted = f"A folder that {MADE_BY[option]} wrote is accepted as --{option}. Check the path."
    if found is None:
        raise ValueError(f"no report of a quantized model: {file}. {accepted}")
    name, method = found
    if option == "calibrated" and method != "gptq":
        raise ValueError(f"not calibrated: {file} has method={method}. {accepted}")
    if option == "dequantized" and read_config(base).get("quantization_config"):
        raise ValueError(f"quantized still: {base}. {accepted}")
    return name


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    names = ("torch", "verl", "vllm", "transformers", "peft", "liger-kernel", "math-verify", "verl-qerl")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    args = parse(arguments)
    jobs, command = to_run(args), command_of(args)
    if not jobs:
        print("nothing is left to run")
        return 0
    if args.dry_run:
        for job in jobs:
            print(*map(shlex.quote, command(job, args.work / job.run.name)), sep=" \\\n    ")
        return 0
    gpus = visible_gpus()
    if len(gpus) < args.gpus_per_run:
        print(
            f"{len(gpus)} GPUs are visible to torch. --gpus-per-run={args.gpus_per_run} or more are accepted. See"
            " CUDA_VISIBLE_DEVICES."
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing that was started outlives it
    began = datetime.datetime.now(datetime.timezone.utc)
    asked = ("validate", "samples", "steps", "minutes", "per_gpu", "gpus_per_run")
    session = {"began": began.isoformat(timespec="seconds"), "commit": current_commit(), "versions": versions()}
    session |= {"model": args.model.resolve().name, "gpus": list(gpus.values()), "cores": os.cpu_count()}
    session |= {name: getattr(args, name) for name in asked}
    session["machine"] = {task: arms.machine(arms.TASKS[task], args.per_gpu, args.gpus_per_run) for task in args.tasks}
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out.resolve() / f"{began:%Y%m%dT%H%M%S%f}.json"  # sessions that a script starts begin together
    places = [*in_groups(gpus, args.gpus_per_run).items()] * args.per_gpu
    limits = args.steps, 60 * args.minutes, 60 * args.least
    return Study(jobs, places, command, *limits, file, args.work.resolve() / file.stem, session).run()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"run.py: {error}")
