"""The engines of an evaluation: one in this process, or several that share the questions, in processes of their own."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from verl_qerl.cli.eval.answers import judge
from verl_qerl.cli.eval.arguments import STOCK
from verl_qerl.cli.eval.records import Answer
from verl_qerl.cli.interrupts import end_with_the_parent

if TYPE_CHECKING:
    from verl_qerl.vllm_plugin.offline import EngineOptions, OfflineEngine

CHECKED = 32  # tokens of the answer that the adapter is checked on

Judged = Generator[tuple[int, tuple[Answer, ...]], None, None]


@dataclass(frozen=True)
class Work:
    """What an engine has to do.

    Attributes:
        prompts: Token ids of each question.
        sampling: Arguments of vLLM's SamplingParams.
    """

    options: "EngineOptions"
    prompts: Sequence[list[int]]
    truths: Sequence[str]
    sampling: dict[str, Any]

    def part(self, rank: int, engines: int) -> "Work":
        """Every `engines`-th question from number `rank` on; seeds differ, or engines would draw the same numbers."""
        options = replace(self.options, seed=self.options.seed + rank)
        return Work(options, self.prompts[rank::engines], self.truths[rank::engines], self.sampling)


def judged(work: Work) -> Judged:
    """(number of the question, its answers) as each is ready; raises as `check_applied` before the first."""
    from verl_qerl.vllm_plugin.offline import OfflineEngine  # imports torch

    # vLLM's core in this process ends with it, and the workers of several GPUs with the core. In a process of its own
    # it would outlive a kill, and vLLM ignores an interrupt that comes while it waits for that process to start.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = OfflineEngine(work.options)
    if work.options.adapter is not None:
        change = check_applied(engine, work.prompts[0])
        print(f"the adapter is applied: it changes log-probs of an answer by {change:.3g} a token on average")
    for number, found in engine.sample(work.prompts, **work.sampling):
        truth = work.truths[number]
        yield number, tuple(Answer(s.text, len(s.tokens), s.cut, *judge(s.text, truth, s.cut)) for s in found)


def check_applied(engine: "OfflineEngine", prompt: list[int]) -> float:
    """Require that answers are sampled with the adapter; mean |change of a token's log-prob| on one answer.

    The answer comes as all others do. It is scored with the adapter and without: the two must differ, and the log-probs
    that it was sampled with must not be those of the base.

    Raises:
        ValueError: The adapter changes nothing, or answers come without it.
    """
    ((_, (answer,)),) = engine.sample([prompt], log_probs=True, temperature=0.0, max_tokens=CHECKED)
    tokens, length = [*prompt, *answer.tokens], len(answer.tokens)
    ours, base = (engine.score(tokens, with_adapter)[-length:] for with_adapter in (True, False))
    change = _distance(ours, base)
    if change == 0:
        raise ValueError(
            f"the adapter changes nothing: an answer of {length} tokens has the same log-probs without it. A trained"
            " adapter that vLLM applies is accepted. Check that its factors B are not zero."
        )
    # Decoding and scoring differ by roundings, which may be all that a hardly trained adapter changes.
    if _distance(answer.log_probs, base) < 0.5 * _distance(answer.log_probs, ours):
        raise ValueError(
            f"answers come without the adapter: their log-probs are {_distance(answer.log_probs, base):.2g} from the"
            f" base's and {_distance(answer.log_probs, ours):.2g} from the adapter's. An engine that applies it is"
            f" accepted. Use --format {STOCK}, and tell us."
        )
    return change


def _distance(ours: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def gpus(engines: int, each: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each engine; None where the machine has no GPU.

    Raises:
        ValueError: There are fewer GPUs than that takes.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return [None] * engines
    if engines * each > count:
        raise ValueError(
            f"too few GPUs: --data-parallel={engines} with --tensor-parallel={each} takes {engines * each}, and {count}"
            f" can be seen. A product of at most {count} is accepted. Lower one of them."
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [",".join(names[rank * each : (rank + 1) * each]) for rank in range(engines)]


def in_processes(work: Work, devices: Sequence[str | None], answers: Callable[[Work], Judged] = judged) -> Judged:
    """What `judged` yields, from one engine for each of `devices`; they end with the iterator or this process.

    Raises:
        ValueError: An engine raised it.
        OSError: An engine raised it, or ended before it had answered.
    """
    count = min(len(devices), len(work.prompts))
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, answers, work.part(rank, count), devices[rank])
            process = context.Process(target=_serve, args=given, name=f"engine {rank}")
            process.start()
            processes.append(process)
            theirs.close()  # so that the pipe ends with the process
            pipes[ours] = rank
        while pipes:
            ready: list[Any] = wait(list(pipes))
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    found = pipe.recv()
                except (EOFError, OSError):
                    processes[rank].join(10)
                    raise ChildProcessError(
                        f"an engine ended: {rank + 1} of {count}, with code {processes[rank].exitcode}. What was"
                        " answered is kept. See its last lines above, then give the same command again to go on."
                    ) from None
                if found is None:
                    del pipes[pipe]
                elif isinstance(found, Exception):
                    raise found
                else:
                    yield rank + count * found[0], found[1]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(10)
            process.kill()


def _serve(pipe: Connection, answers: Callable[[Work], Judged], work: Work, devices: str | None) -> None:
    """The process of one engine: sends what it answers, then None."""
    end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key reaches all; the parent ends this process
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        for found in answers(work):
            pipe.send(found)
        pipe.send(None)
    except ValueError as error:
        pipe.send(ValueError(str(error)))  # those of pydantic cannot be pickled
    except OSError as error:
        pipe.send(error)
