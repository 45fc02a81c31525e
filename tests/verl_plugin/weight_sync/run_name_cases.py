"""Started by test_run_name_on_cpu.py on two ranks: two Ray clusters of one machine, at the same time.

python run_name_cases.py <folder where they wait for each other>

Each prints what its driver and an actor say as JSON.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

# A path of pytest's may be too long for Ray's sockets. Two clusters that start at once would share a session's folder.
folder = tempfile.TemporaryDirectory()
os.environ["RAY_TMPDIR"] = folder.name

import ray  # noqa: E402

from verl_qerl.verl_plugin.weight_sync.run_name import of_this_run, run_name  # noqa: E402


def named():
    job = ray.get_runtime_context().get_job_id()
    return {"job": job, "name": run_name(), "handle": of_this_run(f"ipc:///tmp/zmq-{job}-replica-0.sock")}


@ray.remote(num_cpus=0)
class Actor:
    def named(self):
        return named()


def wait_for_the_other():
    ready, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    (ready / str(rank)).touch()
    end = time.monotonic() + 600
    while not (ready / str(1 - rank)).exists():
        assert time.monotonic() < end, "the other cluster has not started"
        time.sleep(0.05)


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
try:
    found = {"driver": named(), "actor": ray.get(Actor.remote().named.remote())}
    wait_for_the_other()
finally:
    ray.shutdown()
    folder.cleanup()
print(json.dumps(found))
