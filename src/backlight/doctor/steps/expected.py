"""Zeros that are right: what a worried reader should not chase."""

from __future__ import annotations

from backlight import intervals
from backlight.call import Call


def expected_zeros(call: Call) -> list[str]:
    """Sentences about values that are zero in a correct kernel, for this geometry."""
    spec, found = call.spec, []
    single: list[str] = []
    empty_rows = unseen = 0
    for index, z in enumerate(call.segments()):
        seen = intervals.visible(call, z, 0)
        counts = seen.sum(dim=-1)
        rows = (counts == 1).nonzero().flatten().tolist()
        if rows and (call.varlen or index == 0):
            place = f"row {z.q0 + rows[0]}" if len(rows) == 1 else f"rows {z.q0 + rows[0]}-{z.q0 + rows[-1]}"
            single.append(place)
        if call.varlen or index == 0:
            empty_rows += int((counts == 0).sum())
            unseen += int((~seen.any(dim=0)).sum()) if z.sq else z.sk
    if single and call.sink is None:
        shown = ", ".join(single[:4]) + (", ..." if len(single) > 4 else "")
        found.append(f"dq of {shown} (nothing but rounding): the row sees one key, so p = 1 and ds = p (dp - delta) = 0")
    if empty_rows:
        lse = "the sink" if call.sink is not None else "-inf"
        found.append(f"{empty_rows} rows see no key: o and dq are exactly 0 there and lse is {lse}")
    if unseen:
        found.append(f"{unseen} keys are seen by no row: dk and dv are exactly 0 there")
    if spec.masked or spec.rows:
        found.append("p and ds are exactly 0 for hidden keys")
    if call.tau is not None and bool((call.tau < 0).any()):
        found.append("weights of pruned keys (p <= -tau/n) are exactly 0; their ds is not")
    return found
