"""Started by test_engine_formats_on_cpu.py as engine_cases.py is: adapters on bases in int8, fp8 and mxfp4."""

from engine_cases import OUT, base, build, main, resume, step


def refused():
    """What cannot be loaded, and checkpoints of a base in another format."""
    cases = {
        "another format": lambda: build("int8", qerl={"format": "fp8"}),
        "nvfp4": lambda: build("int8"),
        "experts": lambda: build("moe", qerl={"format": "int8"}),
    }
    engine = build("bf16", qerl={"format": "int8"})
    step(engine)
    engine.save_checkpoint(f"{OUT}/of-int8", global_step=1)
    other = build("bf16", qerl={"format": "fp8"})
    cases["checkpoint"] = lambda: other.load_checkpoint(f"{OUT}/of-int8", del_local_after_load=False)
    found = {}
    for name, run in cases.items():
        try:
            run()
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


RUNS = {name: lambda name=name: base("bf16", format=name) for name in ("fp8", "int8", "mxfp4")}
RUNS |= {f"{name} directory": lambda name=name: base(name, format=name) for name in ("fp8", "int8", "mxfp4")}
RUNS |= {
    "tied": lambda: base("tied", format="int8"),
    "resume": lambda: resume(True, {"format": "int8"}, {"format": "int8"}),
    "refused": refused,
}

if __name__ == "__main__":
    main(RUNS)
