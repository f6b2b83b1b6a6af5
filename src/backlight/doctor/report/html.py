"""The report as one self-contained HTML file: inline SVG and CSS, no script, nothing fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from backlight.doctor.report import svg, words
from backlight.doctor.report.graph import stage_graph
from backlight.doctor.report.model import Picture, Probe, Report, StageRow

STATUSES = {
    "ok": "right",
    "culprit": "wrong here first",
    "inherited": "wrong, but handed down",
    "suspect": "wrong, origin not settled",
    "precision": "right, with less precision than the algorithm allows",
    "unseen": "not observable",
}


def html(report: Report) -> str:
    """The page as text."""
    page = _environment().get_template("page.html")
    settings = words.settings(report.recipe)
    nested = [name for name in settings if isinstance(report.recipe[name], dict | list)]
    return page.render(
        report=report,
        verdict=words.verdict(report),
        facts=words.top_facts(report).replace("   ", ", "),
        words=words,
        plain_settings={name: value for name, value in settings.items() if name not in nested},
        nested_settings={name: settings[name] for name in nested},
        notes=words.notes(report.recipe),
        graph=stage_graph(report) if report.stages else "",
        statuses=STATUSES,
        stages_title="Where it goes wrong first" if report.verdict == "defect" else "Every quantity, in order",
        pictures=[_picture(picture) for picture in sorted(report.pictures, key=_calm)],
        probes=sorted(report.probes, key=lambda probe: {False: 0, True: 1, None: 2}[probe.passed]),
        outcome=_outcome,
        spark=_spark,
        share=lambda explained: round(100 * max(0.0, min(1.0, explained)), 2),
    )


def write_html(report: Report, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(report), encoding="utf-8")
    return path


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("backlight.doctor.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _outcome(probe: Probe) -> str:
    return {True: "passed", False: "failed", None: "not run"}[probe.passed]


def _spark(row: StageRow) -> Markup | str:
    return svg.gains(row.gains) if len(row.gains) > 1 else ""


def _calm(picture: Picture) -> bool:
    """False for a picture that shows something wrong: those come first."""
    if picture.kind == "head_tile":
        cells = [value for row in picture.data["values"] for value in row if value is not None]
        return all(value <= picture.data["limit"] for value in cells)
    return picture.kind != "support" or not (picture.data["leaks"] or picture.data["holes"])


def _picture(picture: Picture) -> dict[str, Any]:
    caption, body = {"head_tile": _head_tile, "support": _support, "ulp": _ulp, "repeats": _repeats}[picture.kind](picture.data)
    return {"kind": picture.kind, "title": picture.title, "caption": caption, "body": body}


def _head_tile(data: dict[str, Any]) -> tuple[str, Markup]:
    tile, limit, unit = data["tile"], float(data["limit"]), data["unit"]
    caption = f"{unit} of {data['stage']} by head (down) and tile of {tile} rows (across); {words.ratio(limit)} is what passes."
    return caption, svg.join([svg.head_tile(data), svg.heat_key(limit, unit)])


def _support(data: dict[str, Any]) -> tuple[str, Markup]:
    leaks, holes, step = data["leaks"], data["holes"], data["step"]
    each = f" One square stands for {step} rows and {step} keys." if step > 1 else ""
    counted = f"{leaks} leaks (must be zero and are not), {holes} holes (must not be zero and are)."
    caption = f"{data['stage']} of {data['head']}: {counted}{each}"
    kinds = {"visible": "visible", "masked": "masked", "leak": "leak", "hole": "hole"}
    key = svg.join(
        svg.tag("span", svg.join([svg.tag("i", class_=f"swatch {kind}"), Markup(name)])) for kind, name in kinds.items()
    )
    return caption, svg.join([svg.support(data), svg.tag("div", key, class_="swatches")])


def _ulp(data: dict[str, Any]) -> tuple[str, Markup]:
    figures = [
        svg.tag("figure", svg.join([svg.tag("figcaption", name), svg.ulp(data["edges"], counts)]))
        for name, counts in data["counts"].items()
    ]
    caption = "Elements by distance from the oracle in units of the last place of the output dtype; heights are logarithmic."
    return caption, svg.tag("div", svg.join(figures), class_="histograms")


def _repeats(data: dict[str, Any]) -> tuple[str, Markup]:
    columns = ("tensor", "distinct results", "elements that moved", "most ULP")
    head = svg.tag("tr", svg.join(svg.tag("th", name) for name in columns))
    rows = [
        svg.tag(
            "tr",
            svg.join(
                [
                    svg.tag("td", row["name"], class_="name"),
                    svg.tag("td", f"{row['distinct']} of {data['runs']}"),
                    svg.tag("td", str(row["elements"])),
                    svg.tag("td", words.ratio(row["max_ulp"])),
                ]
            ),
        )
        for row in data["rows"]
    ]
    caption = f"{data['runs']} runs on the same inputs: 1 distinct result means bitwise equal."
    return caption, svg.tag("table", svg.join([head, *rows]))
