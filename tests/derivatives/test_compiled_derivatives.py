"""The transforms of test_every_transform.py inside a compiled graph, and around one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from entries import ENTRIES, B, D, H, S, draw
from transforms import REFUSED, SECOND, VALUES, dual

pytestmark = [
    pytest.mark.clean_memory,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning"),
]


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_compiled_values(transform: str) -> None:
    """Inside a graph, and around one."""
    entry, x = ENTRIES["attention, terms"], draw(B, H, S, D, seed=7)
    wanted = VALUES[transform](entry.truth, x)
    inside = torch.compile(lambda x: VALUES[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(x), wanted)
    torch.testing.assert_close(VALUES[transform](torch.compile(entry.ours, backend="aot_eager"), x), wanted)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["jvp", "hessian", "jvp of grad", "grad of grad", "grad of jvp"])
def test_compiled_second_values(transform: str) -> None:
    entry, x = ENTRIES["attention, terms"], draw(B, H, S, D, seed=7)
    wanted = SECOND[transform](entry.truth, x)
    inside = torch.compile(lambda x: SECOND[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(x), wanted)
    for warm in (False, True):
        compiled = torch.compile(entry.ours, backend="aot_eager")
        if warm:
            compiled(x)
        torch.testing.assert_close(SECOND[transform](compiled, x), wanted)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["grad of grad of grad", "jvp of jvp"])
def test_compiled_refusals(transform: str) -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    inside = torch.compile(lambda x: REFUSED[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    # the compiler puts its own words around ours
    with pytest.raises(Exception, match=r"backlight\.attention has no (third|forward-mode) derivative"):
        inside(x)


@pytest.mark.usefixtures("nothing_compiled")
def test_dual_numbers_in_a_graph_are_refused() -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    with pytest.raises(Exception, match=r"has no forward-mode derivative by dual numbers"):
        torch.compile(lambda x: dual(entry.ours, x), fullgraph=True, backend="aot_eager")(x)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["functional.hvp", "penalty of others"])
def test_double_backward_of_compiled_functions_is_refused_by_torch(transform: str) -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        SECOND[transform](torch.compile(entry.ours, backend="aot_eager"), x)
