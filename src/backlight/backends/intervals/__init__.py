"""Masks by row intervals on a GPU: intervals as kernels read them, and which tiles they leave to be visited."""
