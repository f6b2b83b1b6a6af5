"""PyTorch's cuDNN attention and a gradient that changes its strides: python examples/cudnn_do_strides.py (needs an NVIDIA GPU).

Gradients of one call for one and the same dO, which lies in memory first one way, then another. cuDNN's plan is built for the
strides of the first dO; where it is kept without them, every later layout is read with the first one's strides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def gradients(backend: SDPBackend, tensors: list[Tensor], do: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with sdpa_kernel([backend]):
        y = scaled_dot_product_attention(*leaves)
    return list(torch.autograd.grad(y, leaves, do))


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device, and torch sees none")
        return
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    *qkv, do = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    wanted = gradients(SDPBackend.MATH, [x.double() for x in qkv], do.double())
    layouts = {"contiguous": do, "transposed": do.transpose(1, 2).contiguous().transpose(1, 2), "contiguous again": do.clone()}
    for name, given in layouts.items():
        assert torch.equal(given, do)
        found = gradients(SDPBackend.CUDNN_ATTENTION, qkv, given)
        errors = [float((x.double() - want).norm() / want.norm()) for x, want in zip(found, wanted, strict=True)]
        print(f"{name:17s}" + "".join(f"  {n} off by {error:.1e}" for n, error in zip(("dq", "dk", "dv"), errors, strict=True)))


if __name__ == "__main__":
    main()
