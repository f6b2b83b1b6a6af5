"""The layers: what they compute, what they store, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.call import Call
from backlight.nn import Attention, LazyAttention
from backlight.nn.rotary import angles, packed_positions, rotate
from backlight.reference import oracle

DIM, HEADS = 24, 4


def varied(layer: nn.Module) -> nn.Module:
    """Learned terms away from their starting values, so that each of them matters."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "bias":
                parameter.normal_()
            elif name == "sink":
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
            elif name == "tau":
                parameter.copy_(torch.linspace(-0.8, 0.4, parameter.numel()))
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return layer


LAYERS = {
    "plain": lambda **o: Attention(DIM, HEADS, **o),
    "grouped": lambda **o: Attention(DIM, HEADS, kv_heads=2, **o),
    "wide heads": lambda **o: Attention(DIM, HEADS, kv_heads=1, head_dim=10, **o),
    "everything": lambda **o: Attention(
        DIM, HEADS, kv_heads=2, window=(5, 0), softcap=3.0, scale=0.4, qk_norm=True, sink=True, gate=True, linear_bias=True, **o
    ),
    "without rope": lambda **o: Attention(DIM, HEADS, rope=None, **o),
    "lazy": lambda **o: LazyAttention(DIM, HEADS, distances=7, **o),
    "lazy, everything": lambda **o: LazyAttention(
        DIM, HEADS, kv_heads=2, distances=4, window=(6, 0), qk_norm=True, sink=True, gate=True, **o
    ),
}


@pytest.fixture(params=LAYERS, ids=str)
def layer(request: pytest.FixtureRequest) -> Attention:
    return varied(LAYERS[request.param](dtype=torch.float64))


def by_hand(layer: Attention, x: Tensor) -> Tensor:
    """The layer written out for one batch of whole sequences, with the oracle in its middle."""
    q, k, v = layer.qkv(x).split([h * layer.head_dim for h in (layer.heads, layer.kv_heads, layer.kv_heads)], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for t in (q, k, v))
    if layer.q_norm is not None:
        q, k = (
            t * torch.rsqrt(t.square().mean(-1, keepdim=True) + torch.finfo(t.dtype).eps) * norm.weight
            for t, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if layer.rope is not None:
        half = layer.head_dim // 2
        frequency = layer.rope ** (-torch.arange(half, dtype=x.dtype) / half)
        turn = torch.polar(torch.ones(()).to(x), torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency)
        q, k = (torch.complex(t[..., :half], t[..., half:]) * turn for t in (q, k))
        q, k = (torch.cat((t.real, t.imag), dim=-1) for t in (q, k))
    gate = None if layer.gate is None else layer.gate(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    y = oracle(Call(layer.spec, q, k, v, gate=gate, **layer.terms())).y
    return layer.out(y.transpose(1, 2).flatten(2))


def test_layer_is_its_formula(layer: Attention) -> None:
    x = torch.randn(2, 11, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_hand(layer, x))


def test_every_parameter_has_a_gradient_in_every_head(layer: Attention) -> None:
    layer(torch.randn(2, 11, DIM, dtype=torch.float64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        heads = (
            parameter.grad if name in ("tau", "sink") else parameter.grad.flatten(1).abs().sum(1) if name == "bias" else None
        )
        assert (parameter.grad != 0).any(), name
        if heads is not None:
            assert (heads != 0).all(), f"{name}: a head without gradient"


def test_packed_gives_what_each_gives_alone(layer: Attention) -> None:
    lengths = [3, 1, 9]
    x = torch.randn(sum(lengths), DIM, dtype=torch.float64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed = layer(x, cu_seqlens=cu)
    alone = torch.cat([layer(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(packed, alone)


def test_rope_knows_only_differences() -> None:
    layer = Attention(DIM, HEADS, dtype=torch.float64)
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    moved = layer(x, positions=torch.arange(100, 109))
    torch.testing.assert_close(layer(x), moved)
    stretched = layer(x, positions=3 * torch.arange(9))
    assert (stretched - moved).abs().max() > 1e-3
    per_batch = layer(x.expand(2, -1, -1), positions=torch.stack([torch.arange(9), 3 * torch.arange(9)]))
    torch.testing.assert_close(per_batch, torch.cat([moved, stretched]))


def test_rope_angles_survive_long_positions_and_narrow_dtypes() -> None:
    """bf16 cannot count beyond 256: angles come from integers, in fp32, whatever the dtype of x."""
    x = torch.randn(1, 2, 1, 8)
    cos, sin = angles(torch.tensor([5000, 5001]), 8, 10000.0, torch.float32)
    wide = rotate(x, cos, sin)
    narrow = rotate(x.bfloat16(), cos, sin)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(wide.norm(dim=-1), x.norm(dim=-1))
    assert (wide[:, 0] - rotate(x, *angles(torch.tensor([5001, 5001]), 8, 10000.0, torch.float32))[:, 0]).abs().max() > 0.1


def test_packed_positions() -> None:
    assert packed_positions(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist() == [0, 1, 0, 1, 2]


# --- what is stored ----------------------------------------------------------------------------------------------------------


def test_state_dict_is_stable() -> None:
    """Names and shapes of checkpoints: a change here breaks every checkpoint there is."""
    layer = LazyAttention(DIM, HEADS, kv_heads=2, distances=7, qk_norm=True, sink=True, gate=True, linear_bias=True)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "qkv.weight": (48, DIM),
        "qkv.bias": (48,),
        "out.weight": (DIM, 24),
        "out.bias": (DIM,),
        "gate.weight": (24, DIM),
        "gate.bias": (24,),
        "q_norm.weight": (6,),
        "k_norm.weight": (6,),
        "sink": (HEADS,),
        "bias": (HEADS, 7),
        "tau": (HEADS,),
    }
    assert set(Attention(DIM, HEADS).state_dict()) == {"qkv.weight", "out.weight"}


def test_state_dict_round_trip(layer: Attention, tmp_path) -> None:
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    fresh = next(make(dtype=torch.float64) for make in LAYERS.values() if repr(make(dtype=torch.float64)) == repr(layer))
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    assert torch.equal(fresh(x), layer(x))


def test_reset_parameters_forgets_everything() -> None:
    layer = varied(LazyAttention(DIM, HEADS, distances=7, sink=True, qk_norm=True, linear_bias=True, tau=-0.25))
    nn.init.ones_(layer.qkv.bias)
    before = layer.qkv.weight.clone()
    layer.reset_parameters()
    assert (layer.bias == 0).all()
    assert (layer.tau == -0.25).all()
    assert (layer.sink == 0).all()
    assert (layer.q_norm.weight == 1).all()
    assert (layer.qkv.bias == 0).all()
    assert (layer.qkv.weight != before).any()
    assert layer.qkv.weight.std().item() == pytest.approx(DIM**-0.5, rel=0.1)


def test_a_fresh_lazy_layer_prunes_little_and_learns_everywhere() -> None:
    layer = LazyAttention(DIM, HEADS)
    x = torch.randn(2, 40, DIM)
    with backlight.nn.statistics(layer) as found:
        layer(x).square().sum().backward()
    assert (found[""].density > 0.5).all()
    assert (found[""].dead_rows == 0).all()
    assert (layer.tau.grad != 0).all()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_terms_stay_fp32(cast: torch.dtype) -> None:
    layer = varied(LazyAttention(DIM, HEADS, distances=7, sink=True))
    layer(torch.randn(1, 5, DIM)).sum().backward()
    exact = {name: getattr(layer, name).detach().clone() for name in ("bias", "tau", "sink")}
    model = nn.Sequential(layer).to(cast)
    for name, value in exact.items():
        parameter = getattr(model[0], name)
        assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.float32)
        assert torch.equal(parameter, value), f"{name} was rounded on the way"
        assert isinstance(parameter, nn.Parameter)
    assert model[0].qkv.weight.dtype == cast
    model.zero_grad()
    y = model(torch.randn(1, 5, DIM, dtype=cast))
    assert y.dtype == cast
    y.sum().backward()
    assert layer.bias.grad.dtype == torch.float32
    model.double()
    assert (layer.bias.dtype, layer.qkv.weight.dtype) == (torch.float64, torch.float64)


def test_terms_are_fp32_from_the_start() -> None:
    layer = LazyAttention(DIM, HEADS, dtype=torch.bfloat16, sink=True)
    assert {layer.bias.dtype, layer.tau.dtype, layer.sink.dtype} == {torch.float32}
    assert layer.qkv.weight.dtype == torch.bfloat16


def test_meta_then_real() -> None:
    """Large models are built on the meta device and filled later."""
    layer = LazyAttention(DIM, HEADS, distances=7, sink=True, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(layer(torch.randn(1, 5, DIM))).all()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_autocast() -> None:
    layer = varied(LazyAttention(DIM, HEADS, kv_heads=2, distances=7, qk_norm=True, gate=True, sink=True))
    x = torch.randn(2, 9, DIM)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain, atol=0.05, rtol=0.05)
    y.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_two_sided_table() -> None:
    """Not causal: the table's middle column is distance 0, keys ahead lie to its left."""
    layer = LazyAttention(DIM, HEADS, distances=4, two_sided=True, causal=False, rope=None, tau=0.0, dtype=torch.float64)
    assert (layer.bias.shape, layer.spec.bias_origin) == ((HEADS, 7), 3)
    with torch.no_grad():
        layer.bias.fill_(-1e9)
        layer.bias[:, 3 - 2] = 0
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    v = layer.project(x)[2]
    expected = layer.out(v.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[:, :2], expected[:, 2:], msg="rows read the key two steps ahead")


# --- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(24, 4, kv_heads=3), "heads must be a multiple of kv_heads, got 4 and 3"),
        (lambda: Attention(25, 4), "dim must be a multiple of heads when head_dim is not given, got 25 and 4"),
        (lambda: Attention(12, 4), "rope needs an even head_dim, got 3"),
        (lambda: Attention(24, 4, window=(-1, 0)), "window left must be >= 0"),
        # 0 and () are false, and used to mean no window
        (lambda: Attention(24, 4, window=0), r"window must be a pair \(left, right\) or None, got 0"),
        (lambda: Attention(24, 4, window=()), r"window must be a pair \(left, right\) or None, got \(\)"),
        (lambda: LazyAttention(24, 4, window=0), r"window must be a pair \(left, right\) or None, got 0"),
        # a length of 1 used to broadcast over the rows
        (
            lambda: Attention(24, 4)(torch.randn(2, 5, 24), positions=torch.tensor([3])),
            r"positions must be \[5\] or \[2, 5\], one for each row of x, got shape \(1,\)",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(2, 5, 24), positions=torch.zeros(2, 1, dtype=torch.int64)),
            r"positions must be \[5\] or \[2, 5\], one for each row of x, got shape \(2, 1\)",
        ),
        (
            lambda: Attention(24, 4)(torch.randn(5, 24), cu_seqlens=torch.tensor([0, 5]), positions=torch.tensor([3])),
            r"positions must be \[5\], one for each row of x, got shape \(1,\)",
        ),
        (lambda: LazyAttention(24, 4, distances=0), "distances must be an int >= 1, got 0"),
        (lambda: Attention(24, 4)(torch.randn(5, 24)), r"x must be \[B, S, 24\], got shape \(5, 24\)"),
        (lambda: Attention(24, 4)(torch.randn(1, 5, 23)), r"x must be \[B, S, 24\], got shape \(1, 5, 23\)"),
        (
            lambda: Attention(24, 4)(torch.randn(1, 5, 24), cu_seqlens=torch.tensor([0, 5])),
            r"x must be \[T, 24\] with cu_seqlens, got shape \(1, 5, 24\)",
        ),
    ],
)
def test_bad_arguments_get_a_sentence(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_window_of_nothing_but_the_row_itself() -> None:
    """(0, 0) is a window, the smallest there is."""
    layer = Attention(DIM, HEADS, window=[0, 0], dtype=torch.float64)
    assert layer.spec.window == (0, 0)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.out(layer.project(x)[2].transpose(1, 2).flatten(2)))


def test_repr_names_the_geometry() -> None:
    shown = repr(LazyAttention(24, 4, kv_heads=2, window=(5, 0), distances=9))
    for word in ("24", "heads=4", "kv_heads=2", "window=(5, 0)", "rope=10000.0", "distances=9"):
        assert word in shown
