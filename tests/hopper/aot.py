"""Compile the kernels of a call for sm_90a on a machine without a GPU, and read what ptxas made of them.

`compiled(...)` stands in for the launches of the host code: arguments are bound the way the JIT binds them (descriptors over
CPU tensors are fine) and the pipeline runs down to a cubin with the ptxas that Triton ships.
"""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from backlight.backends.hopper import side_kernels
from backlight.backends.intervals import tiles

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = 232448
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# wgmma serialised, or registers not reallocated
WARNING = re.compile(r"C75\d\d")
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")


@dataclass(frozen=True)
class Report:
    """Facts about one compiled kernel. `registers` is the cap at entry; partitions redistribute it."""

    kernel: str
    spills: int
    warnings: tuple[str, ...]
    registers: int
    shared: int
    opcodes: Counter[str]
    sass: str
    ptx: str

    def has(self, opcode: str) -> bool:
        return any(name == opcode or name.startswith(opcode + ".") for name in self.opcodes)

    def __str__(self) -> str:
        facts = f"{self.spills} bytes spilled, {self.registers} registers, {self.shared} bytes shared"
        return f"{self.kernel}: {facts}, warnings {self.warnings}"


def through_triton(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """The compiled kernel, and what ptxas said of it."""
    backend = make_backend(TARGET)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, chosen = binder(*args, **options)
    chosen, signature, constexprs, attrs = kernel._pack_args(backend, dict(options), bound, specialization, chosen)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    said = io.StringIO()
    with knobs.nvidia.scope(), redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        done = triton.compile(source(kernel, signature, constexprs, attrs), target=TARGET, options=chosen.__dict__)
    # a kernel from Triton's cache was compiled without a word
    return done, said.getvalue() or ptxas_log(done.asm["ptx"], chosen.ptx_options)


def compile_kernel(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Report:
    done, log = through_triton(kernel, args, options)
    text = disassembly(done.asm["cubin"])
    return Report(
        kernel=kernel.fn.__name__,
        spills=max(map(int, re.findall(r"(\d+) bytes spill stores", log)), default=0),
        warnings=tuple(sorted(set(WARNING.findall(log)))),
        registers=max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        shared=done.metadata.shared,
        opcodes=Counter(OPCODE.findall(text)),
        sass=text,
        ptx=done.asm["ptx"],
    )


# what Triton itself asks ptxas for, before what a launch asks for
ALLOCATION = tuple(re.findall(r"'(--regAllocOptLevel=\d)'", inspect.getsource(compiler)))


def ptxas_log(ptx: str, options: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", *ALLOCATION, *(options or "").split(), "--gpu-name=sm_90a", str(source)]
        command += ["-o", str(source.with_suffix(".cubin"))]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stderr + run.stdout


def disassembly(cubin: bytes) -> str:
    """SASS, or nothing where the Triton wheel carries no disassembler."""
    tool = TOOLS / "nvdisasm"
    if not tool.is_file():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


class Compilation:
    def __init__(self, kernel: Any, reports: list[Report]):
        self.kernel, self.fn, self.reports = kernel, kernel.fn, reports

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        return through_triton(self.kernel, args, options)[0]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.reports.append(compile_kernel(self.kernel, args, options))


@contextmanager
def compiled(*modules: Any) -> Iterator[list[Report]]:
    """Inside, launching a kernel of the modules (jitted functions named `_..._kernel`) compiles it and adds a report.

    Small kernels around them are left out, unless theirs is one of the modules.
    """
    before, reports = [], []
    try:
        for module in {*modules, side_kernels, tiles}:
            for name, value in list(vars(module).items()):
                if name.startswith("_") and name.endswith("_kernel"):
                    before.append((module, name, value))
                    setattr(module, name, Compilation(value, reports) if module in modules else Idle())
        yield reports
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Idle:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


def hidden_exponentials(sass: str) -> int:
    """The most exp2 that run while a matmul is in flight: between a wait that leaves one wgmma group and one that leaves none.

    ptxas may hoist the second wait above them, which is right and slow; the count tells.
    """
    best = inside = 0
    counting = False
    for line in sass.splitlines():
        if "WARPGROUP.DEPBAR" in line:
            counting = "gsb0, 0x1" in line
            inside = 0
        elif counting and "MUFU.EX2" in line:
            inside += 1
            best = max(best, inside)
    return best
