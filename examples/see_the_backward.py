"""Take one call apart: every quantity of forward and backward by name, and two laws they obey."""

import torch

from backlight import AttentionSpec
from backlight.call import Call
from backlight.reference import STAGES, oracle

torch.manual_seed(0)
spec = AttentionSpec(causal=True, window=(3, 0), tau=True)
q, k, v, dy = (torch.randn(1, 2, 8, 4) for _ in range(4))
trace = oracle(Call(spec, q, k, v, tau=torch.tensor([-0.5, 0.5])), dy)

for name, value in trace.items():
    stage = STAGES[name]
    print(f"{name:10} eq. {stage.equation:8} from {', '.join(stage.reads):42} {tuple(value.shape)}")

assert not trace.p[:, :, ~spec.allowed(8, 8)].any(), "masked means exactly zero"
torch.testing.assert_close(trace.ds.sum(dim=-1), torch.zeros(1, 2, 8, dtype=torch.float64), atol=1e-12, rtol=0)
