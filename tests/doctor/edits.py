"""How to break the tiled backend: for each defect, the lines of its source that change.

The edits know nothing of the mutants: they use the backend's own names and undo one thing that its authors got right. An edit
names the text it replaces and fails loudly when that text is gone, so a refactoring of the backend cannot silently turn a
mutation test into a test of nothing. Those of kernels of 8 bits break their emulation in the same way.
"""

from __future__ import annotations

from edit import BOTH, Edit
from edits_e4m3 import E4M3_EDITS
from edits_masks import INTERVALS, MASKS
from edits_read import READ
from edits_rows import HEADS, ROWS, SCALE
from edits_sums import SUMS
from edits_terms import ENTMAX, PAIRS, TANGENTS, TERMS

__all__ = ["BOTH", "EDITS", "Edit"]

EDITS = SCALE | MASKS | INTERVALS | HEADS | ROWS | TERMS | PAIRS | ENTMAX | TANGENTS | READ | SUMS | E4M3_EDITS
