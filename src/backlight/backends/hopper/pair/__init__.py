"""dq and dpair_bias of narrow heads that share a pair bias: a kernel that keeps it in shared memory and walks over them."""
