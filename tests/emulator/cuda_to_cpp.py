"""CUDA C++ of our kernels to C++ for the emulated GPU: every asm statement becomes calls of functions of device.h."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

# A line of the file: a call, * standing for the operands in the order in which the instruction names them, and the
# instruction with % for each of them and $0, $1 for its own registers and labels in the order of their declaration.
LINES = Path(__file__).with_name("instructions.txt").read_text(encoding="utf-8").splitlines()
INSTRUCTIONS = {instruction: call for call, instruction in (re.split(r"\s{2,}", line, maxsplit=1) for line in LINES)}
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 .*, %, 1, 1, 1, 0(, 0)?$")
_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_OPERAND = re.compile(r'"[+=]?[rhlfn]"\s*\(')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"\s*')
_SHARED = re.compile(r"^(\s*)__shared__\s+(\w+)\s+([^;]+);", re.MULTILINE)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")


def translate(source: str, name: str) -> str:
    """C++ of the kernel `name`, to be compiled with device.h beside it.

    Raises:
        ValueError: An asm statement holds an instruction that is not in INSTRUCTIONS.
    """
    source = re.sub(r"//[^\n]*", "", source)
    source = _DYNAMIC.sub(r"\1* const \2 = (\1*)emu::dynamic_shared();", source)
    sites = count()
    source = _SHARED.sub(lambda found: found[1] + _static(found[2], found[3], sites), source)
    return f'#include "device.h"\n{_replace_asm(source)}\nEMU_KERNEL({name})\n'


def _static(kind: str, names: str, sites: Iterator[int]) -> str:
    """References to arrays in shared memory, one for each name."""
    arrays = re.findall(r"(\w+)\[([^\]]+)\]", names)
    at = "*({0} (*)[{2}])emu::static_shared({3}, sizeof({0}[{2}]))"
    made = [f"{kind} (&{name})[{size}] = {at.format(kind, name, size, next(sites))};" for name, size in arrays]
    return " ".join(made)


def _replace_asm(source: str) -> str:
    out, at = [], 0
    for found in _ASM.finditer(source):
        end = _closing(source, found.end())
        out += [source[at : found.start()], _calls(source[found.end() : end].lstrip())]
        at = source.index(";", end) + 1
    return "".join([*out, source[at:]])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis ends that opened before `start`; strings may hold others."""
    depth, at = 1, start
    while True:
        if string := _STRING.match(text, at):
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _calls(statement: str) -> str:
    if not statement.startswith('"'):
        raise ValueError(f"an asm statement starts with no string: {statement[:60]!r}. Write its instructions first.")
    at, template = 0, ""
    while found := _STRING.match(statement, at):
        template, at = template + found[1], found.end()
    starts = [found.end() for found in _OPERAND.finditer(statement, at)]
    operands = [statement[start : _closing(statement, start)] for start in starts]
    template = re.sub(r"\s+", " ", template.replace("\\n", " ")).strip()
    if not template:
        return ";"  # it orders what a compiler does
    parts = [template] if template.startswith("{") else [part.strip() for part in template.split(";") if part.strip()]
    return "{" + " ".join(_call(part, operands) for part in parts) + "}"


def _call(instruction: str, operands: list[str]) -> str:
    used = [f"({operands[int(number)]})" for number in re.findall(r"%(\d+)", instruction)]
    key = _normalized(instruction)
    if wgmma := _WGMMA.match(key):
        columns = int(wgmma[1])
        if wgmma[2]:  # both operands in shared memory
            return f"emu::multiply_group(&{used[0]}, nullptr, {used[-2]}, {used[-1]}, {columns});"
        return f"emu::multiply_group(&{used[0]}, &{used[columns // 2]}, 0, {used[-1]}, {columns});"
    if key not in INSTRUCTIONS:
        raise ValueError(f"no emulation of the instruction {key!r}. Add it to instructions.txt.")
    return f"emu::{INSTRUCTIONS[key].replace('*', ', '.join(used))};"


def _normalized(instruction: str) -> str:
    key = re.sub(r"%\d+", "%", instruction)
    declared = re.findall(r"\.reg \.\w+ ([\w, ]+);", key)
    local = [name for names in declared for name in names.replace(" ", "").split(",")]
    local += re.findall(r"(\w+):(?!:)(?<!::)", key)
    for number, name in enumerate(dict.fromkeys(local)):
        key = re.sub(rf"(?<![\w.:]){name}(?![\w.]|::)", f"${number}", key)
    return re.sub(r"\s*,\s*", ", ", key).strip()
