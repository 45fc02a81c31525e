"""A sender of weights whose receiver closes its socket in the middle ends with an error."""

import asyncio
import multiprocessing
import sys
import tempfile
from types import SimpleNamespace

import named_vllm  # noqa: F401  verl names it while it is imported
import torch
import zmq
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

nothing = dict.fromkeys(("synchronize", "ipc_collect", "empty_cache"), lambda: None)
transfer.get_torch_device = lambda: SimpleNamespace(**nothing)  # verl takes this machine for one with CUDA
TOLD = 7  # exit code of a sender that was told


def send(handle: str) -> None:
    """Two buckets of a MiB."""
    weights = ((f"w{index}", torch.zeros(200_000)) for index in range(2))
    try:
        asyncio.run(transfer.BucketedWeightSender(handle, 1, use_shm=True).async_send_weights(weights))
    except RuntimeError:
        sys.exit(TOLD)


handle = f"ipc://{tempfile.mkdtemp()}/sync.sock"
# A process: a thread that waits would keep this one from ending.
sender = multiprocessing.get_context("fork").Process(target=send, args=(handle,), daemon=True)
sender.start()
receiver = zmq.Context.instance().socket(zmq.REP)
receiver.setsockopt(zmq.RCVTIMEO, 20_000)  # ms
receiver.connect(handle)
receiver.recv()  # what names the buffer
receiver.send(b"")
receiver.recv()  # the first bucket
receiver.close()
sender.join(5)
assert not sender.is_alive(), "the sender waits for a receiver that has gone"
if sender.exitcode != TOLD:
    raise RuntimeError(f"the sender ended with {sender.exitcode}, and the second bucket did not arrive")
