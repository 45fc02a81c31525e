"""The process group starts on a platform whose device is the CPU."""

import os
import tempfile
from types import SimpleNamespace

import torch
from verl.plugin.platform import set_platform
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group_ray

set_platform(SimpleNamespace(device_name="cpu", communication_backend_name=lambda: "gloo"))
with tempfile.TemporaryDirectory() as folder:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{folder}/store"}
    try:
        initialize_global_process_group_ray(timeout_second=60)
    except ValueError as error:
        raise AssertionError(f"the process group does not start: {error}") from error
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    assert total.tolist() == [1.0, 1.0], f"one rank sums ones to {total.tolist()}"
    destroy_global_process_group()
