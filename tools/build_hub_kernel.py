"""A kernel for the Hugging Face hub, in the layout that the project `kernels` asks for, from the same sources.

    python tools/build_hub_kernel.py build/hub --repo-id somebody/backlight

OUT/build.toml, OUT/torch-ext/backlight       what kernel-builder takes
OUT/build/torch-universal                     what `kernels.get_kernel` loads: the same modules and metadata.json

Only the modules that FlashAttention's functions need are taken. Imports become relative and operators get a name of their own:
the hub asks for both, so that a kernel lives beside an installed backlight and beside other versions of itself.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "backlight"
# where the walk along imports begins, besides the backends, which are looked up by name
STARTS = ("compat.flash_attn", "compat.flash_attn_interface", "api", "slopes", "mask", "tangents")
LICENSE = "apache-2.0"
EXPORTS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
INIT = '''"""Attention, forward and backward, by backlight {version}: FlashAttention's functions and `attention` itself."""

from . import mask
from .api import attention, attention_varlen
from .compat.flash_attn import (
    {exports},
)
from .slopes import alibi
from .tangents import attention_jvp, attention_varlen_jvp

__version__ = "{version}"
__all__ = ["alibi", "attention", "attention_jvp", "attention_varlen", "attention_varlen_jvp", "mask", {quoted}]
'''
BUILD = """[general]
name = "backlight"
version = 1
edition = 5
license = "{license}"
backends = ["cuda"]

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
"""


# --- which modules -----------------------------------------------------------------------------------------------------------


def path_of(module: str) -> Path | None:
    """The file of a module of ours, "" for the package itself."""
    for path in (SOURCE / f"{module.replace('.', '/')}.py", SOURCE / module.replace(".", "/") / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "backlight":
            home = node.module.partition(".")[2]
            found |= {home} | {f"{home}.{alias.name}".lstrip(".") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("backlight.")}
    return {module for module in found if module and path_of(module)}


def backends() -> tuple[str, ...]:
    """The names in `registry.ORDER`."""
    found = re.search(r"^ORDER[^=]* = (\([^)]*\))", (SOURCE / "registry.py").read_text(), flags=re.M)
    assert found is not None
    return ast.literal_eval(found[1])


def needed() -> set[str]:
    """All modules along the imports, and the packages that they are in."""
    found: set[str] = set()
    waiting = {*STARTS, *(f"backends.{name}" for name in backends())}
    while waiting:
        module = waiting.pop()
        found.add(module)
        path = path_of(module)
        assert path is not None, module
        parents = {module.rpartition(".")[0]} - {""}
        # what a drop-in's package re-exports is not needed: its file stays empty
        waiting |= ((imported(path) if module != "compat" else set()) | parents) - found
    return found


# --- how they read -----------------------------------------------------------------------------------------------------------


def rewritten(text: str, depth: int, namespace: str) -> str:
    """A module with relative imports, `depth` packages below the kernel, and operators in a namespace of its own."""
    dots = "." * (depth + 1)
    text = re.sub(r"^( *)from backlight\.([\w.]+) import", rf"\1from {dots}\2 import", text, flags=re.M)
    text = re.sub(r"^( *)from backlight import", rf"\1from {dots} import", text, flags=re.M)
    text = re.sub(r"^( *)import backlight\.(\w+)$", rf"\1from {dots} import \2", text, flags=re.M)
    # the kernel itself, which is being imported while this is
    itself = 'backlight = __import__("sys").modules[__name__.partition(".")[0]]'
    text = re.sub(r"^( *)import backlight$", rf"\1{itself}", text, flags=re.M)
    text = text.replace('"backlight::', f'"{namespace}::').replace("torch.ops.backlight", f"torch.ops.{namespace}")
    text = text.replace('Library("backlight"', f'Library("{namespace}"')
    return text.replace('serialized_type_name="backlight.', f'serialized_type_name="{namespace}.')


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (SOURCE / "__init__.py").read_text(), flags=re.M)
    assert found is not None
    return found[1]


def digest(modules: set[str]) -> str:
    found = hashlib.sha256()
    for module in sorted(modules):
        path = path_of(module)
        assert path is not None
        found.update(module.encode() + path.read_bytes())
    return found.hexdigest()[:10]


def write_package(target: Path, namespace: str, modules: set[str]) -> None:
    for module in sorted(modules):
        path = path_of(module)
        assert path is not None
        place = target / path.relative_to(SOURCE)
        place.parent.mkdir(parents=True, exist_ok=True)
        depth = len(place.relative_to(target).parts) - 1
        place.write_text("" if module == "compat" else rewritten(path.read_text(), depth, namespace))
    exports, quoted = ",\n    ".join(EXPORTS), ", ".join(f'"{name}"' for name in EXPORTS)
    (target / "__init__.py").write_text(INIT.format(version=version(), exports=exports, quoted=quoted))
    shutil.copytree(SOURCE / "data" / "tuning", target / "data" / "tuning", dirs_exist_ok=True)


def build(out: Path, repo_id: str = "backlight/backlight") -> Path:
    """Write the kernel; returns the folder that is loaded."""
    modules = needed()
    namespace = f"_backlight_{digest(modules)}"
    shutil.rmtree(out, ignore_errors=True)
    loaded = out / "build" / "torch-universal"
    for target in (out / "torch-ext" / "backlight", loaded):
        write_package(target, namespace, modules)
    (out / "build.toml").write_text(BUILD.format(license=LICENSE, repo_id=repo_id))
    metadata = {"name": "backlight", "id": namespace, "version": 1, "license": LICENSE, "python-depends": []}
    (loaded / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cuda"}}, indent=2) + "\n")
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repo-id", default="backlight/backlight")
    options = parser.parse_args()
    loaded = build(options.out, options.repo_id)
    files = list(loaded.rglob("*.py"))
    print(f"{len(files)} modules, {sum(path.stat().st_size for path in files):,} bytes in {loaded}")


if __name__ == "__main__":
    main()
