"""`functional.attention` and compilers; imported at need, because compilers are large.

They understand torch.func, and autograd functions, but not one inside the other.
"""

from __future__ import annotations

import torch

from backlight import functional

# one node of a compiler's graph, which is followed below it
attention = torch.compiler.allow_in_graph(functional.attention)
# for transforms around a compiled function, of which compilers see single frames
attention_outside = torch.compiler.disable(functional.attention)
