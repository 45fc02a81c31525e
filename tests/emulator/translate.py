"""CUDA C++ of our kernels to C++ for the emulated GPU: every asm statement becomes a call of a function of device.h."""

import re

# Function of device.h by instruction, its operands written as %. One that is not here is an error.
INSTRUCTIONS = {
    "mul.rn.bf16x2 %, %, %": "mul_bf16x2",
    "{.reg .b16 $0, $1; mov.b32 {$0, $1}, %; mov.b32 %, {$0, $0}; mov.b32 %, {$1, $1};}": "spread_halves",
    "cvt.rn.bf16.f32 %, %": "cvt_bf16",
    "barrier.cluster.arrive.aligned": "cluster_arrive",
    "barrier.cluster.wait.aligned": "cluster_wait",
    "barrier.cluster.arrive.release.aligned": "cluster_arrive",
    "barrier.cluster.wait.acquire.aligned": "cluster_wait",
    "griddepcontrol.launch_dependents": "launch_dependents",
    "griddepcontrol.wait": "await_grids",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%, %, %, %}, {%, %, %, %}, {%, %}, {%, %, %, %}": "mma_16_8_16",
    "bar.sync 1, %": "bar_sync(1, ",
    "bar.sync 2, %": "bar_sync(2, ",
    "bar.sync %, %": "bar_sync",
    "bar.sync %, 128": "bar_sync(, 128)",
    "red.release.gpu.global.add.s32 [%], 1": "red_release_add(, 1)",
    "ld.acquire.gpu.global.s32 %, [%]": "ld_acquire",
    "st.release.gpu.global.s32 [%], 1": "st_release(, 1)",
    "prefetch.global.L2 [%]": "prefetch",
    "ld.shared.v4.u32 {%, %, %, %}, [%]": "ld_shared_v4",
    "ld.shared.v2.u32 {%, %}, [%]": "ld_shared_v2",
    "ld.shared.u32 %, [%]": "ld_shared_u32",
    "ld.shared.u16 %, [%]": "ld_shared_u16",
    "st.shared.v4.u32 [%], {%, %, %, %}": "st_shared_v4",
    "st.shared.v2.u32 [%], {%, %}": "st_shared_v2",
    "st.shared.u32 [%], %": "st_shared_u32",
    "st.shared.u16 [%], %": "st_shared_u16",
    "st.shared.f32 [%], %": "st_shared_f32",
    "{.reg .u32 $0; mapa.shared::cluster.u32 $0, %, %; ld.shared::cluster.f32 %, [$0];}": "ld_rank_f32",
    "{.reg .u32 $0; mapa.shared::cluster.u32 $0, %, %; ld.shared::cluster.v4.f32 {%, %, %, %}, [$0];}": "ld_rank_v4_f32",
    "{.reg .b32 $0; mapa.shared::cluster.u32 $0, %, %; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];}": (
        "arrive_at_rank"
    ),
    "mapa.shared::cluster.u32 %, %, %": "mapa",
    "fence.proxy.async.shared::cta": "fence_proxy",
    "fence.proxy.async": "fence_proxy",
    "fence.mbarrier_init.release.cluster": "no_effect",
    "mbarrier.init.shared::cta.b64 [%], %": "barrier_init",
    "mbarrier.arrive.shared::cta.b64 _, [%]": "arrive",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%]": "arrive",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%], %": "barrier_arrive",
    "{.reg .pred $0; $1: mbarrier.try_wait.parity.shared::cta.b64 $0, [%], %; @$0 bra $2; bra $1; $2:}": "barrier_wait",
    "{.reg .pred $0; $1: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 $0, [%], %; @$0 bra $2; bra $1; $2:}": (
        "barrier_wait"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%], [%, {%, %}], [%], %": (
        "copy_block"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%], [%, {%, %}], [%]": (
        "copy_block_plain"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
    "[%], [%, {%, %}], [%], %, %": "multicast",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%], [%, {%, %}], [%], %": "multicast_plain",
    "createpolicy.fractional.L2::evict_first.b64 %, 1.0": "create_policy",
    "createpolicy.fractional.L2::evict_last.b64 %, 1.0": "create_policy",
    "wgmma.fence.sync.aligned": "group_fence",
    "wgmma.commit_group.sync.aligned": "group_commit",
    "wgmma.wait_group.sync.aligned %": "group_wait",
    "setmaxnreg.dec.sync.aligned.u32 %": "no_effect",
    "setmaxnreg.inc.sync.aligned.u32 %": "no_effect",
}
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 .*, %, 1, 1, 1, 0$")
_OPERAND = re.compile(r'"[+=]?[rhlfn]"\s*\(')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"\s*')
_SHARED = re.compile(r"^(\s*)__shared__\s+(\w+)\s+([^;]+);", re.MULTILINE)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")


def translate(source: str, name: str) -> str:
    """C++ of the kernel `name`, to be compiled with device.h beside it.

    Raises:
        ValueError: An asm statement holds an instruction that is not in INSTRUCTIONS.
    """
    source = _without_comments(source)
    source = _DYNAMIC.sub(r"\1* const \2 = (\1*)emu::dynamic_shared();", source)
    sites = iter(range(1000))
    source = _SHARED.sub(lambda found: found[1] + _static(found[2], found[3], sites), source)
    return f'#include "device.h"\n{_replace_asm(source)}\nEMU_KERNEL({name})\n'


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*", "", source)


def _static(kind: str, names: str, sites) -> str:
    made = []
    for name, size in re.findall(r"(\w+)\[([^\]]+)\]", names):
        array = f"{kind} (&{name})[{size}]"
        made.append(f"{array} = *({kind} (*)[{size}])emu::static_shared({next(sites)}, sizeof({kind}[{size}]));")
    return " ".join(made)


def _replace_asm(source: str) -> str:
    out, at = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile)?\s*\(", source):
        end = _closing(source, found.end())
        out += [source[at : found.start()], _calls(source[found.end() : end])]
        at = source.index(";", end) + 1
    return "".join([*out, source[at:]])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis ends that opened before `start`; strings may hold others."""
    depth, at = 1, start
    while True:
        if text[at] == '"':
            at = _STRING.match(text, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _calls(statement: str) -> str:
    statement = statement.lstrip()
    if not statement.startswith('"'):
        raise ValueError(f"an asm statement starts with no string: {statement[:60]!r}.")
    at, template = 0, ""
    while found := _STRING.match(statement, at):
        template, at = template + found[1], found.end()
    operands = []
    for found in _OPERAND.finditer(statement, at):
        operands.append(statement[found.end() : _closing(statement, found.end())])
    template = re.sub(r"\s+", " ", template.replace("\\n", " ").replace("\\t", " ")).strip()
    if not template:
        return ";"  # it orders what a compiler does
    parts = [template] if template.startswith("{") else [part.strip() for part in template.split(";") if part.strip()]
    return "{" + " ".join(_call(part, operands) for part in parts) + "}"


def _call(instruction: str, operands: list[str]) -> str:
    used = [operands[int(number)] for number in re.findall(r"%(\d+)", instruction)]
    key = _normalized(instruction)
    wgmma = _WGMMA.match(key)
    if wgmma:
        columns = int(wgmma[1])
        return f"emu::multiply_group(&({used[0]}), &({used[columns // 2]}), {used[-1]}, {columns});"
    if key not in INSTRUCTIONS:
        raise ValueError(f"no emulation of the instruction {key!r}. Add it to INSTRUCTIONS of translate.py.")
    name, _, fixed = INSTRUCTIONS[key].partition("(")
    before, comma, after = fixed.rstrip(")").partition(",")
    arguments = [*([before] if before.strip() else []), *used, *([after] if after.strip() else [])]
    return f"emu::{name}({', '.join(arguments)});"


def _normalized(instruction: str) -> str:
    key = re.sub(r"%\d+", "%", instruction)
    local = [name for names in re.findall(r"\.reg \.\w+ ([\w, ]+);", key) for name in names.replace(" ", "").split(",")]
    local += re.findall(r"(\w+):(?!:)", key)
    for number, name in enumerate(dict.fromkeys(local)):
        key = re.sub(rf"(?<![\w.:]){name}(?![\w.]|::)", f"${number}", key)
    return re.sub(r"\s*,\s*", ", ", key).strip()
