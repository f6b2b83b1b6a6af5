"""The hub kernel, built from the sources: without an installed backlight, beside it, by `kernels`' loader, by transformers."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import build_hub_kernel
import pytest

# no other backlight is to be had
ALONE = """
import sys

class NoOther:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "backlight":
            raise ImportError("the kernel imports the package")

sys.meta_path.insert(0, NoOther())
"""
# from a folder, as `kernels` does it
LOAD = """
import importlib.util, sys, torch

spec = importlib.util.spec_from_file_location("_kernel", sys.argv[1] + "/__init__.py")
kernel = sys.modules["_kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
CHECK = """
torch.manual_seed(0)
q, k, v = (torch.randn(2, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
y = kernel.flash_attn_func(q, k, v, causal=True)
turned = [x.transpose(1, 2) for x in (q, k, v)]
want = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)
for got, wanted in zip((y, *torch.autograd.grad(y.sum(), (q, k, v))), (want, *torch.autograd.grad(want.sum(), (q, k, v)))):
    torch.testing.assert_close(got, wanted)
cu = torch.tensor([0, 4, 9], dtype=torch.int32)
packed = kernel.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, causal=True)
torch.testing.assert_close(packed[:4], y[0, :4])
compiled = torch.compile(kernel.flash_attn_func, fullgraph=True, backend="aot_eager")(q, k, v, causal=True)
torch.testing.assert_close(compiled, y)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "backlight"
    build_hub_kernel.build(out)
    return out


def run(code: str, *arguments: str, **environment: str) -> None:
    given = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    ended = subprocess.run([sys.executable, "-c", code, *arguments], env=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_imports_are_relative(built: Path) -> None:
    for place in ("torch-ext/backlight", "build/torch-universal"):
        files = list((built / place).rglob("*.py"))
        assert len(files) > 50
        for path in files:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not [name for name in names if name.partition(".")[0] == "backlight"], path


def test_only_what_is_needed_is_in_it(built: Path) -> None:
    folders = {path.name for path in (built / "build" / "torch-universal").iterdir()}
    assert {"api.py", "backends", "compat", "data", "mask", "metadata.json"} <= folders
    assert not folders & {"doctor", "bench", "distributed", "demo", "cli.py", "reference", "integrations", "nn"}
    assert 'repo-id = "backlight/backlight"' in (built / "build.toml").read_text()


@pytest.mark.parametrize("around", ["alone", "beside the package"])
def test_loaded_from_a_folder(built: Path, around: str) -> None:
    """Two libraries of operators in one process, too."""
    before = ALONE if around == "alone" else "import backlight\n"
    run(before + LOAD + CHECK, str(built / "build" / "torch-universal"))


def need(*packages: str) -> None:
    """`tools/kernels.py` has the name of the package here, so it is asked for by its metadata."""
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")


def test_loaded_by_kernels(built: Path) -> None:
    need("kernels")
    run(
        "import torch\nfrom pathlib import Path\nfrom kernels import get_local_kernel\nimport sys\n"
        "kernel = get_local_kernel(Path(sys.argv[1]))\n" + CHECK,
        str(built),
    )


def test_loaded_by_transformers(built: Path) -> None:
    need("kernels", "transformers")
    code = """
import sys, torch, transformers
if not transformers.utils.is_kernels_available():
    sys.exit("this transformers takes another version of kernels")
sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
config = transformers.LlamaConfig(**sizes)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
tokens, mask = torch.randint(40, (2, 12)), torch.ones(2, 12, dtype=torch.long)
mask[1, :5] = 0
with torch.no_grad():
    model.set_attn_implementation("eager")
    want = model(tokens, attention_mask=mask).logits[mask.bool()].float()
    model.set_attn_implementation("backlight/backlight", allow_all_kernels=True)
    got = model(tokens, attention_mask=mask).logits[mask.bool()].float()
assert (got - want).norm() <= 1e-2 * want.norm(), (got - want).norm() / want.norm()
"""
    try:
        run(code, LOCAL_KERNELS=f"backlight/backlight={built}")
    except AssertionError as error:
        if "another version of kernels" in str(error):
            pytest.skip(str(error))
        raise
