"""PTX that is rewritten before ptxas reads it: the same numbers, nothing else changed, nobody else's kernels touched."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from aot import Compilation, Report, through_triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from backlight import info
from backlight.backends.hopper import ptx
from backlight.backends.hopper.compat import COMPILER
from backlight.backends.hopper.compiled import start

HIGH = 0x4000004000010000
UPPER = 0x4000004000000000
MATMUL = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r90,%r91}, %rd9, %rd8, 1, 1, 1, 0, 0;"
END = "\n\n\t// end inline asm"


def text(*lines: str, matmul: str = MATMUL) -> str:
    return "\n".join(["\tld.param.b32 \t%r1, [kernel_param_0];", *(f"\t{line}" for line in lines), matmul, END, ""])


# --- numbers -----------------------------------------------------------------------------------------------------------------


def values(ptx: str, first: int) -> list[int]:
    """What the matmuls of a text without branches get as descriptors, when %r1 is `first`."""
    known = {"%r1": first}
    found = []
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            found += [known.get(name, 0) for name in re.findall(r"%rd\d+", line)]
            continue
        words = line.replace(",", " ").replace(";", " ").split()
        if not words or words[0] not in OPERATIONS:
            continue
        numbers = [known[x] if x.startswith("%") else int(x) for x in words[2:]]
        known[words[1]] = OPERATIONS[words[0]](*numbers) % 2 ** (64 if words[1].startswith("%rd") else 32)
    return found


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.s32": lambda a, b: a + b,
    "bfe.u32": lambda a, start, bits: a >> start & ((1 << bits) - 1),
    "cvt.u64.u32": lambda a: a,
    "or.b64": lambda a, b: a | b,
    "add.s64": lambda a, b: a + b,
}
EXTRACT = "bfe.u32 \t%r2, %r1, 4, 15;"
WIDEN = "cvt.u64.u32 \t%rd7, %r3;"
JOIN = f"or.b64 \t%rd9, %rd7, {HIGH};"
FORMS = {
    "since 3.9": (EXTRACT, "add.s32 \t%r3, %r2, 2;", WIDEN, JOIN),
    "since 3.9, masked": ("and.b32 \t%r2, %r1, 32767;", "add.s32 \t%r3, %r2, 1030;", WIDEN, JOIN),
    "since 3.9, H in two parts": (EXTRACT, "add.s32 \t%r3, %r2, 33554560;", WIDEN, f"or.b64 \t%rd9, %rd7, {UPPER};"),
    "since 3.9, H in two parts, first": (EXTRACT, "or.b32 \t%r3, %r2, 33554432;", WIDEN, f"or.b64 \t%rd9, %rd7, {UPPER};"),
    "before": ("and.b32 \t%r3, %r1, 16383;", WIDEN, f"add.s64 \t%rd9, %rd7, {HIGH + 1026};"),
    "before, sign set": ("and.b32 \t%r3, %r1, 16383;", WIDEN, f"add.s64 \t%rd9, %rd7, {HIGH + 6 - 2**63};"),
}


@pytest.mark.parametrize("form", FORMS)
def test_descriptors_are_the_same_numbers_in_one_addition(form):
    before = text(*FORMS[form])
    after = ptx.lean_descriptors(before)
    assert re.search(r"\tor\.b64 \t%rd9, %rd9, -?\d+;\n\tadd\.s64 \t%rd9, %rd9, \d+;", after)
    draw = random.Random(0)
    for first in (0, 2**32 - 1, 2**15 - 1, 2**19 - 16, *(draw.getrandbits(32) for _ in range(200))):
        assert values(before, first) == values(after, first)
    assert ptx.leaner(after) == after


LEFT = {
    "an address without a limit": ("mov.b32 \t%r2, %r1;", *FORMS["since 3.9"][1:]),
    "an address of 16 bits": ("bfe.u32 \t%r2, %r1, 4, 16;", *FORMS["since 3.9"][1:]),
    "a step that carries": (EXTRACT, "add.s32 \t%r3, %r2, 32768;", WIDEN, JOIN),
    "a step that reaches H": (EXTRACT, "add.s32 \t%r3, %r2, 65538;", WIDEN, JOIN),
    "low bits or'ed, before": (EXTRACT, "or.b32 \t%r3, %r2, 2;", WIDEN, JOIN),
    "low bits or'ed, behind": (EXTRACT, "add.s32 \t%r3, %r2, 2;", WIDEN, f"or.b64 \t%rd9, %rd7, {HIGH + 2};"),
    "an address written twice": (EXTRACT, "@%p1 mov.b32 \t%r2, 70000;", *FORMS["since 3.9"][1:]),
    "a sum written twice": (*FORMS["since 3.9"][:2], "mov.b64 \t{%r3, %r4}, %rd1;", *FORMS["since 3.9"][2:]),
    "a sum written in assembly": (*FORMS["since 3.9"][:2], "{ .reg .b32 a; mov.b32 a, 1; mov.b32 %r3, a; }", WIDEN, JOIN),
    "no descriptor": (*FORMS["since 3.9"][:3], JOIN.replace("%rd9", "%rd6")),
    "nothing added": (EXTRACT, "cvt.u64.u32 \t%rd7, %r2;", JOIN),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_may_be_another_number_stays(reason):
    assert ptx.leaner(text(*LEFT[reason])) == text(*LEFT[reason])


def test_without_matmuls_nothing_changes():
    other = text(*FORMS["since 3.9"], matmul="\tst.shared.b64 \t[%r1], %rd9;")
    assert ptx.leaner(other) == other


# --- commits -----------------------------------------------------------------------------------------------------------------

COMMIT = "\twgmma.commit_group.sync.aligned;"


def committed(*between: str) -> str:
    return "\n".join([MATMUL, "", "\t// end inline asm", *between, COMMIT, ""])


def test_a_group_ends_behind_its_last_matmul():
    between = ("$L__tmp1:", "\t.loc\t1 2 3", "\tsub.f32 \t%r5, %r6, %r7;", "\tcvt.rn.bf16x2.f32 \t%r8, %r5, %r4;")
    assert ptx.leaner(committed(*between)) == "\n".join([MATMUL, "", "\t// end inline asm", COMMIT, *between, ""])


@pytest.mark.parametrize(
    "line",
    [
        "$L__BB0_1:",
        "\tbra.uni \t$L__BB0_1;",
        "\tbar.sync \t0, 128;",
        "\tst.shared.b32 \t[%r5], %r6;",
        "\tld.shared.b32 \t%r5, [%r6];",
        "\tfence.proxy.async.shared::cta;",
        "\twgmma.fence.sync.aligned;",
        "\t@%p1 add.s32 \t%r5, %r6, 1;",
        "\tshfl.sync.idx.b32 \t%r5, %r6, 0, 31, -1;",
        "\tmov.b32 %r5, %r6;\n\n\t// end inline asm",
    ],
)
def test_a_group_does_not_end_earlier_than_anything_but_arithmetic(line):
    before = committed(line, "\tsub.f32 \t%r5, %r6, %r7;")
    assert ptx.leaner(before) == before


# --- compiled ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _squares_kernel(out_ptr, n, D: gl.constexpr):
    """Products of tiles with themselves, two of them in turn: descriptors as in the kernels."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], gl.bfloat16))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(n):
        tile = tiles.index(i & 1)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)])
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    gl.store(out_ptr + rows * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0), acc)


ARGS = (torch.zeros(64, 64), 7)
CONSTANTS = {"D": 128}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A cache of its own, and the choice that calls have without one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(ptx.VARIABLE, raising=False)


def by_triton() -> str:
    return through_triton(_squares_kernel, ARGS, {**CONSTANTS, **COMPILER, "num_warps": 4})[0].asm["ptx"]


def by_us(lean: bool = True) -> Report:
    reports: list[Report] = []
    start(Compilation(_squares_kernel, reports), (1,), ARGS, CONSTANTS, lean_ptx=lean, num_warps=4)
    (report,) = reports
    return report


def sums(ptx: str) -> Iterator[tuple[str, int]]:
    """Every matmul's descriptors as (register of an address, what is added to it), followed back through the text."""
    made: dict[str, tuple[str, int]] = {}
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            yield from (made.get(name, (name, 0)) for name in re.findall(r"%rd\d+", line))
        elif found := re.match(r"\t(?:add\.s(?:32|64)|or\.b(?:32|64)) \t(%\w+), (%\w+), (\d+);$", line):
            register, constant = made.get(found[2], (found[2], 0))
            made[found[1]] = register, constant + int(found[3])
        elif found := re.match(r"\tcvt\.u64\.u32 \t(%rd\d+), (%r\d+);$", line):
            made[found[1]] = made.get(found[2], (found[2], 0))


def test_nothing_but_descriptors_changes():
    before, after = by_triton(), by_us().ptx
    assert before != after
    assert list(sums(before)) == list(sums(after))
    assert len({constant for _, constant in sums(after)}) == 8
    names = set(re.findall(r"%rd\d+", " ".join(line for line in after.splitlines() if "wgmma.mma_async" in line)))

    def others(text: str) -> list[str]:
        lines = text.splitlines()
        return [x for x in lines if not ((found := re.match(r"\t[\w.]+ \t(%rd\d+), ", x)) and found[1] in names)]

    assert others(ptx.early_commits(before)) == others(after)


def test_nobody_elses_kernels_are_touched():
    alone = by_triton()
    by_us()
    assert by_triton() == alone == by_us(lean=False).ptx
    assert triton.knobs.runtime.add_stages_inspection_hook is None
    assert not triton.knobs.compilation.override


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv(ptx.VARIABLE, ptx.AS_IS)
    assert by_us().ptx == by_triton()
    monkeypatch.setenv(ptx.VARIABLE, ptx.EVERY)
    assert by_us(lean=False).ptx == ptx.leaner(by_triton())


def test_what_was_rewritten_is_found_in_the_cache(monkeypatch):
    first = by_us().ptx
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: heard.append(event["cache_hit"]))
    assert by_us().ptx == first
    assert heard == [True, True]


def test_without_the_text_the_kernel_stays(monkeypatch):
    kernel = SimpleNamespace(warmup=lambda *args, **named: SimpleNamespace(asm={"cubin": b""}), fn=None)
    assert ptx.override(kernel, (1,), ARGS, {}, wanted=True) == {}
    monkeypatch.setattr(ptx, "kernel_cache", None)
    assert by_us().ptx == by_triton()
    assert "no other" in ptx.in_use()


def test_info_tells(monkeypatch):
    card = SimpleNamespace(name="a card", major=9, minor=0, total_memory=2**30)
    hopper = SimpleNamespace(available=tuple, code_in_use=ptx.in_use, table_in_use=lambda device: "")
    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(info.torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(info.registry, "get", lambda name: hopper)
    assert "rewritten for main kernels" in dict(info.devices())["cuda:0 hopper"]
    monkeypatch.setenv(ptx.VARIABLE, ptx.AS_IS)
    assert ptx.VARIABLE in dict(info.devices())["cuda:0 hopper"]
    card.major = 10
    assert "cuda:0 hopper" not in dict(info.devices())
