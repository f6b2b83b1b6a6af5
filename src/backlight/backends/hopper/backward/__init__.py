"""The backward: a pre-pass over rows, the main kernel over keys, dq by rows or converted, dbias."""
