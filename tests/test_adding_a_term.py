"""docs/adding-a-variant.md, walked: a made-up term is added to a copy of the package, and every place takes or refuses it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-a-variant.md"
MOST_FILES = 12

# file -> what is found there and what stands there afterwards, every time it is found; the term is called `pull`
ROW = ("spec.py", '    Input("tau", ("heads",)),\n', '    Input("tau", ("heads",)),\n    Input("pull", ("heads",)),\n')
FLAG = ("spec.py", "    tau: bool = False\n", "    tau: bool = False\n    pull: bool = False\n")
FIELD = ("call.py", "    tau: Tensor | None = None\n", "    tau: Tensor | None = None\n    pull: Tensor | None = None\n")
KEYWORDS = ("api.py", "    tau: Tensor | None = None,\n", "    tau: Tensor | None = None,\n    pull: Tensor | None = None,\n")
PASSED = ("api.py", "sink, tau, gate,", "sink, tau, pull, gate,")
DECLARED = (ROW, FLAG, FIELD, KEYWORDS, PASSED)


def copied(folder: Path) -> Path:
    shutil.copytree(ROOT / "src" / "backlight", folder / "backlight", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if not hasattr(os, "fork"):
        pytest.skip("a script runs in a fork")
    with Server() as server:
        yield server


@pytest.fixture
def package(tmp_path: Path, server: Server) -> Scripts:
    return Scripts(server, copied(tmp_path))


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Scripts:
    """A copy in which the term is declared, and nobody takes it yet; scripts that run with it."""
    package = copied(tmp_path_factory.mktemp("declared"))
    edit(package, *DECLARED)
    return Scripts(server, package)


def edit(package: Path, *edits: tuple[str, str, str]) -> None:
    for name, old, new in edits:
        path = package / "backlight" / name
        source = path.read_text()
        assert old in source, f"{name} has no {old!r}: docs/adding-a-variant.md and this test describe another package"
        path.write_text(source.replace(old, new))


HEAD = "import backlight\nfrom torch import randn\nq, pull = randn(1, 2, 6, 4), randn(2)\n"
# reads folders and scripts as lines of JSON and answers each with what a copy of itself printed
SERVER = """
import contextlib, io, json, os, sys, traceback
import torch
for line in sys.stdin:
    ours, theirs = os.pipe()
    if os.fork() == 0:
        with os.fdopen(theirs, "w") as answer, contextlib.redirect_stdout(answer), contextlib.redirect_stderr(answer):
            try:
                folder, code = json.loads(line)
                sys.path.insert(0, folder)
                exec(code, {"torch": torch})
            except BaseException:
                traceback.print_exc()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        print(json.dumps(answer.read()), flush=True)
    os.wait()
"""


class Server:
    """A process that has imported torch: every script runs in a fork of it, untouched by the others."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def ask(self, folder: Path, code: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps((str(folder), code)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@dataclass
class Scripts:
    """What runs with a copy of the package."""

    server: Server
    package: Path

    def run(self, code: str = "") -> str:
        """What a script prints after importing the copy; its error where it fails."""
        return self.server.ask(self.package, HEAD + code)

    def refused(self, code: str) -> str:
        """The sentence of the error that a script ends with."""
        return self.run(code).strip().splitlines()[-1]


def attempts(*calls: str) -> str:
    """A script that makes each call and prints what it raises."""
    lines = [f"try:\n    {call}\n    print('taken')\nexcept Exception as error:\n    print(error)\n" for call in calls]
    return "".join(lines)


def test_a_row_alone_does_not_import(package: Scripts) -> None:
    edit(package.package, ROW)
    assert "AttentionSpec needs a flag for every term" in package.run()


def test_a_flag_alone_does_not_import(package: Scripts) -> None:
    edit(package.package, ROW, FLAG)
    assert "Call and spec.TENSORS differ" in package.run()


def test_a_shape_nobody_checks_does_not_import(package: Scripts) -> None:
    edit(package.package, *DECLARED, ("spec.py", 'Input("pull", ("heads",))', 'Input("pull", ("heads", "keys"))'))
    assert "no check for the shape of ['pull']" in package.run()


def test_every_backend_refuses_what_it_does_not_declare(declared: Scripts) -> None:
    found = declared.run("print(backlight.explain(q, q, q, pull=pull))")
    assert "tiled: does not take pull" in found
    code = "from backlight import registry; from backlight.api import call_of\ncall = call_of(q, q, q, pull=pull)\n"
    code += "for name in registry.names():\n    b = registry.get(name); type(b).available = lambda self: ()\n"
    code += "    print(name, registry.why_not(b, call))"
    found = declared.run(code)
    for name in ("hopper", "triton", "tiled"):
        assert f"{name} ('does not take pull',)" in found
    calls = "x = q[0].transpose(0, 1)\n" + attempts(
        "backlight.attention(q, q, q, pull=pull)",
        "backlight.statistics(q, q, q, pull=pull)",
        "backlight.attention_varlen(x, x, x, torch.tensor([0, 6]), pull=pull)",
    )
    assert declared.run(calls).count("tiled: does not take pull") == 3


def test_it_is_checked(declared: Scripts) -> None:
    wrong = ("randn(3)", "0.5", "pull.long()")
    found = declared.run(attempts(*(f"backlight.attention(q, q, q, pull={value})" for value in wrong)))
    assert "pull must have shape (2,), one per query head" in found
    assert "pull must be a torch.Tensor, got float" in found
    assert "pull must have a floating-point dtype" in found


def test_it_crosses_operators_and_is_told_apart(declared: Scripts) -> None:
    """In the operators, the key of remembered launches, the tensors of a replay, and under vmap."""
    code = """
from backlight import batching, operators, spec
from backlight.api import call_of
from backlight.call import tensors_of
call, plain = call_of(q, q, q, pull=pull), call_of(q, q, q)
place = spec.TENSOR_NAMES.index("pull")
assert "Tensor? pull" in str(torch.ops.backlight.attention.default._schema)
assert len(torch.ops.backlight.attention_backward.default._schema.returns) == len(spec.GRADIENTS) == 10
assert operators.pack(call, None)[place] is pull and operators.unpack(operators.pack(call, None))[0].spec.pull
assert tensors_of(call)[place] is pull
assert call.layout != plain.layout and call.layout != call_of(q, q, q, pull=randn(4)[::2]).layout
assert batching.HEADS["pull"] == 0
assert call.gradients == ("dq", "dk", "dv", "dpull")
print("all taken")
"""
    assert declared.run(code).strip() == "all taken"


def test_its_tangent_is_refused(package: Scripts) -> None:
    """Also on a backend that takes the term and says nothing about its derivatives."""
    taken = ("backends/tiled/__init__.py", "    takes = frozenset(\n        {", '    takes = frozenset(\n        {"pull", ')
    edit(package.package, *DECLARED, taken)
    code = "q.requires_grad_()\ny = backlight.attention(q, q, q, pull=pull)\n"
    code += "(dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)\n"
    code += attempts("backlight.attention_jvp(q, q, q, q, pull=pull)", "dq.sum().backward()")
    found = package.run(code)
    assert "tiled: has no forward-mode derivative with pull" in found
    assert found.count("with pull") == 2


def test_the_oracle_refuses_it(declared: Scripts) -> None:
    code = "from backlight.api import call_of\nfrom backlight.reference import oracle\noracle(call_of(q, q, q, pull=pull))"
    assert "the oracle has no stages for pull" in declared.refused(code)


def test_context_parallel_refuses_it(declared: Scripts) -> None:
    calls = [f"simulated_attention(q, q, q, pull=pull, strategy={name!r})" for name in ("ring", "all_to_all")]
    code = "from backlight.distributed import simulated_attention\n" + attempts(*calls)
    code += "from backlight.distributed.handshake import FIELDS\nprint([f.name for f in FIELDS if f.name == 'pull'])"
    found = declared.run(code)
    assert "strategy must be all_to_all for a call with pull" in found
    assert "tiled: does not take pull" in found
    assert "['pull']" in found


def test_the_doctor_refuses_it(declared: Scripts) -> None:
    """Nobody told it how such a term is drawn, and a kernel must not be judged without it."""
    code = "from backlight.doctor import diagnose\ndiagnose(backlight.attention, backlight.AttentionSpec(pull=True))"
    assert "nothing is known about how to draw pull" in declared.refused(code)


def test_peers_and_contenders_refuse_it(declared: Scripts) -> None:
    code = "from backlight.peers.features import features_of\nfeatures_of('flex', {'pull': pull}, ('causal',))"
    assert "flex has no pull" in declared.refused(code)
    code = """
from types import SimpleNamespace
from backlight.bench.contender import cannot
from backlight.bench.contenders.eager import ABLE
case = SimpleNamespace(spec=backlight.AttentionSpec(pull=True), varlen=False, window=(None, None), softcap=None)
print(cannot("eager", SimpleNamespace(case=case), ABLE))
"""
    assert declared.run(code).strip() == "eager cannot express pull"


def test_the_page_names_few_files() -> None:
    """The files of the walk and those that hold the mathematics: as many as the page says, and they exist."""
    steps = PAGE.read_text().partition("<!-- files -->")[2].partition("<!-- end of files -->")[0]
    named = re.findall(r"^\d+\. `([\w./-]+)`", steps, re.M)
    assert {f"src/backlight/{name}" for name, _, _ in DECLARED} <= set(named)
    assert 8 <= len(named) <= MOST_FILES
    for name in named:
        assert (ROOT / name).is_file(), name
