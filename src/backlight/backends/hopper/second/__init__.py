"""Second derivatives without learned terms: dq, dk and dv of a loss on the tangent, in one sweep (kernel)."""
