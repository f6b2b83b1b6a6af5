"""Wrong cells, rows and channels of a matrix are told as shapes, places and numbers, and the sentences reach every report."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import Subject, diagnose
from backlight.doctor.report import terminal
from backlight.doctor.report.html import html
from backlight.doctor.report.json import dumps, loads
from backlight.doctor.steps import tomography
from backlight.doctor.steps.reading.cells import Seen, describe
from backlight.doctor.steps.reading.places import place_of
from backlight.problems import inputs
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
S = 256
ROW, KEY = torch.arange(S)[:, None], torch.arange(S)[None, :]
VISIBLE = KEY <= ROW


def lost(cells, domain=VISIBLE, **window):
    return describe(Seen(cells & domain, domain, True), **window)


def leaked(cells, **window):
    return describe(Seen(cells & ~VISIBLE, ~VISIBLE, False), **window)


# --- shapes -------------------------------------------------------------------------------------------------------------------


def test_a_rounded_bound_is_told_with_its_period():
    """A loop over tiles of 128 keys whose end is rounded down, for tiles of 64 rows: every second one loses its last keys."""
    found = lost(KEY >= (ROW // 64 * 64 + 64) // 128 * 128, right=0)
    assert (found.tile, found.period) == ((64, 128), 2)
    assert found.text == "the tiles of 64 x 128 on the diagonal are lost, in every second tile of 64 rows from row 0 on"
    assert found.cause == "a loop bound rounded down to whole tiles of 128 keys"


def test_tiles_on_the_diagonal():
    found = lost(KEY >= ROW // 32 * 32, right=0)
    assert found.text == "the tiles of 32 x 32 on the diagonal are lost"
    assert "ends before the tile on the diagonal" in found.cause


def test_triangles_beyond_the_diagonal():
    found = leaked(ROW // 64 * 64 + 64 > KEY, right=0)
    assert found.tile == (64, 64)
    assert found.text.startswith("triangles beyond the diagonal")


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (KEY >= 192, "keys 192-255 are lost in every row"),
        ((KEY >= 64) & (KEY < 128), "keys 64-127 are lost in every row"),
        ((ROW >= 192) & (KEY >= 0), "all keys of rows 192-255 are lost"),
        ((KEY >= 64) & (KEY < 128) & (ROW >= 128) & (ROW < 160), "keys 64-127 of rows 128-159 are lost"),
        (ROW - KEY == 0, "the diagonal i-j = 0 is lost"),
        ((ROW - KEY >= 3) & (ROW - KEY < 9), "the band i-j = 3 to 8 is lost"),
        (ROW >= 0, "all cells are lost"),
    ],
)
def test_plain_shapes(cells, text):
    assert lost(cells.expand(S, S), right=0).text == text


def test_keys_of_every_second_tile_of_rows():
    found = lost((KEY >= 64) & (KEY < 128) & (ROW // 32 % 2 == 1), domain=torch.ones(S, S, dtype=torch.bool))
    assert found.text == "keys 64-127 are lost, in every second tile of 32 rows from row 32 on"
    assert (found.tile, found.period, found.cause) == ((32, 64), 2, "a loop bound rounded down")


def test_masks_that_are_not_applied():
    assert leaked(ROW >= 0, right=0).text == "the triangle above the diagonal is filled"
    assert leaked(ROW - KEY == -1, right=0).cause == "the right edge of the mask is one too wide"
    window = (ROW - KEY <= 40) & VISIBLE
    seen = Seen((ROW - KEY > 40).expand(S, S), ~window, False)
    assert describe(seen, 40, 0).text == "the triangle beyond the left edge of the window is filled"


def test_cells_without_a_shape_are_not_given_one():
    torch.manual_seed(0)
    assert "no shape that has a name" in lost((torch.rand(S, S) < 0.05), right=0).text


def test_blocks_of_a_matrix_are_described_like_the_whole():
    known = (KEY // 64 % 3 == 0).expand(S, S)
    cells = (KEY >= ROW // 32 * 32) & VISIBLE & known
    found = describe(Seen(cells, VISIBLE & known, True), right=0)
    assert found.tile == (32, 32)


# --- places -------------------------------------------------------------------------------------------------------------------

LSE = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (LSE.roll(1, dims=2), "that of the row 1 row before"),
        (LSE.roll(-32, dims=2), "that of the row 32 rows, a tile of 32, after"),
        (LSE[:, :, torch.arange(96) % 32], "that of the row in the first tile of 32"),
        (LSE[:, :, torch.arange(96) // 16 * 16], "that of the first row of its tile of 16"),
        (LSE[:, :1].expand_as(LSE), "that of head 0"),
        (LSE[:1].expand_as(LSE), "that of batch entry 0"),
        (LSE.reshape(2, 96, 3).mT, "read as [B, S, H]"),
        (-LSE, "its own, of the wrong sign"),
    ],
)
def test_whose_row_it_is(read, words):
    everywhere = torch.ones_like(LSE, dtype=torch.bool)
    assert place_of(read, LSE, torch.full_like(LSE, 1e-6), everywhere).words == words


def test_a_right_row_has_no_other_place():
    everywhere = torch.ones_like(LSE, dtype=torch.bool)
    assert place_of(LSE, LSE, torch.full_like(LSE, 1e-6), everywhere) is None
    assert place_of(torch.randn_like(LSE), LSE, torch.full_like(LSE, 1e-6), everywhere) is None


# --- kernels that no entry of the catalogue has ------------------------------------------------------------------------------


def forward(q, k, v, cells=None):
    s = _scores(q, k)
    if cells is not None:
        s = s.masked_fill(cells(q.shape[2]), -torch.inf)
    lse = s.logsumexp(-1)
    return torch.exp(s - lse[..., None].nan_to_num(neginf=0)) @ v, lse


def _scores(q, k):
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def kernel(lse_of=None, channels=None, p_of=None, delta_of=None, k_of=None, v_of=None, forward_cells=None, dq_cells=None):
    def same(x):
        return x

    def backward(do, q, k, v, o, lse):
        k_seen, v_seen = (k_of or same)(k), (v_of or same)(v)
        scale = q.shape[-1] ** -0.5
        p = (p_of or same)(torch.exp(_scores(q, k_seen) - (lse_of or same)(lse)[..., None]))
        dp = do[..., :channels] @ v_seen[..., :channels].mT
        ds = p * (dp - (delta_of or same)((do * o).sum(-1))[..., None])
        mine = ds if dq_cells is None else ds.masked_fill(dq_cells(q.shape[2]), 0)
        return {"dq": scale * mine @ k_seen, "dk": scale * ds.mT @ q, "dv": p.mT @ do}

    def run(q, k, v):
        return forward(q, k, v, forward_cells)

    return Subject(run, backward, layout="BHSD")


def in_head_one(x):
    x = x.clone()
    x[:, 1, :, 16:24] = 0
    return x


def staggered(length):
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return (i // 16 % 3 == 1) & (j < 16)


KERNELS = {
    "first row of a tile": (kernel(lse_of=lambda x: x[:, :, torch.arange(x.shape[2]) // 16 * 16]), "lse-read"),
    "some channels": (kernel(channels=12), "dp-channels"),
    "a row counted from the end": (kernel(delta_of=lambda x: x.flip(2)), "delta-read"),
    "part of a head": (kernel(p_of=in_head_one), "cells-lost-backward"),
    "forward, every third tile": (kernel(forward_cells=staggered), "cells-lost"),
    "dq, every third tile": (kernel(dq_cells=staggered), "cells-lost-dq"),
    "k of another layout": (kernel(k_of=lambda x: x.reshape(1, -1, 2, 16).transpose(1, 2)), "kv-layout-backward"),
    "v of the next key": (kernel(v_of=lambda x: x.roll(-1, 2)), "kv-layout-backward"),
}
SETTINGS = {"shape": (1, 2, 72, 16), "dtype": torch.float32, "level": "full"}
SENTENCES = {
    "first row of a tile": ("row factor", "it is that of the first row of its tile of 16"),
    "some channels": ("channels", "dp leaves out channels 12-15 of dO and v"),
    "a row counted from the end": ("delta", "that of the row counted from the end"),
    "part of a head": ("lost", "keys 16-23 are lost in every row in head 1"),
    "forward, every third tile": ("lost", "keys 0-15 are lost, in every third tile of 16 rows from row 16 on"),
    "dq, every third tile": ("lost", "keys 0-15 are lost, in every third tile of 16 rows from row 16 on"),
    "k of another layout": ("keys", "the backward's k is read as [B, S, H, D]"),
    "v of the next key": ("values", "the backward's v is read from the key 1 key after its own"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_was_read_gives_the_name(name):
    subject, identifier = KERNELS[name]
    report = diagnose(subject, CAUSAL, **SETTINGS)
    kind, words = SENTENCES[name]
    reading = next((each for each in report.readings if each.kind == kind), None)
    assert reading is not None, [each.sentence for each in report.readings]
    assert words in reading.sentence
    assert report.findings[0].id == identifier, report.headline
    assert report.findings[0].mechanism.startswith("established")
    assert any(line.startswith("read off the kernel") and words in line for line in report.findings[0].evidence)
    assert words in " ".join(terminal.text(report).split())
    assert reading.text.replace("'", "&#39;") in html(report)
    assert loads(dumps(report)).readings == report.readings


def test_a_finding_without_a_name_has_the_reading_in_its_headline():
    """Cells that are lost beside something else that nothing explains: the sentence stands, the name does not."""

    def odd(p):
        p = p.clone()
        p[:, :, 32:48, :16] = 0
        return p * (1 + 0.3 * torch.sin(torch.arange(p.shape[-1]) * 1.7))

    report = diagnose(kernel(p_of=odd), CAUSAL, **SETTINGS)
    assert report.findings[0].id == "open"
    assert report.headline.startswith("p (bwd) is wrong: keys 0-15 of rows 32-47 are lost")


def test_healthy_kernels_have_nothing_to_read():
    report = diagnose(kernel(), CAUSAL, **SETTINGS)
    assert report.healthy
    assert not report.readings


# --- long sequences -----------------------------------------------------------------------------------------------------------


def test_blocks_of_long_sequences():
    assert tomography.blocks(512, 64) == list(range(0, 512, 64))
    wrong = torch.zeros(4096)
    wrong[1000] = 1
    chosen = tomography.blocks(4096, 64, wrong)
    assert len(chosen) == tomography.MOST_BLOCKS
    assert {0, 896, 960, 1024, 4032} <= set(chosen)


def test_a_long_sequence_is_read_by_blocks():
    """Tiles of 128 keys that half of the tiles of rows lose, in a sequence of which a part is read."""

    def rounded(length):
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        return (j >= (i // 64 * 64 + 64) // 128 * 128) & (j >= 128)

    problem = inputs.make(CAUSAL, (1, 1, 768, 16), dtype=torch.float32)
    found = tomography.forward_weights(kernel(forward_cells=rounded), problem)
    assert 0 < float(found.known.double().mean()) < 0.3
    assert bool(found.holes.any())
    healthy = tomography.forward_weights(kernel(), problem)
    assert not bool(healthy.holes.any() | healthy.leaks.any())
    assert healthy.relative < 1e-5
