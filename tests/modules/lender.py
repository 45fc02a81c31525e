"""Started by tests: a process that owns the packed base of a model, lends it and does what it is told.

python lender.py <model> <job>       a command a line: `flip N` changes byte N, `read N` says it, `whole` digests
"""

import json
import sys

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.modules.convert import packed_weights, replace_linears
from verl_qerl.modules.placement.lending import Lender, meeting_place
from verl_qerl.modules.placement.shared_base import share_base


def main():
    path, job = sys.argv[1:]
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = None
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    packed = {
        name: item
        for name, item in packed_stream(open_source(path), NVFP4(scale="minmax"))
        if isinstance(item, PackedWeight)
    }
    for name, linear in replace_linears(model, packed.__contains__).items():
        linear.fill(packed[name].to("cuda" if torch.cuda.is_available() else "cpu"))
    flat = Lender(share_base(model), meeting_place(job, 0)).base.flat
    print("lending", flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "flip":
            flat[int(argument)] ^= 0x11
        answer = {name: weight_digest(weight) for name, weight in packed_weights(model)} if command == "whole" else None
        print(json.dumps(answer if answer is not None else int(flat[int(argument)])), flush=True)


if __name__ == "__main__":
    main()
