"""A check of machine code: a uniform register that is read although nothing has written it.

ptxas 12.8 assembled a kernel so: the descriptor of a product's operand held whatever was left in the register, and the
product read any place in shared memory, or none that exists. The PTX was right.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"(\.L\w+):")
TARGET = re.compile(r"\.L\w+")
UNIFORM = re.compile(r"\bUR(\d+)\b(\.64)?")
GMMA_OPERAND = re.compile(r"gdesc\[UR(\d+)\]")
DESCRIPTOR = re.compile(r"\bdesc\[UR(\d+)\]")
WRITERS = ("U", "R2UR", "S2UR", "VOTEU", "REDUX")  # prefixes of instructions with a uniform result
PREDICATE_WRITERS = ("UISETP", "UPLOP", "UP2R")


@dataclass
class Instruction:
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    following: list[int]  # the instructions that may come next


def _pair(first: int) -> set[int]:
    return {first, first + 1}


def _read(operand: str, wide: bool, position: int) -> set[int]:
    """Uniform registers of one operand. Of a product in registers and shared memory only the latter has a descriptor,
    in the upper half of its four registers."""
    reads = set()
    for first in map(int, GMMA_OPERAND.findall(operand)):
        reads |= _pair(first + 2) | (set() if position == 2 else _pair(first))
    for first in map(int, DESCRIPTOR.findall(operand)):
        reads |= _pair(first)
    for first, is_pair in UNIFORM.findall(DESCRIPTOR.sub("", GMMA_OPERAND.sub("", operand))):
        reads |= _pair(int(first)) if is_pair or wide else {int(first)}
    return reads


def _registers(name: str, rest: str) -> tuple[frozenset[int], frozenset[int]]:
    """Uniform registers that an instruction reads, and those that it writes."""
    operands = [operand.strip() for operand in re.split(r",\s*(?![^\[]*\])", rest)]
    writes: set[int] = set()
    uniform = name.startswith(WRITERS) and not name.startswith(PREDICATE_WRITERS)
    if uniform and (result := re.fullmatch(r"UR(\d+)", operands[0])):
        count = 4 if ".128" in name else 2 if "WIDE" in name or (".64" in name and "USHF" not in name) else 1
        writes = {int(result[1]) + i for i in range(count)}
    wide = ".64" in name and uniform and not name.startswith(("USHF", "ULDC"))
    reads = [_read(operand, wide, i) for i, operand in enumerate(operands) if i or not writes]
    return frozenset(set().union(*reads)), frozenset(writes)


def parse(sass: str) -> list[Instruction]:
    found: list[tuple[str | None, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.search(line):
            found.append((instruction[1], instruction[2], instruction[3]))
    instructions = []
    for i, (predicate, name, rest) in enumerate(found):
        following = [i + 1]
        if name.startswith(("BRA", "EXIT", "RET")):
            always = not predicate and "," not in rest
            following = [labels[target] for target in TARGET.findall(rest)] + [i + 1] * (not always)
        instructions.append(Instruction(f"{name} {rest}", *_registers(name, rest), following))
    return instructions


def unwritten_reads(sass: str) -> list[str]:
    """Instructions that some path reaches without a write of a uniform register that they read."""
    instructions = parse(sass)
    written: list[frozenset[int] | None] = [None] * (len(instructions) + 1)  # on every path that leads there
    written[0] = frozenset()
    pending = [0]
    while pending:
        i = pending.pop()
        before = written[i]
        if i == len(instructions) or before is None:
            continue
        for following in instructions[i].following:
            known = written[following]
            after = before | instructions[i].writes
            after = after if known is None else after & known
            if after != known:
                written[following] = after
                pending.append(following)
    pairs = zip(instructions, written, strict=False)
    return [x.text for x, known in pairs if known is not None and not x.reads <= known]


def disassembled(cubin: bytes, nvdisasm: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
