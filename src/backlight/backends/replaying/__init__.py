"""What backends that start Triton kernels share: launches and whole directions again, without what led to them."""
