"""What a diagnosis found, as plain data: the terminal, the HTML page, the JSON file and the pytest plugin all read this.

A `Report` holds no tensors. `to_dict` / `from_dict` round-trip through JSON; NaN and infinities travel as strings, because JSON
has no words for them and a report about a NaN must not lose it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from backlight.spec import GRADIENTS

SCHEMA = 1

# gradients of terms stand behind those of q, k and v; one that is not named here comes last
TERMS_SHOWN = ("dbias", "dtau", "dsink", "dgate")
STAGE_ORDER = ("s", "p", "lse", "o", "delta", "dp", "ds", *dict.fromkeys(("dq", "dk", "dv", *TERMS_SHOWN, *GRADIENTS)))
# forward mode: its own output where the kernel has a jvp of its own, and the tangents of lse and o
FORWARD_MODE = ("o (jvp)", "tlse", "to")

Status = Literal["ok", "suspect", "culprit", "inherited", "precision", "unseen"]
Severity = Literal["defect", "precision", "note", "test-fault"]
Confidence = Literal["high", "medium", "low"]
Verdict = Literal["healthy", "defect", "precision", "could-not-run"]
PictureKind = Literal["head_tile", "support", "ulp", "repeats"]
ReadingKind = Literal["lost", "leaked", "row factor", "delta", "channels", "keys", "values", "scores"]

EXIT_CODES: dict[str, int] = {"healthy": 0, "defect": 1, "precision": 2, "could-not-run": 3}


@dataclass(frozen=True)
class Where:
    """The smallest description of a wrong set: `text` is what people read ("heads >= 1", "i-j = 96", "b0 h2 rows 96-103").

    rows and keys are half-open ranges (first, end); the other fields list members. None = not restricted.
    """

    batch: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    diagonals: tuple[int, ...] | None = None
    segments: tuple[int, ...] | None = None
    text: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass
class StageRow:
    """One observed quantity: how far it is from the oracle (`global_error`) and from its own formula (`local_error`)."""

    name: str
    status: Status = "ok"
    gain: float | None = None
    gains: list[float] = field(default_factory=list)
    rho_a: float | None = None
    rho_b: float | None = None
    global_error: float | None = None
    local_error: float | None = None
    nonfinite: int = 0
    worst: Where | None = None
    ulp_max: float | None = None
    note: str = ""

    def settle_local_error(self) -> None:
        """Forget the local error of an inherited row unless it is well below the global one: what feeds it was not seen."""
        known = self.local_error is not None and self.global_error is not None
        if self.status == "inherited" and known and not self.local_error < self.global_error / 2:  # type: ignore[operator]
            self.local_error = None


@dataclass
class Finding:
    """One explanation of the data, in plain words, with its evidence and the check that would prove it false."""

    id: str
    title: str
    severity: Severity = "defect"
    stage: str = ""
    where: Where | None = None
    evidence: list[str] = field(default_factory=list)
    mechanism: str = "open"
    confidence: Confidence = "low"
    next_check: str = ""
    explained: float | None = None
    score: float = 0.0


@dataclass
class Probe:
    """One experiment: passed is None when it was not run, and `detail` says why."""

    name: str
    passed: bool | None = None
    detail: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reading:
    """What a matrix that was read off the kernel shows, as a sentence and as numbers.

    stage: "p", "p (bwd)", "ds", "ds (dq)". kind: "lost" or "leaked" cells, "row factor" (lse), "delta", "channels" of dp,
    "keys" or "values" (k or v read elsewhere), "scores" (another function of them). cause: what does such a thing, or "".
    tile: [rows, keys] of one tile, or empty; period: every how many tiles of rows.
    """

    stage: str
    kind: ReadingKind
    text: str
    cause: str = ""
    cells: int = 0
    tile: list[int] = field(default_factory=list)
    period: int | None = None
    where: Where | None = None

    @property
    def sentence(self) -> str:
        return self.text + (f": {self.cause}" if self.cause else "")


@dataclass
class Picture:
    """Numbers to draw; `data` holds plain lists, ints, floats and strings only, by kind:

    head_tile: stage "dk"; unit "rho_A"; limit 2.0 (what passes); tile 16 (rows per column); heads ["b0 h0", ...];
               values [heads][tiles], None where a cell has nothing to compare.
    support:   stage "p (bwd)"; head "b0 h2"; sq, sk; step 2 (rows and keys per picture cell); leaks 192; holes 0;
               cells [rows][keys] of 0 masked and zero, 1 visible and filled, 2 leak (must be zero), 3 hole (must not be).
    ulp:       edges [0, 1, 2, 4, ...] (ULP of the output dtype, the last bin is open); counts {"dq": [...], ...}, one count
               per edge.
    repeats:   runs 10; rows [{"name": "dq", "distinct": 1, "elements": 0, "max_ulp": 0.0}, ...]: distinct results among the
               runs, elements that ever differed, their largest distance.
    """

    kind: PictureKind
    title: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """Everything one examination of one subject produced."""

    subject: str
    verdict: Verdict
    headline: str
    location: str = ""
    stages: list[StageRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    expected_zeros: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    self_check: dict[str, Any] = field(default_factory=dict)
    repro: str | None = None
    seconds: float = 0.0
    schema: int = SCHEMA
    readings: list[Reading] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 defect, 2 precision only, 3 could not run."""
        return EXIT_CODES[self.verdict]

    @property
    def healthy(self) -> bool:
        return self.verdict == "healthy"

    @property
    def ranked(self) -> list[Finding]:
        """Findings, the best explanation first; notes come last whatever their score."""
        return sorted(self.findings, key=lambda finding: (finding.severity == "note", -finding.score))

    @property
    def finding_ids(self) -> tuple[str, ...]:
        return tuple(finding.id for finding in self.ranked)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and finite numbers: ready for `json.dumps(..., allow_nan=False)`."""
        return {"schema": self.schema} | {k: v for k, v in encode(self).items() if k != "schema"}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """Inverse of `to_dict`; refuses schemas it does not know."""
        schema = data.get("schema")
        if schema != SCHEMA:
            raise ValueError(f"report schema {schema!r} is not the schema {SCHEMA} this version reads")
        plain = _build(Report, data)
        nested: dict[str, Any] = {
            "stages": [StageRow(**_build(StageRow, row)) for row in plain.get("stages", ())],
            "findings": [Finding(**_build(Finding, row)) for row in plain.get("findings", ())],
            "probes": [Probe(**_build(Probe, row)) for row in plain.get("probes", ())],
            "readings": [Reading(**_build(Reading, row)) for row in plain.get("readings", ())],
            "pictures": [Picture(**_build(Picture, row)) for row in plain.get("pictures", ())],
        }
        return Report(**plain | nested)


# --- plain data ------------------------------------------------------------------------------------------------------------

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any) -> Any:
    """Dataclasses to dicts, tuples to lists, non-finite floats to their names; anything JSON cannot hold becomes its str."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def decode(value: Any) -> Any:
    """Names of non-finite floats back to floats."""
    if isinstance(value, Mapping):
        return {name: decode(item) for name, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _where(data: Any) -> Where:
    if not isinstance(data, Mapping) or not data.keys() <= {f.name for f in fields(Where)}:
        raise ValueError(f"a place must be an object with batch, heads, rows and the like, got {data!r:.60}")
    known: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in data.items()}
    return Where(**known)


def _build(cls: type, data: Any) -> dict[str, Any]:
    """Constructor arguments of `cls` in `data`; only fields that may hold numbers are decoded, so a note may say "NaN"."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a {cls.__name__} must be an object, got {data!r:.60}")
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name not in data:
            continue
        value, kind = data[f.name], str(f.type)
        if "Where" in kind:
            value = None if value is None else _where(value)
        elif "float" in kind or "Any" in kind:
            value = decode(value)
        if not _is(kind, value):
            raise ValueError(f"{f.name} of a {cls.__name__} must be {WORDS.get(kind, kind)}, got {value!r:.60}")
        values[f.name] = value
    return values


def _is(kind: str, value: Any) -> bool:
    """Whether a value read from a file is what a field's annotation says."""
    if kind in CHOICES:
        return isinstance(value, str) and value in CHOICES[kind]
    if kind.endswith(" | None"):
        return value is None or _is(kind.removesuffix(" | None"), value)
    if kind.startswith("list["):
        inner = kind[5:-1]
        return isinstance(value, list) and (inner not in ("str", "float", "int") or all(_is(inner, item) for item in value))
    if kind.startswith("dict["):
        return isinstance(value, Mapping)
    if kind in ("float", "int"):
        return isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
    plain: dict[str, type] = {"str": str, "bool": bool, "Where": Where}
    return isinstance(value, plain[kind])


CHOICES = {
    name: get_args(kind)
    for name, kind in (
        ("Status", Status),
        ("Severity", Severity),
        ("Confidence", Confidence),
        ("Verdict", Verdict),
        ("PictureKind", PictureKind),
        ("ReadingKind", ReadingKind),
    )
}
WORDS = {name: f"one of {', '.join(known)}" for name, known in CHOICES.items()} | {
    "float | None": "a number or null",
    "str": "text",
    "int": "a whole number",
}
