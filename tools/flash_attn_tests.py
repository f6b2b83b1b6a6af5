"""FlashAttention's own test files on our functions: how many pass of those that apply?

    git clone --depth 1 https://github.com/Dao-AILab/flash-attention somewhere
    python tools/flash_attn_tests.py somewhere --device cpu --longest 260 --count 40 --limit 900
    python tools/flash_attn_tests.py somewhere --device cuda --count 400 --limit 100 --processes 14

The files have hundreds of thousands of combinations of parameters, more than pytest collects in minutes: combinations are drawn
from the marks, and functions called with them. Theirs are the tests and the reference they compare with; ours are the functions
under the names that they import. What we refuse with NotImplementedError, private names and dropout do not apply. On a CPU
"cuda" in the text of a file is "cpu", and combinations with longer sequences than --longest are left out. Needs einops.
Counts go to docs/data/flash-attn-tests.json and from there into docs/layers.md, unless --out says where else.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "data" / "flash-attn-tests.json"
PAGE = ROOT / "docs" / "layers.md"
BEGIN, END = "<!-- counts of FlashAttention's tests -->", "<!-- end of FlashAttention's counts -->"

CUTE = ("test_flash_attn", "test_flash_attn_fast", "test_flash_attn_varlen", "test_flash_attn_race_condition")
FILES = {
    "2": ("tests/test_flash_attn.py",),
    "3": ("hopper/test_flash_attn.py",),
    "4": tuple(f"tests/cute/{name}.py" for name in CUTE),
}
# tests that FlashAttention refuses what we take, and of the operators behind its functions
NARROWER = ("test_flash_attn_invalid_head_dim", "test_flash3_bw_compatibility")
PASSED, FAILED, OTHER, LATE = "passed", "failed", "does not apply", "over the limit"

# --- their names, our functions ----------------------------------------------------------------------------------------------


def install(checkout: Path, version: str, device: str) -> None:
    """Modules under FlashAttention's names: its helpers from the checkout, its functions from here."""
    import torch

    from backlight.compat import flash_attn, flash_attn_cute, flash_attn_interface

    if device == "cpu":
        # version 4 skips more on Hopper than on Blackwell
        torch.cuda.get_device_capability = lambda *_: (10 if version == "4" else 9, 0)
        torch.cuda.get_device_properties = lambda *_: argparse.Namespace(total_memory=1 << 40, multi_processor_count=132)
        torch.cuda.synchronize = lambda *_: None
        torch.einsum = _in_fp32(torch.einsum)
    folder = checkout / "flash_attn"
    _module("flash_attn", folder, **_functions(flash_attn))
    _module("flash_attn.flash_attn_interface", USE_TRITON_ROCM=False, __getattr__=_private_name)
    _module("flash_attn.layers", folder / "layers")
    _module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    names = ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla", "get_scheduler_metadata", "flash_attn_combine")
    private = dict.fromkeys(names, _private)
    _module("flash_attn.cute", folder / "cute", **_functions(flash_attn_cute))
    _module("flash_attn.cute.interface", **_functions(flash_attn_cute), **private)
    _module("flash_attn.cute.cache_utils", JITCache=dict)
    _module("flash_attn_interface", **_functions(flash_attn_interface), **private)
    helpers = {"4": ("flash_attn.cute.testing", "flash_attn/cute/testing.py")}.get(version)
    if helpers:
        loaded(*helpers, checkout, device)
    if version == "3":
        loaded("padding", "hopper/padding.py", checkout, device)
        loaded("test_util", "hopper/test_util.py", checkout, device)


def _in_fp32(einsum: Any) -> Any:
    """16-bit products summed in fp32 and rounded once, as GPUs do: a CPU without 16-bit units would take minutes for them."""

    @wraps(einsum)
    def call(equation: str, *tensors: Any) -> Any:
        if tensors[0].dtype.itemsize != 2:
            return einsum(equation, *tensors)
        return einsum(equation, *(x.float() for x in tensors)).to(tensors[0].dtype)

    return call


def _module(name: str, folder: Path | None = None, **names: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(names)
    if folder is not None:
        module.__path__ = [str(folder)]


def loaded(name: str, file: str, checkout: Path, device: str) -> ModuleType:
    """A file of theirs as a module, for that device."""
    module = ModuleType(name)
    module.__file__ = str(checkout / file)
    text = (checkout / file).read_text().replace('"cuda"', f'"{device}"')
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def _functions(module: ModuleType) -> dict[str, Any]:
    return {name: _taken(found) for name, found in vars(module).items() if name.startswith("flash_attn_") and callable(found)}


def _taken(function: Any) -> Any:
    import pytest

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            pytest.skip(str(error))

    return call


def _private(*_: Any, **__: Any) -> None:
    import pytest

    pytest.skip("a private name, or one that we do not have")


def _private_name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _private


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0, **_: Any
) -> Any:
    """x [B, S, H, D] with its first columns turned as complex numbers: theirs is a kernel."""
    import torch

    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(x.shape[0])
    at = (offsets[:, None] + torch.arange(x.shape[1], device=x.device)).clamp(max=cos.shape[0] - 1)
    turn = torch.complex(cos[at].float(), sin[at].float())[:, :, None]
    half = cos.shape[1]
    front, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = front.unflatten(-1, (half, 2)) if interleaved else front.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    flat = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([flat.to(x.dtype), rest], dim=-1)


# --- combinations ------------------------------------------------------------------------------------------------------------


def drawn(function: Any, count: int, longest: int, draw: random.Random) -> list[dict[str, Any]]:
    """Combinations of one function's parameters; none where a mark skips it here."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "skipif" and mark.args and mark.args[0]:
            return []
        if mark.name == "parametrize":
            names = mark.args[0] if isinstance(mark.args[0], (list, tuple)) else [x.strip() for x in mark.args[0].split(",")]
            axes.append((names, list(mark.args[1])))
    found: dict[str, dict[str, Any]] = {}
    for _ in range(count * 20):
        given: dict[str, Any] = {}
        for names, values in axes:
            value = draw.choice(values)
            values_of = value.values if type(value).__name__ == "ParameterSet" else (value,) if len(names) == 1 else value
            given |= dict(zip(names, values_of, strict=True))
        if given.get("dropout_p"):
            given["dropout_p"] = 0.0
        lengths = [x for name, x in given.items() if "seqlen" in name and isinstance(x, int)]
        if not longest or max(lengths, default=0) <= longest:
            found[repr(sorted(given.items(), key=str))] = given
        if len(found) == count:
            break
    return list(found.values())


def outcome(function: Any, given: dict[str, Any], each: int) -> tuple[str, str]:
    import pytest

    if set(inspect.signature(function).parameters) - set(given):
        return OTHER, "needs a fixture"

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(each)
    try:
        function(**given)
    except (pytest.skip.Exception, pytest.xfail.Exception) as error:
        return OTHER, str(error)[:120]
    except TimeoutError:
        return LATE, ""
    except (pytest.fail.Exception, Exception) as error:
        return FAILED, f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    return PASSED, ""


def work(options: argparse.Namespace) -> None:
    """The share of one process: a line for each combination."""
    install(options.checkout, options.version, options.device)
    draw, jobs = random.Random(options.seed), []
    for file in FILES[options.version]:
        theirs = loaded(f"theirs_{Path(file).stem}", file, options.checkout, options.device)
        for name, function in vars(theirs).items():
            if (
                name.startswith("test_")
                and name not in NARROWER
                and getattr(function, "__module__", theirs.__name__) == theirs.__name__
            ):
                jobs += [(f"{file}::{name}", function, x) for x in drawn(function, options.count, options.longest, draw)]
    draw.shuffle(jobs)
    with options.out.open("a") as lines, open(os.devnull, "w") as nothing:
        for name, function, given in jobs[options.mine :: options.processes]:
            print(name, given, file=sys.stderr, flush=True)
            sys.stdout = nothing
            found = (LATE, "") if time.time() > options.ends else outcome(function, given, options.each)
            sys.stdout = sys.__stdout__
            lines.write(json.dumps([name, str(given), *found]) + "\n")
            lines.flush()


# --- around it ---------------------------------------------------------------------------------------------------------------


def counted(options: argparse.Namespace, version: str, folder: Path) -> dict[str, Any]:
    """Counts by function, and what failed."""
    ends, begun = time.time() + options.limit, []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    names = ("device", "count", "longest", "seed", "each", "processes")
    given = [f"--{name}={getattr(options, name)}" for name in names]
    for mine in range(options.processes):
        lines = folder / f"{version}-{mine}.jsonl"
        lines.unlink(missing_ok=True)
        share = [f"--version={version}", f"--mine={mine}", f"--ends={ends}", f"--out={lines}"]
        command = [sys.executable, __file__, str(options.checkout), *given, *share]
        with (folder / f"{version}-{mine}.log").open("w") as log:
            begun.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    for each in begun:
        try:
            each.wait(timeout=max(1.0, ends - time.time()) + options.each + 60)
        except subprocess.TimeoutExpired:
            each.kill()
    rows = [json.loads(line) for file in folder.glob(f"{version}-*.jsonl") for line in file.read_text().splitlines()]
    if not rows:
        print((folder / f"{version}-0.log").read_text()[-2000:])
    found = Counter(row[2] for row in rows)
    failures = sorted({f"{name.partition('::')[2]} {given}: {why}" for name, given, result, why in rows if result == FAILED})
    reasons = Counter(why.partition(", got")[0] or "skipped by the test" for *_, result, why in rows if result == OTHER)
    counts = {key: found[key] for key in (PASSED, FAILED, OTHER, LATE)}
    return counts | {"failures": failures, "reasons": dict(reasons.most_common(12))}


def table(record: dict[str, Any]) -> str:
    lines = ["| FlashAttention | device | passed | failed | do not apply |", "|---|---|---|---|---|"]
    for key, row in sorted(record.items()):
        version, _, device = key.partition(" ")
        lines.append(f"| {version} | {device} | {row[PASSED]:,} | {row[FAILED]:,} | {row[OTHER]:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--versions", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=40, help="combinations of each function")
    parser.add_argument("--longest", type=int, default=0, help="leave out longer sequences; 0 = take all")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each version")
    parser.add_argument("--each", type=int, default=60, help="seconds for one test")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--logs", type=Path, help="where the logs go")
    # one process of many
    parser.add_argument("--version", choices=FILES, help=argparse.SUPPRESS)
    parser.add_argument("--mine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    if options.version:
        work(options)
        return
    if importlib.util.find_spec("einops") is None:
        parser.error("the tests need einops")
    folder = (options.logs or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    out = options.out or RECORD
    record = json.loads(out.read_text()) if out.exists() else {}
    for version in options.versions:
        row = record[f"{version} {options.device}"] = counted(options, version, folder)
        print(version, json.dumps(row, indent=1), flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    if options.out is None:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
