"""Matrices that were read off a kernel, read as structure: which cells, rows, keys and channels are wrong, and by what."""
