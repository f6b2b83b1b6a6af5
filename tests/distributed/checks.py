"""What every rank of a Gloo world runs, in step with the others; `world.py` starts them, `test_gloo.py` reads the results.

A check is a function of `Rank`. It may compare on any rank; comparisons with the oracle are made on rank 0 alone, since the
float64 truth costs as much as everything else together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, Rank, check
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointError, checkpoint

import backlight
from backlight.cases import BY_NAME, SINGLES, TOGETHER
from backlight.distributed import ContextParallel, context_parallel
from backlight.doctor import Subject, assert_healthy
from backlight.nn import LazyAttention
from backlight.problems.case import BF16, DTYPE_NAMES, FP32, Problem
from backlight.spec import AttentionSpec
from gate import judge
from running import canonical, leaves, options

# packed tensors are [T, H, D], batched ones [B, H, S, D]
PACKED_SEQUENCE, SEQUENCE = 0, 2
ALONG_SEQUENCE = ("q", "k", "v", "gate")


# --- every variant against the oracle ----------------------------------------------------------------------------------------


def run_sharded(problem: Problem, context: ContextParallel, **changes: object) -> dict[str, Tensor]:
    """y, lse and gradients of the whole problem, canonical layout, computed from this rank's shard and gathered."""
    call = problem.call
    dim = PACKED_SEQUENCE if call.varlen else SEQUENCE
    whole = leaves(call, requires_grad=False)
    own = {n: context.shard(x, dim).clone() if n in ALONG_SEQUENCE else x.clone() for n, x in whole.items()}
    own = {n: x.requires_grad_() for n, x in own.items()}
    keywords = options(call) | {"return_lse": True, "context": context} | changes
    if keywords["mask"] is not None:
        keywords["mask"] = context.shard_mask(keywords["mask"])
    if call.varlen:
        y, lse = backlight.attention_varlen(**own, cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, **keywords)
        dy, dlse = problem.dy[0].transpose(0, 1), None if problem.dlse is None else problem.dlse[0]
    else:
        y, lse = backlight.attention(**own, **keywords)
        dy, dlse = problem.dy, problem.dlse
    lse_dim = lse.dim() - 1
    outputs, incoming = [y], [context.shard(dy, dim)]
    if dlse is not None:
        outputs.append(lse)
        incoming.append(context.shard(dlse, lse_dim))
    found = dict(zip(own, torch.autograd.grad(outputs, list(own.values()), incoming), strict=True))
    result = {"y": context.unshard(y, dim), "lse": context.unshard(lse, lse_dim)}
    result |= {f"d{n}": context.unshard(g, dim) if n in ALONG_SEQUENCE else g for n, g in found.items()}
    return canonical(call, result)


def against_oracle(name: str, layout: str, strategy: str, dtype: torch.dtype, rank: Rank) -> None:
    problem = BY_NAME[name].make(dtype)
    result = run_sharded(problem, rank.context(layout=layout, strategy=strategy))
    learned = [result[f"d{term}"] for term in ("bias", "sink", "tau", "entmax") if f"d{term}" in result]
    for gradient in learned:
        first = gradient.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, gradient), "learned terms have other gradients on another rank"
    if rank.number == 0:
        verdict = judge(problem.call, problem.dy, problem.dlse, result)
        assert verdict.ok, f"{name}, {layout}, {strategy}\n{verdict}"


# variants one at a time are slow checks here; `test_simulated.py` runs them in one process by default
MASKED = tuple(BY_NAME[name] for name in ("mask,everything,sq<sk", "mask,everything,batched,sq>sk", "mask,pos,causal"))
SPARSE = tuple(BY_NAME[name] for name in ("entmax,everything,sq<sk", "entmax,everything,batched"))
for case in (*SINGLES, *TOGETHER, *MASKED, *SPARSE):
    for layout, strategy in (("zigzag", "ring"), ("contiguous", "ring"), ("zigzag", "all_to_all")):
        for dtype in (FP32, BF16):
            # two key heads: all-to-all has one for each of two ranks
            worlds = (2,) if strategy == "all_to_all" else (1, 2, 4)
            default = case in (*TOGETHER, *MASKED, *SPARSE) and (layout, dtype) == ("zigzag", FP32)
            key = f"{case.name}; {layout}; {strategy}; {DTYPE_NAMES[dtype]}"
            check(worlds, key, slow=not default)(functools.partial(against_oracle, case.name, layout, strategy, dtype))


@check((2, 4))
def strategy_by_bytes(rank: Rank) -> None:
    """Eight heads at world 4 send less by all-to-all, at world 2 as much; with a narrow window a ring sends less."""
    q = torch.randn(1, 8, 64, 8)
    for window, wanted in ((None, "AllToAll" if rank.world == 4 else "Ring"), ((3, 0), "Ring")):
        context = rank.context(layout="contiguous")
        own = context.shard(q, SEQUENCE)
        bind = functools.partial(backlight.api.call_of, own, own, own, causal=True, window=window)
        strategy, _, _ = context.prepare(bind, None)
        assert type(strategy).__name__ == wanted, (window, strategy)


# --- compositions with the rest of torch -------------------------------------------------------------------------------------


def lazy_layer() -> LazyAttention:
    torch.manual_seed(0)
    return LazyAttention(16, 4, kv_heads=2, distances=6, sink=True)


def layer_gradients(layer: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    y = run(x)
    y.square().sum().backward()
    found = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    return found


def same_as_whole(rank: Rank, wrap: Callable[[nn.Module], Callable]) -> None:
    """A layer on this rank's shard gives the gradients of the layer on the whole sequence, summed over the ranks.

    In float64: gradients that nearly cancel would show fp32's own rounding. Learned terms stay fp32, as their dtype rule says.
    """
    layer = lazy_layer().double()
    x = torch.randn(2, 23, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = layer_gradients(layer, x, layer)
    with context_parallel(rank.mesh, timeout=TIMEOUT) as context:
        positions = context.positions(x.shape[1])
        sharded = layer_gradients(layer, context.shard(x, 1), lambda own: wrap(layer)(own, positions=positions))
    for (name, _), want, got in zip(layer.named_parameters(), whole, sharded, strict=True):
        if name not in ("bias", "tau", "sink"):
            dist.all_reduce(got)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@check((2, 4))
def layer_inside_the_block(rank: Rank) -> None:
    same_as_whole(rank, lambda layer: layer)


@check((2,))
def activation_checkpointing(rank: Rank) -> None:
    same_as_whole(rank, lambda layer: functools.partial(checkpoint, layer, use_reentrant=False))


@check((2,), slow=True)
def torch_compile(rank: Rank) -> None:
    """The graph breaks at the communication, and only there."""
    from torch._dynamo.testing import CompileCounter

    counted = CompileCounter()
    same_as_whole(rank, lambda layer: torch.compile(layer, backend=counted))
    assert counted.frame_count == 2, f"{counted.frame_count} graphs: before the attention and after it"


@check((2,))
def checkpoint_recomputed_outside_the_block_is_an_error(rank: Rank) -> None:
    """Without its context the recomputation would be another function; torch notices, because other tensors are saved."""
    layer, x = lazy_layer(), torch.randn(2, 24, 16)
    with context_parallel(rank.mesh, timeout=TIMEOUT) as context:
        positions = context.positions(24)
        y = checkpoint(layer, context.shard(x, 1), positions=positions, use_reentrant=False)
    with pytest.raises(CheckpointError):
        y.sum().backward()


@check((4,))
def fsdp2_on_another_dimension(rank: Rank) -> None:
    """2 x 2: parameters sharded over 'fsdp', sequences over 'cp'. Three SGD steps equal those of one process."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
    plain, sharded = lazy_layer(), lazy_layer()
    fully_shard(sharded, mesh=mesh["fsdp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (plain, sharded)]
    generator = torch.Generator().manual_seed(2)
    cp = mesh["cp"].get_group()
    for _ in range(3):
        x = torch.randn(4, 22, 16, generator=generator)
        plain(x).square().mean().backward()
        row = mesh["fsdp"].get_local_rank()
        with context_parallel(mesh["cp"], timeout=TIMEOUT, sum_learned=False) as context:
            own = context.shard(x[2 * row : 2 * row + 2], 1)
            # FSDP averages over its rows; each rank adds its share of its row's mean
            (sharded(own, positions=context.positions(22)).square().sum() / (2 * 22 * 16)).backward()
        for parameter in sharded.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=cp)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@check((2,))
def forward_mode(rank: Rank) -> None:
    """`attention_jvp`, torch.func.jvp with a backward beside it, and DTensors."""
    torch.manual_seed(4)
    q, k, v, tq, tk, tv = (torch.randn(2, 4, 22, 8) for _ in range(6))
    tau, ttau = torch.tensor([-0.7, 0.4, -0.3, 0.0]), torch.randn(4)
    wanted = backlight.attention_jvp(q, k, v, tq, tk, tv, causal=True, tau=tau, ttau=ttau)
    for strategy in ("ring", "all_to_all"):
        context = rank.context(layout="contiguous", strategy=strategy)
        own, along = ([context.shard(x, SEQUENCE) for x in each] for each in ((q, k, v), (tq, tk, tv)))

        def attend(*x: Tensor, context: ContextParallel = context) -> Tensor:
            return backlight.attention(*x, causal=True, tau=tau, context=context)

        leaf = [x.clone().requires_grad_() for x in own]
        y, _ = torch.func.jvp(attend, tuple(leaf), tuple(along))
        found = torch.autograd.grad(y.square().sum(), leaf)
        wanted_gradients = torch.autograd.grad(attend(*leaf).square().sum(), leaf)
        torch.testing.assert_close(found, wanted_gradients)
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
        found = torch.func.grad(lambda *x, attend=attend: attend(*x).square().sum(), argnums=(0, 1, 2))(*turned)
        torch.testing.assert_close(found, wanted_gradients)
        both = backlight.attention_jvp(*own, *along, causal=True, tau=tau, ttau=ttau, context=context)
        torch.testing.assert_close(tuple(context.unshard(x, SEQUENCE) for x in both), wanted)
        placed = [DTensor.from_local(x, rank.mesh, [Shard(SEQUENCE)]) for x in (*own, *along)]
        both = backlight.attention_jvp(*placed, causal=True, tau=tau, ttau=ttau, context=context)
        torch.testing.assert_close(tuple(x.full_tensor() for x in both), wanted)


@check((2,))
def dtensor(rank: Rank) -> None:
    """DTensors sharded along the sequence in, the same out; gradients are DTensors with the values of the plain call."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4, 22, 8) for _ in range(3))
    bias = torch.randn(4, 9)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    y = backlight.attention(*inputs[:3], causal=True, bias=inputs[3])
    wanted = torch.autograd.grad(y.square().sum(), inputs)
    # a contiguous layout is what Shard(2) means
    context = rank.context(layout="contiguous")
    placed = [DTensor.from_local(context.shard(x, 2), rank.mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
    table = DTensor.from_local(bias, rank.mesh, [Replicate()]).requires_grad_()
    out, lse = backlight.attention(*placed, causal=True, bias=table, context=context, return_lse=True)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),)
    assert lse.shape == (2, 4, 22)
    torch.testing.assert_close(out.full_tensor(), y.detach())
    found = torch.autograd.grad(out.square().sum(), [*placed, table])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.full_tensor(), want, atol=1e-5, rtol=1e-4)
    by_heads = [x.redistribute(placements=[Shard(1)]) for x in placed]
    with pytest.raises(ValueError, match=r"q must be sharded as \(Shard\(dim=2\),\)"):
        backlight.attention(*by_heads, context=context)


@check((2,), slow=True)
def transformers_model(rank: Rank) -> None:
    """A small Llama with attn_implementation="backlight", inside the block, gives the loss of the whole sequence."""
    try:
        import transformers
    except ImportError:
        return
    from backlight.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = "backlight"
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 50, (1, 24))
    loss = nn.CrossEntropyLoss(reduction="sum")

    def step(ids: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # with a mask, transformers does not take a jump in the positions of a zigzag shard for the border of packed sequences
        seen = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=seen, position_ids=positions[None], use_cache=False).logits
        value = loss(logits.flatten(0, 1), labels.flatten())
        value.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return value.detach(), gradient

    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
    wanted = step(tokens, labels, torch.arange(24))
    with context_parallel(rank.mesh, timeout=TIMEOUT) as context:
        found = step(context.shard(tokens, 1), context.labels(tokens, 1), context.positions(24))
    for want, got in zip(wanted, found, strict=True):
        dist.all_reduce(got)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-3)


# --- the doctor --------------------------------------------------------------------------------------------------------------


@check((2,))
def doctor_is_content(rank: Rank) -> None:
    """The examination runs on both ranks in step; both must find the sharded call healthy."""
    context = rank.context()

    def forward(q, k, v, causal=False, window=None, bias=None, tau=None, sink=None):
        own = [context.shard(x, SEQUENCE) for x in (q, k, v)]
        y, lse = backlight.attention(
            *own, causal=causal, window=window, bias=bias, tau=tau, sink=sink, return_lse=True, context=context
        )
        return context.unshard(y, SEQUENCE), context.unshard(lse, SEQUENCE)

    def backward(do, q, k, v, o, lse, causal=False, window=None, bias=None, tau=None, sink=None):
        terms = {n: x.detach().requires_grad_() for n, x in (("bias", bias), ("sink", sink), ("tau", tau)) if x is not None}
        own = [context.shard(x, SEQUENCE).detach().requires_grad_() for x in (q, k, v)]
        y = backlight.attention(*own, causal=causal, window=window, **terms, context=context)
        found = torch.autograd.grad(y, [*own, *terms.values()], context.shard(do, SEQUENCE).contiguous())
        named = dict(zip(("dq", "dk", "dv", *(f"d{n}" for n in terms)), found, strict=True))
        return {n: context.unshard(g, SEQUENCE) if n in ("dq", "dk", "dv") else g for n, g in named.items()}

    subject = Subject(forward, backward, layout="BHSD", name="context parallel")
    for spec in (AttentionSpec(causal=True), AttentionSpec(causal=True, window=(70, None), bias=True, sink=True, tau=True)):
        assert_healthy(subject, spec, shape=(1, 4, 136, 16), kv_heads=2)
