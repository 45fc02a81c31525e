"""A name for each run on a machine, so that the sockets of two runs do not collide.

verl names its sockets after Ray's job id, which counts the drivers of one Ray cluster: it is 01000000 in the first run
of every cluster, and two runs beside each other, each with a cluster of its own, would send each other their weights.
"""

import hashlib

import ray

from verl_qerl.errors import UpstreamDriftError

ENV = "VERL_RAY_JOB_ID"  # where verl's rollout server tells its workers


def run_name() -> str:
    """Ray's job id and 12 hex digits of the SHA-256 of the cluster's session name (a path of a socket has 107 bytes).

    The same in driver, tasks and actors; a RuntimeError before Ray is initialized.
    """
    context = ray.get_runtime_context()
    digest = hashlib.sha256(context.get_session_name().encode()).hexdigest()[:12]
    return f"{context.get_job_id()}-{digest}"


def of_this_run(handle: str) -> str:
    """The address of verl's weight sync with `run_name` in the place of Ray's job id (left alone by patches/verl/0013).

    Raises:
        UpstreamDriftError: verl has put something else there.
    """
    name, job = run_name(), ray.get_runtime_context().get_job_id()
    if name in handle:
        return handle
    if handle.count(job) != 1:
        raise UpstreamDriftError(
            f"two runs on this machine could exchange weights: verl's socket is {handle}. Ray's job id, {job}, must be"
            " in it once. Install verl==0.9.1."
        )
    return handle.replace(job, name)
