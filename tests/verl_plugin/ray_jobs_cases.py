"""Started by test_inert_on_cpu.py: a Ray cluster of two nodes, and two drivers that attach to it one after the other.

python ray_jobs_cases.py                       starts the cluster and the drivers
python ray_jobs_cases.py <address> [<option>]  a driver; prints what an actor of each node says, as JSON
"""

import json
import os
import subprocess
import sys
import tempfile

if len(sys.argv) == 1:
    folder = tempfile.TemporaryDirectory()  # a path of pytest's may be too long for Ray's sockets
    os.environ["RAY_TMPDIR"] = folder.name

import ray
from omegaconf import OmegaConf

IN_A_CHILD = "import os; print(os.environ.get('VERL_QERL_ACTIVE'))"


@ray.remote(num_cpus=1)
class Worker:
    def told(self):
        child = subprocess.run([sys.executable, "-c", IN_A_CHILD], capture_output=True, text=True, check=True)
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "own": os.environ["OWN"], "in a child": child.stdout.strip()}


def drive(address, options):
    from verl_qerl.verl_plugin.driver import tell_workers

    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"runtime_env": {"py_executable": None}}}})
    OmegaConf.set_struct(config, True)  # as Hydra's
    if options:
        tell_workers(config)
    # As verl's run_ppo merges it.
    runtime_env = OmegaConf.merge({"env_vars": {"NCCL_DEBUG": "WARN"}}, config.ray_kwargs.ray_init.runtime_env)
    ray.init(address=address, log_to_driver=False, runtime_env=OmegaConf.to_container(runtime_env))
    kind = Worker.options(runtime_env={"env_vars": {"OWN": "1"}}, scheduling_strategy="SPREAD")
    print(json.dumps(ray.get([worker.told.remote() for worker in [kind.remote(), kind.remote()]])))


def both():
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        for options in (["+aqn.enabled=true"], []):
            command = [sys.executable, __file__, cluster.address, *options]
            print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    finally:
        cluster.shutdown()
        folder.cleanup()


if len(sys.argv) == 1:
    both()
else:
    drive(sys.argv[1], sys.argv[2:])
