"""Started by test_engines_on_cpu.py: questions dealt out to processes that answer without vLLM.

python several_engines.py <json of {"devices", "questions", "behaviour"}>; a line for each answer, then how it ended.
"""

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass

from verl_qerl.cli.eval.engines import Work, in_processes
from verl_qerl.cli.eval.records import Answer


@dataclass(frozen=True)
class Options:
    """In the place of EngineOptions, whose module imports torch."""

    seed: int


def answers(work):
    """Says of each question by whom it was answered; the engine with question 1 misbehaves."""
    who = {"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "seed": work.options.seed}
    if not work.prompts:
        raise ValueError("an engine has nothing to do")
    ours = [1] in work.prompts
    for number, prompt in reversed(list(enumerate(work.prompts))):
        text = json.dumps({"asked": prompt, "truth": work.truths[number], **who})
        yield number, (Answer(text, 1, False, None, False, False),)
        if ours and work.sampling["behaviour"] == "refuse":
            raise ValueError("the adapter changes nothing")
        if ours and work.sampling["behaviour"] == "die":
            os._exit(7)
        if work.sampling["behaviour"] == "wait":
            time.sleep(120)


def main(devices, questions, behaviour):
    numbers = range(questions)
    work = Work(Options(seed=5), [[n] for n in numbers], [str(n) for n in numbers], {"behaviour": behaviour})
    try:
        with closing(in_processes(work, devices, answers)) as found:
            for number, (answer,) in found:
                sys.stdout.write(json.dumps({"number": number, **json.loads(answer.text)}) + "\n")
                sys.stdout.flush()
                if behaviour == "leave":
                    break
    except (ValueError, OSError) as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
