"""Started by test_lend_base_on_cpu.py, on one rank or more: engines that share their base. Saves what it found.

python lend_base_cases.py <folder of models> <folder for findings> <case>
"""

import tempfile

import engine_cases
import torch
from engine_cases import OUT, base, build, main, resume, step

from verl_qerl.modules.placement.lending import borrow, meeting_place
from verl_qerl.modules.placement.repacked_linear import RepackedNVFP4Linear

tempfile.tempdir = OUT
SHARED = {"share": True}


def taken(engine):
    """The engine, its base given to a rollout: another engine of this process may lend then."""
    lender = engine.weights.lender
    rank = torch.distributed.get_rank()
    assert lender.path == meeting_place("0", rank)
    borrowed = borrow(lender.path, torch.device("cpu"))
    assert torch.equal(borrowed.base.flat, lender.base.flat)
    lender._thread.join(60)
    return engine


def built(*args, **kwargs):
    engine = build(*args, **kwargs)
    return engine if engine.weights.lender is None else taken(engine)


def shared():
    engine = build("bf16", qerl=SHARED)
    try:
        engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
        error = None
    except RuntimeError as caught:
        error = str(caught)
    taken(engine)
    linears = [module for module in engine.module.modules() if isinstance(module, RepackedNVFP4Linear)]
    storage = engine.weights.lender.base.flat.untyped_storage().data_ptr()
    pointers = [linear.tiles[0].data_ptr() for linear in linears]
    engine.to("cpu", model=True, optimizer=True, grad=True)
    step(engine)
    return {
        "error": error,
        "linears": len(linears),
        "in one piece": all(t.untyped_storage().data_ptr() == storage for one in linears for t in one.tiles),
        "stays": pointers == [linear.tiles[0].data_ptr() for linear in linears],
    }


def norms():
    options = (({}, True), (SHARED, True), (SHARED, False), ({}, False))
    return [step(built("bf16", qerl=qerl, fused=fused)) for qerl, fused in options]


if __name__ == "__main__":
    import engine_cases

    engine_cases.build = built
    main(
        {
            "shared": shared,
            "norms": norms,
            "plain": lambda: base("bf16"),
            "base": lambda: base("bf16", **SHARED),
            "resume": lambda: resume(True, SHARED, None),
        }
    )
