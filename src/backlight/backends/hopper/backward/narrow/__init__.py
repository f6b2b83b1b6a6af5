"""The main kernel of the backward for narrow heads without learned terms."""
