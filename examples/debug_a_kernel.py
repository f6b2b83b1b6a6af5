"""From a loss that goes sideways to the line that is wrong: an attention kernel with two defects, and the doctor.

The kernel is a flash-style backward in plain PyTorch, with grouped heads and a causal window, so that it fits on a page; one in
Triton or CUDA is examined in the same way, by its inputs and outputs alone. A notebook as a script: each `# %%` is a cell.

    python examples/debug_a_kernel.py                   seconds on a CPU
"""

# %% The kernel. `REPAIRED` holds the names of repairs that are in force, so that this page can show before and after
import torch
from torch import Tensor

from backlight import AttentionSpec
from backlight.doctor import Report, assert_healthy, diagnose

WINDOW = 15
REPAIRED: set[str] = set()


def weights(q: Tensor, k: Tensor, reach: int) -> Tensor:
    """Scores [B, H, S, S], -inf where a row sees nothing: the keys 0 to `reach` places before it are seen."""
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill((distance < 0) | (distance > reach), -torch.inf)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        s = weights(q, k.repeat_interleave(group, 1), WINDOW)
        lse = s.logsumexp(-1, keepdim=True)
        o = (s - lse).exp() @ v.repeat_interleave(group, 1)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse = ctx.saved_tensors
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
        # the first defect: the backward lets a row see one key more than the forward did
        reach = WINDOW if "window" in REPAIRED else WINDOW + 1
        p = (weights(q, wide_k, reach) - lse).exp()
        dp = do @ wide_v.mT
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * (dp - delta) * q.shape[-1] ** -0.5
        dq, dk, dv = ds @ wide_k, ds.mT @ q, p.mT @ do
        # the second: query heads that share a key head write to the same place, and the last one stays
        dk, dv = (x.unflatten(1, (-1, group)) for x in (dk, dv))
        dk, dv = (x.sum(2) if "heads" in REPAIRED else x[:, :, -1] for x in (dk, dv))
        return dq, dk, dv


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Kernel.apply(q, k, v)


# %% What it is supposed to compute. No reference and no tolerance: the doctor brings a float64 oracle and two yardsticks
spec = AttentionSpec(causal=True, window=(WINDOW, 0))
question = {"shape": (2, 4, 72, 16), "dtype": torch.float32}


def show(report: Report) -> None:
    print(f"{report.verdict.upper()}: {report.headline}")
    print("  " + "   ".join(f"{row.name} {row.status}" for row in report.stages))
    for finding in report.findings:
        print(f"  [{finding.id}] at {finding.where}, mechanism {finding.mechanism}, confidence {finding.confidence}")
        print(f"    next check: {finding.next_check}")


# %% First question
print("as it was")
report = diagnose(attention, spec, **question)
show(report)
assert report.findings[0].id == "window+1"

# %% The finding names the edge of the backward's window. One repair, and the same question again
print("\nwith the window repaired")
REPAIRED.add("window")
report = diagnose(attention, spec, **question)
show(report)
assert report.verdict == "healthy"

# %% Healthy, for this question. The next one: two query heads for each key head
print("\nwith grouped heads")
question["kv_heads"] = 2
report = diagnose(attention, spec, **question)
show(report)
assert report.findings[0].id == "gqa-last-writer"
assert {row.name for row in report.stages if row.status != "ok"} == {"dk", "dv"}, "dq has no sum over heads"

# %% Repaired
print("\nwith the sum over the heads of a group")
REPAIRED.add("heads")
report = diagnose(attention, spec, **question)
show(report)
assert report.verdict == "healthy"

# %% Keep it: in a test this raises, with the report as its message, on the day that somebody breaks it again
for length in (17, 72):
    assert_healthy(attention, spec, **{**question, "shape": (1, 4, length, 16)})
print("\nhealthy for other lengths too; in a test: assert_healthy(fn, spec)")
