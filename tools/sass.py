"""Facts of one kernel's machine code, read from the text of nvdisasm: instructions, loops, a hash that names do not change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

LABEL = re.compile(r"^(\.L\w+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);")
TARGET = re.compile(r"\.L\w+")
# where a parameter lies depends on the order of parameters, which is no work
PARAMETER = re.compile(r"c\[0x0\]\[(?:U?R\w+\+)?(0x[0-9a-f]+)\]")
JUMPS = ("BRA", "BRX", "JMP", "JMX")
ENDS = ("EXIT", "RET")


@dataclass(frozen=True)
class Instruction:
    predicate: str
    name: str
    operands: str
    labels: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def targets(self) -> list[str]:
        return TARGET.findall(self.operands) if self.opcode in JUMPS else []

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        return bool(self.predicate) or self.opcode not in (*JUMPS, *ENDS)


def instructions(sass: str) -> list[Instruction]:
    """In order, without the padding."""
    found, labels = [], []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels.append(label[1])
        elif (code := INSTRUCTION.match(line)) and code[2] != "NOP":
            found.append(Instruction((code[1] or "").strip(), code[2], code[3].strip(), tuple(labels)))
            labels = []
    return found


def renamed(pattern: re.Pattern[str], text: str, letter: str) -> str:
    """Every match by the number of its first occurrence."""
    number, known = count(), dict[str, str]()

    def name_of(match: re.Match[str]) -> str:
        if match[0] not in known:
            known[match[0]] = f"{letter}{next(number)}"
        return known[match[0]]

    return pattern.sub(name_of, text)


def digest(code: list[Instruction]) -> str:
    """Of the instructions and their operands, without addresses, names of symbols and places of parameters."""
    lines = "\n".join(" ".join((*x.labels, x.predicate, x.name, x.operands)) for x in code)
    plain = renamed(PARAMETER, renamed(TARGET, lines, "L"), "c")
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


# --- loops -------------------------------------------------------------------------------------------------------------------


def successors(code: list[Instruction]) -> list[list[int]]:
    place = {label: i for i, x in enumerate(code) for label in x.labels}
    steps = []
    for i, x in enumerate(code):
        following = [i + 1] if x.goes_on and i + 1 < len(code) else []
        steps.append(following + [place[label] for label in x.targets if label in place])
    return steps


def dominators(steps: list[list[int]]) -> list[int]:
    """The immediate dominator of every instruction that can be reached, -1 for others (Cooper, Harvey and Kennedy)."""
    order, seen, stack = [], {0}, [(0, iter(steps[0]))]
    while stack:
        node, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(steps[following])))
    rank = {node: i for i, node in enumerate(order)}
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for following in steps[node]:
            before[following].append(node)
    above = [-1] * len(steps)
    above[0] = 0
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            first, *others = (n for n in before[node] if above[n] >= 0)
            for other in others:
                a, b = first, other
                while a != b:
                    a, b = (above[a], b) if rank[a] < rank[b] else (a, above[b])
                first = a
            changed |= above[node] != first
            above[node] = first
    return above


def loops(code: list[Instruction]) -> Iterator[frozenset[int]]:
    """The instructions of every natural loop; a head that several branches lead back to has one loop."""
    if not code:
        return
    steps = successors(code)
    above = dominators(steps)
    back: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for i, following in enumerate(steps):
        for n in following:
            before.setdefault(n, []).append(i)
            up = i
            while above[i] >= 0 and up not in (n, 0):
                up = above[up]
            if above[i] >= 0 and up == n:
                back.setdefault(n, []).append(i)
    for head, ends in back.items():
        body, stack = {head}, list(ends)
        while stack:
            node = stack.pop()
            if node not in body and above[node] >= 0:
                body.add(node)
                stack += before.get(node, [])
        yield frozenset(body)


def largest_loop(code: list[Instruction]) -> int:
    """Instructions of the largest loop that has no other in it: among those with matmuls, where there are any.

    Loops that wait for a barrier have no matmul, so that they do not count.
    """
    found = list(loops(code))
    products = [body for body in found if any(code[i].opcode == "HGMMA" for i in body)]
    found = products or found
    inner = [body for body in found if not any(other < body for other in found)]
    return max(map(len, inner), default=0)


def facts(sass: str) -> dict[str, Any]:
    """Null where there is no disassembler."""
    if not sass:
        return dict.fromkeys(("instructions", "loop", "hash"))
    code = instructions(sass)
    return {"instructions": len(code), "loop": largest_loop(code), "hash": digest(code)}
