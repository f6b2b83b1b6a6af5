"""The backward of short heads that share a pair bias: kernels that keep the bias in shared memory and walk over its members."""
