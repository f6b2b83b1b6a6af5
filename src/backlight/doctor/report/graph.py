"""The stage graph as a picture: fill is the local error, the ring the global one, so an inherited error looks inherited.

Edges are read off the signatures in `reference/trace.py`; stages that are not rows of a report (x, capped, m, a, ...) are
passed through, so the drawing stays true when the formulas change. The backward recomputes the weights, so they have a box of
their own, `p (bwd)`, and gradients hang on that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from markupsafe import Markup

from backlight.doctor.report import words
from backlight.doctor.report.model import FORWARD_MODE, STAGE_ORDER, Report, StageRow
from backlight.doctor.report.svg import drawing, join, label, tag
from backlight.reference.tangent import TANGENT_STAGES
from backlight.reference.trace import BACKWARD, STAGES, Stage
from backlight.spec import GRADIENTS, TERM_NAMES

INPUTS = {"q": "q", "k": "k", "v": "v", "dy": "dO"}
TANGENT_INPUTS = {name: name for name in ("tq", "tk", "tv")}
TERMS = {f"d{name}": name for name in TERM_NAMES}
RECOMPUTED = {"p": "p (bwd)"}
FORMULAS = STAGES | TANGENT_STAGES
BOXES = (*STAGE_ORDER[:4], *RECOMPUTED.values(), *STAGE_ORDER[4:])

# the lane of every box, column by column; gradients are stacked in the last column by `_places`
COLUMNS = (
    {"q": 0.0, "k": 1.0, "v": 2.0, "dy": 3.6},
    {"s": 0.5},
    {"lse": 0.0, "dp": 3.4},
    {"p": 0.9, "p (bwd)": 2.0},
    {"o": 0.0, "delta": 2.8},
    {"ds": 1.9},
)
# from top to bottom, so that few edges cross; a gradient that is not named here comes last
LAST_COLUMN = tuple(dict.fromkeys(("dgate", "dq", "dk", "dbias", "dsink", "dtau", "dv", *GRADIENTS)))
# forward mode, in lanes below all that; drawn where the subject has it
TANGENT_PLACES = {"tq": (0.0, 0.0), "tk": (0.0, 0.6), "tv": (0.0, 1.2), "tlse": (4.0, 0.1), "to": (6.0, 0.7)}
LANES, CLOSEST = 3.6, 0.85
WIDE, TALL, STEP_X, STEP_Y = 104.0, 42.0, 148.0, 66.0


def edges(boxes: Iterable[str] = BOXES) -> list[tuple[str, str]]:
    """(from, to) between inputs and reported stages, hidden stages passed through; in stage order."""
    shown = {*STAGE_ORDER, *FORWARD_MODE}

    def sources(name: str) -> Iterator[str]:
        if name in shown or name in INPUTS or name in TANGENT_INPUTS:
            yield name
        elif name in FORMULAS:
            for read in FORMULAS[name].reads:
                yield from sources(read)

    return [
        (RECOMPUTED.get(source, source) if name in BACKWARD else source, name)
        for name in boxes
        for source in dict.fromkeys(source for read in _formula(name).reads for source in sources(read))
    ]


def _formula(name: str) -> Stage:
    """The formula of a box: weights are recomputed by the one that made them."""
    return FORMULAS[next((stage for stage, box in RECOMPUTED.items() if box == name), name)]


def stage_graph(report: Report) -> Markup:
    """The graph of the stages this spec has; stages the examination could not see are hollow."""
    rows = {row.name: row for row in report.stages}
    places = _places([name for name in BOXES if name in rows or name not in TERMS or report.spec.get(TERMS[name])])
    tangents = [name for name in TANGENT_PLACES if name in rows]
    if tangents:
        below = max(lane for _, lane in places.values()) + 1.3
        shown = [*TANGENT_INPUTS, *tangents]
        places |= {name: (TANGENT_PLACES[name][0], below + TANGENT_PLACES[name][1]) for name in shown}
    height = 48 + max(y for _, y in places.values()) * STEP_Y
    wrong = {name for name, row in rows.items() if row.status in ("inherited", "suspect", "culprit")}
    lines = [
        _edge(places, a, b, handed_down=a in wrong and b in wrong)
        for a, b in edges((*BOXES, *tangents))
        if a in places and b in places and _worth_drawing(a, b)
    ]
    boxes = [_box(name, *places[name], rows.get(name)) for name in places]
    return drawing(6 * STEP_X + WIDE + 8, height + 12, join([*lines, *boxes]), "stage graph", class_="picture graph")


def _worth_drawing(source: str, name: str) -> bool:
    # q, k reach their gradients, and tangents of lse and o, by a detour that crosses the whole picture and explains nothing
    return not (source in ("q", "k") and name != "s") and not (source in TANGENT_INPUTS and source != "tv" and name == "to")


def _places(names: list[str]) -> dict[str, tuple[float, float]]:
    last = [name for name in LAST_COLUMN if name in names]
    tallest = max(LANES, CLOSEST * (len(last) - 1))
    places = {
        name: (float(column), lane * tallest / LANES)
        for column, boxes in enumerate(COLUMNS)
        for name, lane in boxes.items()
        if name in names or name in INPUTS
    }
    return places | {name: (6.0, i * tallest / max(len(last) - 1, 1)) for i, name in enumerate(last)}


def _corner(column: float, lane: float) -> tuple[float, float]:
    return 4 + column * STEP_X, 4 + lane * STEP_Y


def _edge(places: dict[str, tuple[float, float]], source: str, name: str, handed_down: bool) -> Markup:
    (x0, y0), (x1, y1) = _corner(*places[source]), _corner(*places[name])
    x0, y0, y1 = x0 + (WIDE if source not in INPUTS and source not in TANGENT_INPUTS else 44), y0 + TALL / 2, y1 + TALL / 2
    bend = max(30.0, (x1 - x0) / 2)
    kind = "edge bad" if handed_down else "edge"
    return tag("path", d=f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}", class_=kind)


def _box(name: str, column: float, lane: float, row: StageRow | None) -> Markup:
    x, y = _corner(column, lane)
    given = INPUTS | TANGENT_INPUTS
    if name in given:
        shape = tag("rect", x=x, y=y + 8, width=44, height=TALL - 16, rx=13, class_="input")
        return join([shape, label(x + 22, y + TALL / 2 + 4, given[name], "input", "middle")])
    kind, below, said = "unseen", "not seen", f"{name}: the kernel does not return it"
    if row is not None:
        kind, inferred = row.status, row.global_error is None
        own = row.status if row.local_error is None else f"local {words.number(row.local_error, 2)}"
        below = "inferred" if inferred else own
        errors = f"local error {words.number(row.local_error)}, global error {words.number(row.global_error)}"
        said = f"{name}: {kind}, {row.note if inferred else errors}"
    shape = tag("rect", tag("title", said), x=x, y=y, width=WIDE, height=TALL, rx=9, class_=f"box {kind}")
    middle = x + WIDE / 2
    lines = [label(middle, y + 18, name, f"name {kind}", "middle"), label(middle, y + 33, below, f"sub {kind}", "middle")]
    return join([shape, *lines])
