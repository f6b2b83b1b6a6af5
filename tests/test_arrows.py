"""Imports point one way and in no circle. Every module of the package stands in the table below."""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

BENCH_USES = ("command_line", "problems", "peers", "doctor")
BELOW_STEPS = ("doctor.defects", "doctor.subject", "doctor.report")

# who may import whom, by the longest matching prefix; a package may always import itself
MAY_IMPORT: dict[str, set[str]] = {
    # the one door to names that torch and Triton keep to themselves
    "_private": set(),
    "spec": set(),
    "errors": set(),
    "config": set(),
    "arguments": set(),
    "call": {"spec"},
    # steps to the thresholds of entmax, for whoever sums over keys
    "thresholds": set(),
    # what only the tensors of a call can say of its geometry
    "intervals": {"spec", "call"},
    "mask": {"_private", "arguments", "intervals"},
    "checking": {"spec", "call"},
    "binding": {"_private", "spec", "call", "arguments", "checking", "mask"},
    "contexts": {"_private", "call", "arguments"},
    "reference": {"spec", "call", "intervals"},
    "cases": {"spec", "call", "problems"},
    "backends": set(),
    # no backends: what those that start Triton kernels share
    "backends.replaying": {"_private", "spec", "call", "config"},
    # the gradient of lse, which torch's kernel has not
    "backends.aten": {"_private", "call", "backends.tiled"},
    "backends.intervals": {"call"},
    # e4m3 tensors and their scales
    "quantising": set(),
    # scores, terms and masks of the emulation are the tiled backend's own
    "fp8": {
        "arguments",
        *("spec", "call", "binding", "config", "registry", "running", "operators", "errors", "quantising"),
        *("backends.hopper", "backends.tiled", "backends.triton"),
    },
    "backends.*": {
        "_private",
        "spec",
        "quantising",
        "call",
        "intervals",
        "config",
        "errors",
        "thresholds",
        "backends.replaying",
        "backends.intervals",
    },
    # on Hopper GPUs the gradients of a pair bias that many heads share come from Gluon kernels
    "backends.triton.members": {"call", "backends.hopper"},
    "registry": {"spec", "call", "errors"},
    "batching": {"spec"},
    "derivatives": {"_private"},
    # derivatives of derivatives, whoever computes them
    "rules": {"spec", "derivatives"},
    "second_batching": {"spec", "batching"},
    "functional": {"batching", "second_batching", "rules"},
    "in_graph": {"functional"},
    "running": {"_private", "spec", "call", "registry"},
    "differentiating": {"call", "errors", "registry", "running"},
    "operators": {"_private", "spec", "call", "running", "batching", "derivatives", "rules", "functional", "in_graph"},
    "second_operators": {
        "_private",
        "spec",
        "call",
        "second_batching",
        "derivatives",
        "differentiating",
        "rules",
        "operators",
        "in_graph",
    },
    "direct": {"_private", "spec", "call", "binding", "running", "operators"},
    "documents": {"_private", "spec", "binding"},
    "api": {"spec", "call", "arguments", "binding", "contexts", "mask", "registry", "operators", "direct", "documents", "fp8"},
    "explaining": {"call", "binding", "contexts", "intervals", "mask", "registry", "documents", "api"},
    "tangents": {"spec", "call", "arguments", "binding", "contexts", "derivatives", "second_operators", "api"},
    # weights are formed by the tiled backend's own code: no second copy of scores, mask and elastic weights
    "attention_statistics": {"spec", "call", "running", "api", "backends.tiled"},
    "slopes": {"arguments"},
    "packing": {"arguments", "call"},
    # torch's own operators, answered: a bound call below everything that autograd, compilers and transforms do
    "slot": {"_private", "spec", "call", "binding", "registry", "running"},
    # the doctor by name only: it is loaded when somebody asks for it
    "": {
        *("spec", "errors", "fp8", "mask", "packing", "slopes", "slot", "api", "explaining"),
        *("attention_statistics", "tangents", "doctor"),
    },
    # the options of a layer are checked by the code that checks those of a call
    "nn": {"spec", "arguments", "binding", "mask", "api", ""},
    "compat": {"_private", "spec", "arguments", "mask", "api", "call", ""},
    "integrations": {"_private", "spec", "arguments", "intervals", "mask", "api", ""},
    # blocks of a sharded call go to a backend each: it looks one up, as `running` does
    "distributed": {
        "spec",
        "call",
        "intervals",
        "mask",
        "arguments",
        "binding",
        "contexts",
        "derivatives",
        "errors",
        "registry",
        "differentiating",
        "thresholds",
        "_private",
        "api",
        "",
    },
    # one call with its gradients, drawn from a seed, and what is known about it: for the doctor and the bench
    "problems": {"spec", "call", "intervals", "mask", "reference"},
    # attention by others: for the doctor and the bench
    "peers": {"spec", "call", "intervals"},
    # the doctor's rooms: command -> steps -> defects -> subject, and steps -> report; nothing points back
    "doctor.subject": {"spec", "call", "mask", "problems", "peers"},
    "doctor.report": {"spec", "reference"},
    # scales and turns of e4m3, as kernels have them
    "doctor.defects": {"spec", "call", "intervals", "reference", "problems", "quantising", "doctor.subject"},
    "doctor.steps": {"_private", "spec", "call", "intervals", "mask", "reference", "problems", "peers", *BELOW_STEPS},
    "doctor.command": {"spec", "problems", "command_line", "doctor"},
    # where names become subjects: it may look backends up
    "doctor.command.subjects": {"registry", "doctor", ""},
    "doctor": {"doctor.steps", *BELOW_STEPS},
    "doctor.pytest_plugin": {"spec", "doctor", ""},
    # what commands share
    "command_line": set(),
    "info": {"_private", "registry", "slot", ""},
    "bench": {
        "_private",
        "spec",
        "call",
        "intervals",
        "mask",
        "errors",
        "config",
        "cases",
        "reference",
        "registry",
        "command_line",
        "info",
        "",
        *BENCH_USES,
    },
    "demo": {"spec", "call", "reference", "doctor", "bench", "info", "nn", ""},
    "__main__": {"cli"},
    "cli": {"command_line", "demo", "doctor", "bench", "info", ""},
}


def modules() -> dict[str, Path]:
    """Dotted name below `backlight` ("" is the package itself) -> file."""
    out = {}
    for path in sorted((SOURCE / "backlight").rglob("*.py")):
        parts = path.relative_to(SOURCE / "backlight").with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path: Path, module: str) -> set[str]:
    """Modules of the package that a file imports anywhere, function bodies included."""
    out = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            out |= {_below(alias.name) for alias in node.names if alias.name.split(".")[0] == "backlight"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            if (node.module or "").split(".")[0] == "backlight":
                base = _below(node.module)
                out |= {name if (name := f"{base}.{alias.name}".lstrip(".")) in MODULES else base for alias in node.names}
    return out


def _below(name: str) -> str:
    return name.removeprefix("backlight").lstrip(".")


def rule_of(module: str) -> str:
    """The table's entry for a module: itself, its backend, or the nearest package above it."""
    parts = module.split(".")
    if module in MAY_IMPORT:
        return module
    if parts[0] == "backends" and len(parts) > 1:
        return shared if (shared := ".".join(parts[:2])) in MAY_IMPORT else "backends.*"
    while parts and ".".join(parts) not in MAY_IMPORT:
        parts.pop()
    return ".".join(parts)


def home_of(module: str) -> str:
    """The folder whose files may import one another: a package, a backend, a room of the doctor."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("backends", "doctor") else parts[0]


def allowed(module: str, target: str) -> bool:
    if module and home_of(module) == home_of(target):
        return True
    return any(target == entry or (entry and target.startswith(f"{entry}.")) for entry in MAY_IMPORT[rule_of(module)])


def test_every_module_has_a_place() -> None:
    unplaced = [module for module in MODULES if module and rule_of(module) == ""]
    assert not unplaced, f"no arrow is drawn for {unplaced}: add them to MAY_IMPORT"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "backlight")
def test_arrows(module: str) -> None:
    wrong = sorted(target for target in imported(MODULES[module], module) if not allowed(module, target))
    assert not wrong, f"backlight.{module} must not import {['backlight.' + target for target in wrong]}"


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circles() -> None:
    """No modules import one another in a circle, function bodies and annotations included."""
    circle = circle_in({module: imported(path, module) - {module} for module, path in MODULES.items()})
    assert not circle, f"a circle of imports: {' -> '.join(circle)}"


def test_a_circle_would_be_seen() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_the_table_would_notice() -> None:
    assert not allowed("doctor.steps.probes", "api")
    assert not allowed("doctor.steps.probes", "")
    assert not allowed("doctor.steps.probes", "backends.tiled")
    assert not allowed("backends.tiled.forward", "reference.oracle")
    assert not allowed("backends.triton.forward", "backends.tiled.primitives")
    assert not allowed("backends.replaying.program", "backends.triton.launch")
    assert not allowed("backends.intervals.tiles", "backends.triton.launch")
    assert not allowed("backends.triton.backward", "backends.hopper.pair.host")
    assert allowed("backends.triton.members", "backends.hopper.pair.host")
    assert allowed("backends.triton.launch", "backends.replaying.program")
    assert not allowed("reference.oracle", "operators")
    assert not allowed("spec", "call")
    assert not allowed("registry", "backends.tiled")
    assert allowed("backends.tiled.forward", "backends.tiled.primitives")
    assert allowed("doctor.steps.probes", "reference.oracle")
    assert allowed("doctor.command.line", "doctor.steps.examination")
    assert not allowed("doctor.steps.examination", "doctor.command.keep")
    assert not allowed("doctor.subject.subject", "doctor.steps.compare")
    assert not allowed("doctor.report.model", "doctor.subject.case")
    assert not allowed("doctor.steps.examination", "doctor")
    assert not allowed("problems.inputs", "doctor.subject.case")
    assert not allowed("peers.flex", "bench.contender")
    assert not allowed("peers.flex", "doctor.subject.subject")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "backlight")
def test_no_print(module: str) -> None:
    """Output goes through a rich console."""
    calls = [node for node in nodes(MODULES[module]) if isinstance(node, ast.Call)]
    lines = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not lines, f"backlight.{module} prints on lines {lines}"
