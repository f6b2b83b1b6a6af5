"""The one door to private names: nobody else uses one, and without each of them everything still works."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backlight._private import torch as private_torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backlight"
TRITON = importlib.util.find_spec("triton") is not None
TORCH_NAMES = tuple(private_torch.NAMES.costs)
if TRITON:
    from backlight._private import triton as private_triton

    TRITON_NAMES = tuple(private_triton.NAMES.costs)
else:
    TRITON_NAMES = ()


# --- nobody else uses one ----------------------------------------------------------------------------------------------------


def private_uses(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and names: anything of torch or Triton with a part that begins with one underscore."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                found.append((node.lineno, ".".join([inner.id, *reversed(parts)])))
    roots = ("torch", "triton", "gl", "tl", "gluon")
    return [(line, name) for line, name in found if name.split(".")[0] in roots and is_private(name)]


def is_private(name: str) -> bool:
    internal = ("triton.knobs", "triton.runtime.driver", "triton.backends", "triton.compiler")
    parts = name.split(".")
    return any(x.startswith("_") and not x.startswith("__") for x in parts) or name.startswith(internal)


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("import torch._dynamo", True),
        ("from torch._C import x", True),
        ("from torch.autograd.forward_ad import _current_level", True),
        ("y = torch.cuda._sleep(3)", True),
        ("from triton import knobs", True),
        ("from triton.language.core import _aggregate", True),
        ("from triton.backends.nvidia import driver", True),
        ("import torch.utils.checkpoint", False),
        ("y = torch.__version__", False),
        ("from triton.experimental.gluon import language", False),
    ],
)
def test_private_uses_are_seen(line: str, private: bool) -> None:
    assert bool(private_uses(ast.parse(line))) == private


def test_nobody_else_uses_a_private_name() -> None:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if "_private" not in path.parts]
    assert len(files) > 100
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in files
        for line, name in private_uses(ast.parse(path.read_text()))
    ]
    assert not found, f"through backlight._private, please: {found}"


# --- without each of them ----------------------------------------------------------------------------------------------------

# a name is taken away where the door looks it up: torch itself goes on needing its own
WORK = r"""
import importlib.util, io, json, os, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")

source, with_triton = Path(sys.argv[1]), sys.argv[2] == "True"
import rich.console, rich.table
import torch
import torch._decomp.decompositions_for_jvp, torch._dynamo, torch._functorch.config, torch.fx.experimental.proxy_tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

if with_triton:
    import triton.backends.nvidia.driver, triton.experimental.gluon.language.nvidia.hopper
torch.set_num_threads(1)


def without(taken):
    spec = importlib.util.spec_from_file_location("backlight._private.names", source / "_private" / "names.py")
    door = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = door
    spec.loader.exec_module(door)
    honest = door.find
    door.find = lambda path: None if path == taken else honest(path)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), *([func.overloadpacket.__name__] if func.namespace == "backlight" else [])]
        return func(*args, **(kwargs or {}))


class Heard(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), getattr(func, "__name__", "")]
        return func(*args, **(kwargs or {}))


def close(found, wanted):
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(found, wanted, strict=True))


def work(taken):
    without(taken)
    import backlight
    from backlight import direct
    from backlight._private import torch as private

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    plain = scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = torch.autograd.grad(plain.square().sum(), (q, k, v))
    right = {}
    for _ in range(2):
        y = backlight.attention(q, k, v, causal=True)
        right["forward"] = close([y], [plain])
        right["backward"] = close(torch.autograd.grad(y.square().sum(), (q, k, v)), wanted)
    cu = torch.tensor([0, 8])
    packed = backlight.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu, causal=True)
    right["packed"] = close(torch.autograd.grad(packed.square().sum(), (q, k, v)), wanted)
    fixed = k.detach(), v.detach()
    loss = lambda q: backlight.attention(q, *fixed, causal=True).square().sum()
    right["torch.func.grad"] = close([torch.func.grad(loss)(q.detach())], wanted[:1])
    many = torch.stack([q.detach()] * 2)
    right["vmap of grad"] = close([torch.func.vmap(torch.func.grad(loss))(many)[1]], wanted[:1])
    with torch.autograd.profiler.profile() as profile:
        loss(q)
    right["profiler"] = "backlight::attention" in {event.key for event in profile.key_averages()}
    with Seen() as seen:
        loss(q)
    right["dispatch mode"] = seen.names == ["attention"]
    with Heard() as heard:
        loss(q)
    right["function mode"] = "attention" in heard.names
    right["trace"] = "backlight::attention" in str(torch.jit.trace(loss, q.detach(), check_trace=False).graph)
    y = backlight.attention(q, k, v, causal=True)
    dys = torch.stack([2 * y.detach(), y.detach()])
    batched = torch.autograd.grad(y, (q, k, v), dys, is_grads_batched=True)
    right["batched gradients"] = close([x[0] for x in batched], wanted)
    kept = []
    torch.func.grad(lambda x: (kept.append(x), loss(x))[1])(q.detach())
    right["what a transform leaves"] = close([backlight.attention(kept[0], k, v, causal=True)], [plain])
    right["what a transform leaves is seen"] = not direct.unobserved((kept[0],))
    single = [x.detach().float() for x in (q, k, v)]
    backlight.attention(*single)
    with torch.autocast("cpu", torch.bfloat16):
        right["autocast"] = backlight.attention(*single).dtype == torch.bfloat16

    def dual(loss):
        with torch.autograd.forward_ad.dual_level():
            y = loss(torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q)))
            return torch.autograd.forward_ad.unpack_dual(y).tangent

    defined = lambda q: scaled_dot_product_attention(q, *fixed, is_causal=True).square().sum()
    asked = {
        "dual numbers": dual,
        "jvp": lambda f: torch.func.jvp(f, (q.detach(),), (torch.ones_like(q),))[1],
        "hessian": lambda f: torch.func.hessian(f)(q.detach()),
        "penalty": lambda f: torch.autograd.grad(torch.autograd.grad(f(q), q, create_graph=True)[0].norm(), q)[0],
    }
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right |= {name: close([ask(loss)], [ask(defined)]) for name, ask in asked.items()}
    right["refusal"] = False
    try:
        torch.func.grad(lambda q: torch.func.hessian(loss)(q).sum())(q.detach())
    except NotImplementedError as error:
        right["refusal"] = "no third derivative" in str(error)
    missing = set(private.NAMES.missing)
    if with_triton:
        from backlight._private import triton as private_triton

        missing |= set(private_triton.NAMES.missing)
    from rich.console import Console
    from backlight import info

    private.compiler_settings()
    said = io.StringIO()
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 0
    info.show(Console(file=said, width=250))
    return {"right": right, "missing": taken is None or taken in missing | set(private.NAMES.missing), "info": said.getvalue()}


for line in sys.stdin:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = work(json.loads(line))
        except BaseException as error:
            import traceback

            answer = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        print(pipe.read() or "{}", flush=True)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def without() -> Iterator[Callable[[str | None], Any]]:
    """What a fresh process says without a name: one process imports torch, and has a child for each question."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", WORK, str(SOURCE), str(TRITON)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def ask(name: str | None) -> Any:
            print(json.dumps(name), file=to, flush=True)
            return json.loads(answers.readline())

        yield ask


@pytest.mark.parametrize("name", [None, *TORCH_NAMES, *TRITON_NAMES])
def test_without_a_name(without: Callable[[str | None], Any], name: str | None) -> None:
    """Import, both directions, transforms, refusals and profiles; `backlight info` says what is slower and why."""
    answer = without(name)
    assert "error" not in answer, answer["error"]
    assert answer["right"] == dict.fromkeys(answer["right"], True)
    assert answer["missing"], f"{name} stands in the table, and nobody takes it"
    if name is not None:
        costs = private_torch.NAMES.costs | (private_triton.NAMES.costs if TRITON else {})
        line = next((line for line in answer["info"].splitlines() if name in line), "")
        assert costs[name].without in line, answer["info"]


def test_all_names_are_there_today() -> None:
    """Nothing is slower on versions that the package is tested with; what only a torch built for GPUs has may be missing."""
    assert private_torch.NAMES.slower(gpu=False) == {}
    if TRITON:
        assert private_triton.slower(gpu=True) == {}
