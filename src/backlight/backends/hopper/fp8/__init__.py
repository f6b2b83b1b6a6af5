"""The forward of e4m3 tensors (eq. 96-99): one sweep, the forward's tiles and rings, a second accumulator in fp32."""
