"""What `backlight doctor serve` offers: examine, list_defects, explain_finding, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_type_hints

from backlight.command_line import option
from backlight.doctor.command.options import Asked

STRINGS = {"type": "array", "items": {"type": "string"}}
# options that are for people, for files, or said in another way
NOT_OFFERED = ("subject", "report", "json", "format", "demo", "list_", "in_process", "typed")
WIDTH_OF_ERRORS = 2000

Found = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Tool:
    """`run` takes the arguments and returns what was found, by the schema `outputs`, and the same as text."""

    name: str
    title: str
    description: str
    inputs: dict[str, Any]
    outputs: Callable[[], dict[str, Any]]
    run: Callable[[Mapping[str, Any]], Found]

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "inputSchema": self.inputs,
            "outputSchema": self.outputs(),
            # an examination runs the caller's code, which may do anything
            "annotations": {"readOnlyHint": self.run is not examine, "openWorldHint": False},
        }


def _object(properties: Mapping[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


# --- examine ----------------------------------------------------------------------------------------------------------------


def options_schema() -> dict[str, Any]:
    """The options of `backlight doctor` as properties, from the one list of them."""
    hints = get_type_hints(Asked, include_extras=True)
    properties: dict[str, Any] = {
        "subject": {
            "type": "string",
            "description": "path.py:function, module:function, or a name of `backlight doctor --list`.",
        },
        "pictures": {"type": "boolean", "description": "Also the numbers that the HTML page draws; long."},
    }
    for each in fields(Asked):
        if each.name in NOT_OFFERED:
            continue
        kind, about = get_args(hints[each.name])[:2]
        flag = kind is bool
        words = {"type": "boolean"} if flag else {"type": ["string", "number"]}
        preset = {} if flag or each.default is None else {"default": each.default}
        properties[_spelled(each.name, about)] = words | {"description": f"{about.help or ''}"} | preset
    return _object(properties, ("subject",))


def _spelled(name: str, about: Any) -> str:
    """The name that stands on the command line, without its dashes."""
    # in an annotation typer keeps the first of them where a default would stand
    declared = about.default if isinstance(about.default, str) else ""
    return declared.removeprefix("--").replace("-", "_") or name


def examine(arguments: Mapping[str, Any]) -> Found:
    """The report of a fresh process: a kernel that was changed is read again, and its end is not ours."""
    from backlight.doctor.report import terminal
    from backlight.doctor.report.model import Report

    chosen = {name: value for name, value in arguments.items() if name not in ("subject", "pictures")}
    words = [str(arguments["subject"])]
    if words[0].startswith("-"):
        raise ValueError(f"subject must name a kernel, got {words[0]!r}")
    for name, value in chosen.items():
        words += [] if value is False or value is None else [option(name)] if value is True else [f"{option(name)}={value}"]
    done = subprocess.run(
        [sys.executable, "-m", "backlight", "doctor", *words, "--format=json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = " ".join(done.stderr.split())[-WIDTH_OF_ERRORS:]
        raise ValueError(f"the examination gave no report (exit code {done.returncode}): {said}") from None
    if not arguments.get("pictures"):
        found["pictures"] = []
    return found, terminal.text(Report.from_dict(found))


def report_schema() -> dict[str, Any]:
    from backlight.doctor.report.schema import schema

    return schema()


# --- the catalogue ----------------------------------------------------------------------------------------------------------

KNOWN_OF_A_DEFECT = ("id", "family", "stage", "title", "does", "signal", "confirm", "next_check", "severity")


def list_defects(arguments: Mapping[str, Any]) -> Found:
    from backlight.doctor.defects.catalogue import families
    from backlight.doctor.defects.games import GAMES
    from backlight.doctor.defects.probed import PROBED
    from backlight.doctor.defects.read import READ

    wanted, known = arguments.get("family"), families() | {"gaming": list(GAMES.values())}
    for defect in (*PROBED.values(), *READ.values()):
        known.setdefault(defect.family, []).append(defect)
    if wanted is not None and wanted not in known:
        raise ValueError(f"no family is called {wanted!r}; there are {', '.join(known)}")
    chosen = [defect for family, defects in known.items() if wanted in (None, family) for defect in defects]
    found = [{name: getattr(defect, name) for name in ("id", "family", "stage", "does")} for defect in chosen]
    return {"defects": found}, "\n".join(f"{defect.id}: {defect.does}" for defect in chosen)


def explain_finding(arguments: Mapping[str, Any]) -> Found:
    from backlight.doctor.defects.catalogue import about

    entry = about(str(arguments["id"]))
    found = {key: str(getattr(entry, key)) for key in KNOWN_OF_A_DEFECT}
    return found, "\n".join(f"{key}: {value}" for key, value in found.items())


# --- two reports ------------------------------------------------------------------------------------------------------------


def compare(arguments: Mapping[str, Any]) -> Found:
    from backlight.doctor.report import json as reports
    from backlight.doctor.report.model import Report

    def read(given: Any) -> Report:
        return Report.from_dict(given) if isinstance(given, Mapping) else reports.load(str(given))

    result = reports.compare(read(arguments["old"]), read(arguments["new"]))
    found = asdict(result) | {"got_worse": bool(result.exit_code)}
    lines = [f"{label}: {line}" for label in ("new", "worse", "gone", "better", "notes") for line in getattr(result, label)]
    return found, "\n".join(lines) or "no difference"


A_REPORT = {"type": ["string", "object"], "description": "A report: the path of its JSON file, or the report itself."}
TOOLS = (
    Tool(
        "examine",
        "Examine an attention kernel",
        "Runs a kernel against a float64 oracle and reports which quantity goes wrong first, where, the name of the defect, "
        "and one check that would prove it wrong. The kernel runs in a process of its own with limits of time and memory.",
        options_schema(),
        report_schema,
        examine,
    ),
    Tool(
        "list_defects",
        "List known defects",
        "Every defect that a report may name: its id, the first quantity that is wrong, and what the code does.",
        _object({"family": {"type": "string", "description": "Only this family: scale, masks, windows, delta and others."}}),
        lambda: _object({"defects": {"type": "array", "items": {"type": "object"}}}, ("defects",)),
        list_defects,
    ),
    Tool(
        "explain_finding",
        "Explain the id of a finding",
        "What a finding means, what shows it first, what confirms it, and the check that would prove it wrong.",
        _object({"id": {"type": "string", "description": "The id of a finding, as window+1."}}, ("id",)),
        lambda: _object({name: {"type": "string"} for name in KNOWN_OF_A_DEFECT}, KNOWN_OF_A_DEFECT),
        explain_finding,
    ),
    Tool(
        "compare",
        "Compare two reports",
        "What got better or worse from one report to a later one; findings are matched by id, stages by name.",
        _object({"old": A_REPORT, "new": A_REPORT}, ("old", "new")),
        lambda: _object(
            dict.fromkeys(("better", "worse", "gone", "new", "notes"), STRINGS) | {"got_worse": {"type": "boolean"}},
            ("better", "worse", "gone", "new", "notes", "got_worse"),
        ),
        compare,
    ),
)
