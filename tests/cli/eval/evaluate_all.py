"""Started by test_eval_vllm_on_cpu.py: several evaluations in one process.

python evaluate_all.py <json of [{"argv", "forget_adapter"}]>
"""

import gc
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def evaluate(argv, forget_adapter=False):
    from verl_qerl.cli import main
    from verl_qerl.vllm_plugin.offline import OfflineEngine

    run = OfflineEngine._run
    if forget_adapter:  # as QeRL's evaluator: the adapter is loaded, and answers are asked for without it

        def without(self, prompts, with_adapter, **sampling):
            return run(self, prompts, with_adapter and "prompt_logprobs" in sampling, **sampling)

        OfflineEngine._run = without
    try:
        return main(argv)
    except SystemExit as error:
        return error.code
    finally:
        OfflineEngine._run = run


if __name__ == "__main__":
    codes = []
    for case in json.loads(sys.argv[1]):
        sys.stderr.write(f"CASE {len(codes)}\n")
        codes.append(evaluate(**case))
        gc.collect()
    sys.stdout.write(f"RESULT {json.dumps(codes)}\n")
