"""Forward mode without learned terms: y, lse and their tangents in one sweep (kernel), with the forward's tiles and rings."""
