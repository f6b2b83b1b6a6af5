"""The part of the tests that needs no GPU, in one environment per pair of torch and Triton: python tools/matrix.py

    python tools/matrix.py --list
    python tools/matrix.py torch-2.15 lowest             some environments
    python tools/matrix.py --part kernels --part cli     some parts of each
    python tools/matrix.py --part kernels --few          facts of some kernels: a third of them
    python tools/matrix.py --again                       only the tests that the record has as failed

Environments lie in .matrix/ (a few gigabytes each, made by uv from the public index alone) and stay there for the next time.
Each result goes into docs/data/versions.json as it comes, in the place of an older one of the same environment and part;
`python tools/make_versions_page.py --write` makes the page of it. Ends with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compact import record
from resolve import public, uv

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
DATA = ROOT / "docs" / "data" / "versions.json"
PYTHON = "3.11"
COMPILED = (
    "tests/hopper/test_compiled.py",
    "tests/hopper/test_compiled_terms.py",
    "tests/hopper/test_backward_terms_compiled.py",
    "tests/triton_backend/test_triton_compiled.py",
)
# they compile the same kernels; Triton knows a kernel by its source, its options and Triton's own version
SHARE_A_CACHE = ("kernels", "compile")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)")
WORST_SHOWN = 20


@dataclass(frozen=True)
class Environment:
    """A pair of versions; without them every direct dependency is at the floor that pyproject.toml declares."""

    name: str
    torch: str = ""
    triton: str = ""
    numpy: str = ""

    @property
    def pins(self) -> dict[str, str]:
        """The versions it chooses itself, by package."""
        return {name: version for name in ("torch", "triton", "numpy") if (version := getattr(self, name))}


ENVIRONMENTS = (
    # the interpreter of Triton 3.6 makes numbers of arrays with one element, which NumPy refuses since 2.4
    Environment("torch-2.11", "2.11.0", "3.6.0", numpy="2.3.5"),
    Environment("torch-2.12", "2.12.1", "3.7.1"),
    Environment("torch-2.13", "2.13.0", "3.7.1"),
    Environment("torch-2.14", "2.14.1", "3.8.0"),
    Environment("torch-2.15", "2.15.0", "3.9.0"),
    Environment("lowest"),
)


def pytest(*arguments: str, marked: str = "not slow") -> list[str]:
    return ["-m", "pytest", "-q", "-m", marked, *arguments]


PARTS: dict[str, list[str]] = {
    "cli": pytest(
        "tests/test_cli.py", "tests/test_demo.py", "tests/doctor/test_command.py", "tests/doctor/test_report_files.py"
    ),
    # what is left for later are larger sizes of the same kernels
    "interpreter": pytest("tests/interpreted", marked="not slow and not later"),
    # before the tests that compile the same kernels and find them in the cache
    "kernels": ["tools/kernels.py"],
    "compile": pytest(*COMPILED),
    # while the matrix runs, its page is behind its record
    "host": pytest(
        "tests", "--deselect=tests/test_versions.py", *(f"--ignore={path}" for path in (*COMPILED, "tests/interpreted"))
    ),
}


def others(constraints: str, environment: Environment) -> str:
    """The pins without those whose versions the environment chooses."""
    return "".join(line for line in constraints.splitlines(True) if re.split(r"\W", line)[0] not in environment.pins)


def installation(environment: Environment, python: Path, constraints: Path) -> list[str]:
    """The command that fills an environment."""
    into = [uv(), "pip", "install", "--no-config", "--quiet", "--python", str(python), "-e", ".[report,test]"]
    if not environment.torch:
        # an installed version above its floor would be left as it is
        return [*into, "--upgrade", "--resolution", "lowest-direct"]
    wanted = [f"{name}=={version}" for name, version in environment.pins.items()]
    return [*into, "--constraints", str(constraints), *wanted]


def install(environment: Environment) -> Path:
    """The environment's Python; one that is there is brought up to date."""
    place = FOLDER / environment.name
    python = place / "bin" / "python"
    given = public(os.environ)
    if not python.is_file():
        command = [uv(), "venv", "--no-config", "--quiet", "--python", PYTHON, str(place)]
        subprocess.run(command, check=True, cwd=ROOT, env=given)
    constraints = place / "constraints.txt"
    constraints.write_text(others((ROOT / "constraints.txt").read_text(), environment))
    subprocess.run(installation(environment, python, constraints), check=True, cwd=ROOT, env=given)
    return python


def versions(python: Path) -> dict[str, str]:
    code = (
        "import json, platform, importlib.metadata as m; names = ('torch', 'triton', 'numpy', 'rich', 'typer', 'jinja2',"
        " 'matplotlib', 'pytest', 'hypothesis', 'transformers');"
        "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in names}}))"
    )
    run = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def outcome(code: int, output: str) -> dict[str, Any]:
    """What pytest's last line counts and which tests failed."""
    last = output.rstrip().splitlines()[-1] if output.strip() else ""
    counts = {name.rstrip("s") if name.startswith("error") else name: int(n) for n, name in COUNTS.findall(last)}
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+(?: [^-\s]\S*)*)", output, re.M)
    return {"ok": code == 0, "counts": counts, "failed": bad[:WORST_SHOWN]}


def run_part(environment: Environment, python: Path, part: str, few: bool = False, tests: Sequence[str] = ()) -> dict[str, Any]:
    """What came of a part, or of some of its tests alone."""
    place = FOLDER / environment.name
    cache = place / ("cache-compiled" if part in SHARE_A_CACHE else f"cache-{part}")
    given = {**public(os.environ), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    if part == "interpreter":
        given["TRITON_INTERPRET"] = "1"
    if part not in SHARE_A_CACHE:
        shutil.rmtree(cache, ignore_errors=True)
    found = place / "kernels.json"
    facts = [str(found), *(["--few"] if few else [])]
    asked = pytest(*tests) if tests else PARTS[part]
    command = [str(python), *asked, *(facts if part == "kernels" else ["-p", "no:cacheprovider"])]
    begin = time.monotonic()
    with (place / f"{part}.log").open("w+") as log:
        code = subprocess.run(command, cwd=ROOT, env=given, stdout=log, stderr=subprocess.STDOUT).returncode
        log.seek(0)
        output = log.read()
    result = {
        "seconds": round(time.monotonic() - begin),
        "commit": commit(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if part == "kernels":
        rows = json.loads(found.read_text())["rows"] if code == 0 else []
        # names once, not in every row
        return {"ok": code == 0, **result, "columns": [*rows[0]] if rows else [], "rows": [[*row.values()] for row in rows]}
    return {**outcome(code, output), **result}


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def results(data: Mapping[str, Any], name: str, found: Mapping[str, str]) -> dict[str, Any]:
    """What is recorded of an environment, by part; nothing of one with other versions."""
    old = data.get(name, {})
    return old["parts"] if old.get("versions") == dict(found) else {}


def merged(data: Mapping[str, Any], name: str, found: Mapping[str, str], part: str, result: Any) -> dict[str, Any]:
    """The record with one more result; results of an environment with other versions do not stay."""
    parts = {**results(data, name, found), part: result}
    return {**data, name: {"versions": dict(found), "parts": parts}}


def tried_again(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A result whose failed tests ran once more, with those that still fail beside it; a run that broke off repairs none."""
    all_passed = new["ok"] and "skipped" not in new["counts"]
    failed = [] if all_passed else [test for test in old["failed"] if test in new["failed"]] or old["failed"]
    return {**old, "again": {"failed": failed, "commit": new["commit"]}}


def recorded() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.is_file() else {}


def chosen(names: Sequence[str]) -> list[Environment]:
    known = {environment.name: environment for environment in ENVIRONMENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"matrix: no environment is named {unknown[0]!r}, there are {', '.join(known)}.")
    return [known[name] for name in names] or list(ENVIRONMENTS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environments", nargs="*", help="names of environments (all)")
    parser.add_argument("--part", dest="parts", action="append", choices=PARTS, help="a part; may be repeated (all)")
    parser.add_argument("--few", action="store_true", help="the part kernels: some calls only")
    parser.add_argument("--again", action="store_true", help="the tests that failed, once more; recorded beside the failure")
    parser.add_argument("--list", action="store_true", help="environments and parts, nothing is run")
    options = parser.parse_args(arguments)
    environments = chosen(options.environments)
    if options.list:
        print(*(f"{each.name:<12} {each.torch or 'floors':<8} {each.triton}" for each in environments), *PARTS, sep="\n")
        return 0
    bad = 0
    for environment in environments:
        print(f"{environment.name}: installing", flush=True)
        python = install(environment)
        found = versions(python)
        for part in options.parts or PARTS:
            old = results(recorded(), environment.name, found).get(part, {})
            if options.again and not old.get("failed"):
                continue
            print(f"{environment.name}: {part}, log in .matrix/{environment.name}/{part}.log", flush=True)
            result = run_part(environment, python, part, options.few, old["failed"] if options.again else ())
            kept = tried_again(old, result) if options.again else result
            DATA.write_text(record(json.dumps(merged(recorded(), environment.name, found, part, kept))))
            told = result.get("counts") or f"{len(result.get('rows', ()))} kernels"
            print(f"{environment.name}: {part} {'ok' if result['ok'] else 'FAILED'}, {told}, {result['seconds']} s", flush=True)
            bad += not result["ok"]
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
