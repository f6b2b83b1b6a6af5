"""The first room: what is examined, what it is told, and how it is called."""
