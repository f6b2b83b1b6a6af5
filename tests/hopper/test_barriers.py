"""Named barriers: sixteen in all, and none with two meanings in one kernel."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from backlight.backends.hopper import barriers as at
from backlight.backends.hopper.backward.narrow.kernel import STAGES


def ring(first: int, stages: int) -> list[int]:
    return [first + stage for stage in range(stages)]


def number(made: object) -> int:
    return int(getattr(made, "value", made))


@pytest.mark.parametrize("stages", [2, 3])
def test_main_kernel(stages: int) -> None:
    one_each = [number(barrier(stages)) for barrier in (at.dq_full, at.diagonals_full)]
    rings = [*ring(at.Q_EMPTY.value, stages), *ring(number(at.do_empty(stages)), stages)]
    # the default partition and two of one warp each
    assert sorted([at.KV_EMPTY.value, at.OUT_FULL.value, *rings, *one_each]) == list(range(6, 10 + 2 * stages))
    assert max(one_each) < 16


def test_narrow_kernel() -> None:
    rings = [*ring(at.NARROW_Q_EMPTY.value, STAGES), *ring(at.NARROW_DO_EMPTY.value, STAGES)]
    used = [*rings, *ring(at.NARROW_DQ_FULL.value, 2), *ring(at.NARROW_DS_FULL.value, 4)]
    assert used == list(range(6, 16))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_kernel_that_owns_rows(stages: int) -> None:
    used = [*ring(at.ROWS_K_EMPTY.value, stages), *ring(at.ROWS_V_EMPTY.value, stages)]
    assert len({*used}) == 2 * stages
    assert {*used} <= {*range(8, 16)}
