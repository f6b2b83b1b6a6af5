"""Every test runs with poisoned allocations: memory nobody wrote holds NaN (integers: their largest value)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._python_dispatch import _disable_current_modes

from later import LATER
from thinned import first_of_each, left_out

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)

settings.register_profile(
    "backlight",
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("backlight")

# parallel workers share the cores; more threads than cores only wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, filled with what no correct kernel may ever read."""
    if tensor.is_meta or not tensor.numel() or torch.compiler.is_compiling():
        return tensor
    if torch._C._len_torch_dispatch_stack():
        # who watches operations must not see this one
        with _disable_current_modes():
            return poison(tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.detach().fill_(torch.nan)
    elif tensor.dtype != torch.bool and not tensor.is_quantized:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches Python's allocators, which is where this library allocates; deterministic mode would poison C++ allocations
    as well, but it also switches every kernel to its deterministic path, so a test asks for that on its own."""
    if request.node.get_closest_marker("clean_memory"):
        return
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clean_memory: leave the allocators alone (compilers look into them)")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    wait(items)
    result = yield
    if not torch.cuda.is_available():
        skip_what_needs_a_card(config, items)
    return result


def wait(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LATER):
            item.add_marker(pytest.mark.later)
    # what waits anyway shows nothing
    quick = [
        item for item in items if hasattr(item, "callspec") and not {"slow", "later"} & {x.name for x in item.iter_markers()}
    ]
    waiting = left_out((item.nodeid, item.callspec.params) for item in quick)
    for item in quick:
        if item.nodeid in waiting:
            item.add_marker(pytest.mark.later)


def skip_what_needs_a_card(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each function once, whatever its parameters: thousands of tests that are skipped take longer than many that run."""
    needy = {item.nodeid: item for item in items if item.get_closest_marker("gpu")}
    told = first_of_each(needy)
    for name in told:
        needy[name].add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    config.hook.pytest_deselected(items=[item for name, item in needy.items() if name not in told])
    items[:] = [item for item in items if item.nodeid in told or item.nodeid not in needy]
