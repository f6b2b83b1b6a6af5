"""The drawer of problems: one call with its incoming gradients, drawn from a seed, and what is known about it."""
