"""`functional` and compilers; imported at need, because compilers are large.

They understand torch.func, and autograd functions, but not one inside the other.
"""

from __future__ import annotations

import torch

from backlight import functional

# one node of a compiler's graph; what is inside is traced later, below the transforms
attention = torch.compiler.allow_in_graph(functional.attention)
# for transforms around compiled code: a compiler that sees only a frame of it must leave this call alone
attention_outside = torch.compiler.disable(functional.attention)
attention_jvp = torch.compiler.allow_in_graph(functional.attention_jvp)
attention_jvp_outside = torch.compiler.disable(functional.attention_jvp)
