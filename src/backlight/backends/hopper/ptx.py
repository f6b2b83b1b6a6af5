"""PTX of our own kernels, rewritten before ptxas reads it: the same numbers in fewer instructions.

**Descriptors.** The k-th matmul of a product reads its operands through descriptors, 64-bit numbers H + a + k, where a is an
address of at most 15 bits and the low 16 bits of H are zero. Triton writes (a + k) | H since 3.9, with part of H added to k in
places, and a + (H + k) before; ptxas makes two instructions of the first (the low word, and the high word again) and a chain of
carries of some of the second. For (a | H) + k it takes one. With k < 2^15 nothing carries out of the low 16 bits, so that all
three are the same integer; what is needed for that is read off the text, and what is not made that way stays as it is.

**Commits.** Where Triton 3.9 leaves arithmetic between the last matmul of a group and the end of the group, ptxas adds an empty
matmul to carry the end. The end moves up to its matmul, past arithmetic on registers only.

The text goes back into Triton by its launch option `ir_override`, as a file in Triton's cache: nothing in the process changes
for anybody else's kernels, and the option is a part of the key that Triton caches under. The environment variable
`BACKLIGHT_PTX` takes `as-is` (nothing is rewritten) and `every` (the forward's kernels too).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from backlight._private.triton import compiler_options, kernel_cache

VARIABLE = "BACKLIGHT_PTX"
AS_IS, EVERY = "as-is", "every"

# a and k are below, so that their sum does not reach H, which has none of the low bits
SMALL = 1 << 15
LOW = (1 << 16) - 1

DESCRIPTOR = re.compile(r"^\t(or\.b64|add\.s64) \t(%rd\d+), (%rd\d+), (-?\d+);$", re.MULTILINE)
WIDENED = re.compile(r"^\tcvt\.u64\.u32 \t(%rd\d+), (%r\d+);$", re.MULTILINE)
ADDED = re.compile(r"^\tadd\.s32 \t(%r\d+), (%r\d+), (\d+);$", re.MULTILINE)
JOINED = re.compile(r"^\tor\.b32 \t(%r\d+), (%r\d+), (\d+);$", re.MULTILINE)
MASKED = re.compile(r"^\tand\.b32 \t(%r\d+), %r\d+, (\d+);$", re.MULTILINE)
EXTRACTED = re.compile(r"^\tbfe\.u32 \t(%r\d+), %r\d+, \d+, (\d+);$", re.MULTILINE)
MATMUL = "wgmma.mma_async"
# the operands that a statement writes come first; statements that write none count as well, which is on the safe side
WRITTEN = re.compile(r"[\n;{:]\s*(?:@!?%?\w+\s+)?[a-z][\w.:]*\s+(?:\{([^{}]*)\}|(%\w+(?:\|%\w+)?))")
REGISTER = re.compile(r"%\w+")
COMMIT = "\twgmma.commit_group.sync.aligned;"
END_OF_ASSEMBLY = "\t// end inline asm"
ARITHMETIC = re.compile(r"^\t(?:add|sub|mul|mad|fma|neg|min|max|and|or|xor|shl|shr|bfe|cvt|selp|setp|ex2)\.[\w.]+ \t%")
REMARK = re.compile(r"^(?:\t\.loc\t|\$L__tmp\d+:$)")


# --- the text ----------------------------------------------------------------------------------------------------------------


def leaner(ptx: str) -> str:
    """The same program; the same text where it has nothing of what is rewritten."""
    return early_commits(lean_descriptors(ptx))


def lean_descriptors(ptx: str) -> str:
    """Every descriptor of a matmul as (a | H) + k, where it can be seen to be the same number."""
    used = {name for line in ptx.splitlines() if MATMUL in line for name in REGISTER.findall(line)}
    writes = Counter(name for found in WRITTEN.finditer(ptx) for name in REGISTER.findall(found[1] or found[2]))

    def once(pattern: re.Pattern[str]) -> dict[str, Sequence[str]]:
        """What the pattern says of registers that nothing else writes."""
        return {found[1]: found.groups()[1:] for found in pattern.finditer(ptx) if writes[found[1]] == 1}

    widened, added = once(WIDENED), once(ADDED)
    added |= {name: (address, high) for name, (address, high) in once(JOINED).items() if not int(high) & LOW}
    addresses = {name for name, (mask,) in once(MASKED).items() if int(mask) < SMALL}
    addresses |= {name for name, (bits,) in once(EXTRACTED).items() if 1 << int(bits) <= SMALL}

    def lean(found: re.Match[str]) -> str:
        how, name, wide, constant = found[1], found[2], found[3], int(found[4])
        (address,) = widened.get(wide, ("",))
        low = 0
        if how == "or.b64":
            address, text = added.get(address, (address, "0"))
            low = int(text)
            # what is or'ed to a + low has to be H or the rest of it
            if constant & (LOW | low):
                return found[0]
        step = (constant + low) & LOW
        high = constant + low - step
        if name not in used or address not in addresses or step >= SMALL or not (step or low):
            return found[0]
        return f"\tcvt.u64.u32 \t{name}, {address};\n\tor.b64 \t{name}, {name}, {high};\n\tadd.s64 \t{name}, {name}, {step};"

    return DESCRIPTOR.sub(lean, ptx)


def early_commits(ptx: str) -> str:
    """Every group of matmuls ends behind the last of them, where only arithmetic on registers lies between."""
    lines: list[str] = []
    for line in ptx.split("\n"):
        place = len(lines)
        if line == COMMIT:
            while place and (ARITHMETIC.match(lines[place - 1]) or REMARK.match(lines[place - 1])):
                place -= 1
            ends = lines[place - 1] == END_OF_ASSEMBLY and any(MATMUL in before for before in lines[place - 3 : place])
            place = place if ends else len(lines)
        lines.insert(place, line)
    return "\n".join(lines)


# --- the launch --------------------------------------------------------------------------------------------------------------


def choice() -> str:
    """What the environment asks for."""
    return os.environ.get(VARIABLE, "")


def possible() -> bool:
    return kernel_cache is not None and "ir_override" in compiler_options


def in_use() -> str:
    """What happens to the PTX of kernels, in words."""
    if not possible():
        return "PTX as Triton writes it: this version takes no other"
    if choice() == AS_IS:
        return f"PTX as Triton writes it: {VARIABLE} asks for that"
    return f"PTX rewritten for {'every kernel' if choice() == EVERY else 'main kernels of the backward'}: descriptors, commits"


def override(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any], wanted: bool) -> dict[str, Any]:
    """Options that make Triton compile the leaner text of a launch; none where there is nothing to gain.

    The kernel is compiled once without them, since the text comes from Triton; both are found in its cache later.
    """
    wanted = (wanted or choice() == EVERY) and choice() != AS_IS
    # a stand-in of the tests compiles nothing
    if not (wanted and possible() and hasattr(kernel, "warmup")):
        return {}
    made = kernel.warmup(*args, grid=grid, **named)
    ptx = getattr(made, "asm", {}).get("ptx")
    text = None if ptx is None else leaner(ptx)
    if text is None or text == ptx:
        return {}
    folder = kernel_cache(hashlib.sha256(text.encode()).hexdigest())
    name = f"{kernel.fn.__name__}.ptx"
    return {"ir_override": folder.get_file(name) or folder.put(text, name, binary=False)}
