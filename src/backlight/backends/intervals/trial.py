"""Variants under trial, by name; measured against each other in one process."""

import os

ON: set[str] = {name for name in os.environ.get("BACKLIGHT_MASKS", "").split(",") if name}
