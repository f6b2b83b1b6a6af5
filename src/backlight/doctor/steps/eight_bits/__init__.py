"""Kernels of 8 bits: recognised by what they do to v, judged by yardsticks of their own, probed for what scales do."""
