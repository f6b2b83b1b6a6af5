"""The forward: a producer warp and consumer warpgroups (kernel), with and without tau, and tiles that are done again."""
