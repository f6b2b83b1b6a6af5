"""Count what makes a source hard to read: python tools/house.py prints the counts, --write puts them into CONTRIBUTING.md.

tests/test_house.py holds the source to the numbers that stand there. A function's lines are all of its lines, its docstring
too; the receiver of a method is no argument. A kernel is what a launch starts, `_..._kernel`. Equal lines are compared without
indentation, comments, imports and the heads of functions and classes, which other files must repeat to say the same.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
SOURCE = ROOT / "src" / "backlight"
LONG_FUNCTION, LONG_FILE, MANY_ARGUMENTS, EQUAL_LINES = 60, 450, 10, 6
# their arguments are those of other libraries, or keywords that users read
SIGNATURES = ("api.py", "compat/", "slot/answers.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def functions() -> list[tuple[Path, Function]]:
    return [(path, node) for path in sources() for node in ast.walk(parsed(path)) if isinstance(node, Function)]


def long_functions() -> list[str]:
    found = [(path, node) for path, node in functions() if (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION]
    return [f"{path.relative_to(SOURCE)}: {node.name}" for path, node in found]


def arguments_of(node: Function) -> int:
    every = node.args
    named = [argument.arg for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(every.vararg) + bool(every.kwarg)


def kind_of(path: Path, node: Function) -> str:
    if node.name.startswith("_") and node.name.endswith("_kernel"):
        return "kernels"
    return "signatures" if path.relative_to(SOURCE).as_posix().startswith(SIGNATURES) else "functions"


def many_arguments(kind: str) -> list[str]:
    found = [(path, node) for path, node in functions() if arguments_of(node) > MANY_ARGUMENTS and kind_of(path, node) == kind]
    return [f"{path.relative_to(SOURCE)}: {node.name}" for path, node in found]


def long_files() -> list[str]:
    """Of the whole repository."""
    told = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    paths = [path for name in told.split() if (path := ROOT / name).is_file()] or sources()
    return [str(path.relative_to(ROOT)) for path in paths if path.read_text().count("\n") > LONG_FILE]


def median_file() -> int:
    return round(statistics.median(path.read_text().count("\n") for path in sources()))


# --- equal lines -------------------------------------------------------------------------------------------------------------


def compared(path: Path) -> list[tuple[int, str]]:
    """Lines that may be equal to others, with their numbers."""
    heads: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            heads.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, Function | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            heads.update(range(first, node.body[0].lineno))
    lines = ((number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#") and number not in heads]


def equal_places() -> list[str]:
    """Pairs of places with as many equal lines in a row, each run once."""
    windows: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    numbers: dict[Path, list[int]] = {}
    for path in sources():
        lines = compared(path)
        numbers[path] = [number for number, _ in lines]
        for at in range(len(lines) - EQUAL_LINES + 1):
            windows[tuple(line for _, line in lines[at : at + EQUAL_LINES])].append((path, at))
    starts: dict[tuple[Path, Path, int], set[int]] = defaultdict(set)
    for places in windows.values():
        for number, (left, at) in enumerate(places):
            for right, there in places[number + 1 :]:
                starts[left, right, there - at].add(at)
    found = []
    for (left, right, apart), ats in starts.items():
        begins = [at for before, at in pairwise([-2, *sorted(ats)]) if at != before + 1]
        found += [
            f"{left.relative_to(SOURCE)}:{numbers[left][at]} {right.relative_to(SOURCE)}:{numbers[right][at + apart]}"
            for at in begins
        ]
    return sorted(found)


# --- the table ---------------------------------------------------------------------------------------------------------------


@cache
def counts() -> dict[str, list[str]]:
    """What each row of the table counts."""
    return {
        f"files over {LONG_FILE} lines": long_files(),
        f"functions over {LONG_FUNCTION} lines": long_functions(),
        f"kernels with more than {MANY_ARGUMENTS} arguments": many_arguments("kernels"),
        f"public calls and other libraries' signatures with more than {MANY_ARGUMENTS}": many_arguments("signatures"),
        f"other functions with more than {MANY_ARGUMENTS}": many_arguments("functions"),
        f"pairs of places with {EQUAL_LINES} equal lines": equal_places(),
    }


def bars(page: str) -> dict[str, int]:
    """The numbers that stand in CONTRIBUTING.md."""
    return {words: int(number) for words, number in re.findall(r"^\| ([^|]+) \| (\d+) \|$", page, re.MULTILINE)}


def written(page: str) -> str:
    for words, found in counts().items():
        page = re.sub(rf"^(\| {re.escape(words)} \| )\d+( \|)$", rf"\g<1>{len(found)}\2", page, flags=re.MULTILINE)
    return page


def main() -> None:
    for words, found in counts().items():
        print(f"{len(found):4} {words}", *found, sep="\n       ")
    print(f"{median_file():4} lines of the median file of src")
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
