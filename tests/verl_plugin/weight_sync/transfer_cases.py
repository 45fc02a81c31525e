"""Started by test_transfer_on_cpu.py: verl's sender and our receiver, each of which ends early. Prints JSON.

A process of its own, since verl resolves its platform once a process.
"""

import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
import time

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from verl_qerl import upstream
from verl_qerl.verl_plugin.shims import SENDING
from verl_qerl.verl_plugin.weight_sync.transfer import WatchfulReceiver, requiring

ELEMENTS = 200_000  # of float32: one tensor fills a bucket of a MiB


def send(handle, end):
    def weights():
        for index in range(3):
            yield f"w{index}", torch.full((ELEMENTS,), float(index))
        if end == "raises":
            raise ValueError("w3 holds NaN")
        if end == "dies":
            os._exit(9)
        yield "w3", torch.full((5,), 3.0)

    asyncio.run(BucketedWeightSender(handle, 1, use_shm=True).async_send_weights(weights()))


def case(folder, end):
    handle = f"ipc://{folder}/{end}.sock"
    start = multiprocessing.get_context("fork").Process if end == "dies" else threading.Thread
    sender = start(target=send, args=(handle, end))
    sender.start()
    received, last_at, error = {}, 0.0, None

    def receive(weights, is_last):
        nonlocal last_at
        received.update((name, tensor[0].item()) for name, tensor in weights)
        last_at = time.monotonic()

    try:
        WatchfulReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(receive)
    except RuntimeError as caught:
        error = str(caught)
    waited_s = time.monotonic() - last_at
    sender.join(60)
    return {"received": received, "error": error, "waited_s": waited_s}


def take(handle, end):
    """A receiver that ends after so many buckets, or takes its time, or all."""
    seen = []

    def receive(weights, is_last):
        seen.append(is_last)
        if end == "slow":
            time.sleep(1.2)
        if len(seen) == 2 and end == "raises":
            raise RuntimeError("no memory for w1")
        if len(seen) == 2 and end == "dies":
            os._exit(9)

    WatchfulReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(receive)


def sent_to(folder, end):
    """What becomes of a sender; of one whose receiver never comes, the third look finds that the engine has ended."""
    handle, looks, error = f"ipc://{folder}/{end}.receiver.sock", [], None
    start = multiprocessing.get_context("spawn").Process if end == "dies" else threading.Thread
    receiver = start(target=take, args=(handle, end)) if end != "never comes" else None
    if receiver is not None:
        receiver.start()

    def look():
        looks.append(1)
        if end == "never comes" and len(looks) == 3:
            raise RuntimeError("the engine has ended")

    began = time.monotonic()
    try:
        with requiring(look):
            send(handle, "whole")
    except RuntimeError as caught:
        error = str(caught)
    seconds = time.monotonic() - began
    if receiver is not None:
        receiver.join(60)
    return {"error": error, "seconds": seconds, "looks": len(looks)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # A process is forked while there are no threads yet.
        found = {end: case(folder, end) for end in ("dies", "whole", "raises")}
        upstream.install(SENDING)
        found |= {f"to one that {end}": sent_to(folder, end) for end in ("dies", "is whole", "raises", "never comes")}
        found["to one that is slow"] = sent_to(folder, "slow")
        print(json.dumps(found))
