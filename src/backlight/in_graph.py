"""`functional.attention` as one node of a compiler's graph, which is followed below it; imported when a compiler asks for it.

The compiler understands torch.func, and autograd functions, but not one inside the other.
"""

from __future__ import annotations

import torch

from backlight import functional

attention = torch.compiler.allow_in_graph(functional.attention)
