"""Report files that are none, or were changed by hand: one sentence and exit code 3, never "got worse"."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from report_samples import healthy, window_defect
from typer.testing import CliRunner

from backlight.doctor import command
from backlight.doctor.report import json as report_json
from backlight.doctor.report.model import Report


def doctor(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(command.app, list(arguments), prog_name="backlight doctor")


def flat(output: str) -> str:
    return re.sub(r"[\s│╭╮╰╯─]+", " ", output)


def edited(*path: Any, value: Any) -> str:
    """The report of a window defect with one field replaced."""
    data = window_defect().to_dict()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


REPORTS: dict[str, tuple[str, str]] = {
    "nothing": ("", "is not a report of this version"),
    "half": ('{"schema": 1, ', "is not a report of this version"),
    "a list": ("[]", "is not a report of this version"),
    "a number": ("3", "is not a report of this version"),
    "an empty object": ("{}", "report schema None is not the schema 1"),
    "another schema": (edited("schema", value=99), "report schema 99 is not the schema 1"),
    "too deep": ("[" * 100_000, "is not a report of this version"),
    "no verdict": ('{"schema": 1, "subject": "x", "headline": "y"}', "verdict"),
    "verdict": (
        edited("verdict", value="fine"),
        "verdict of a Report must be one of healthy, defect, precision, could-not-run",
    ),
    "verdict of a number": (edited("verdict", value=3), "verdict of a Report must be one of"),
    "subject": (edited("subject", value=None), "subject of a Report must be text, got None"),
    "stages": (edited("stages", value=5), "stages of a Report must be list[StageRow], got 5"),
    "a stage": (edited("stages", value=["o"]), "a StageRow must be an object, got 'o'"),
    "status": (edited("stages", 0, "status", value="meh"), "status of a StageRow must be one of ok, suspect"),
    "rho": (edited("stages", 0, "rho_a", value="abc"), "rho_a of a StageRow must be a number or null, got 'abc'"),
    "a true rho": (edited("stages", 0, "rho_a", value=True), "rho_a of a StageRow must be a number or null, got True"),
    "count": (edited("stages", 0, "nonfinite", value="3"), "nonfinite of a StageRow must be a whole number, got '3'"),
    "where": (edited("stages", 0, "worst", value={"room": 1}), "a place must be an object with batch, heads, rows"),
    "severity": (edited("findings", 0, "severity", value="bad"), "severity of a Finding must be one of defect"),
    "evidence": (edited("findings", 0, "evidence", value="one"), "evidence of a Finding must be list[str], got 'one'"),
    "finding": (edited("findings", value=[None]), "a Finding must be an object, got None"),
    "spec": (edited("spec", value="causal"), "spec of a Report must be dict[str, Any], got 'causal'"),
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("side", ["old", "new"])
def test_bad_reports_get_a_sentence_and_exit_code_3(tmp_path, name, side):
    """An unknown verdict or a word for a number gave a traceback and exit code 1, "got worse"."""
    content, sentence = REPORTS[name]
    good, bad = report_json.save(healthy(), tmp_path / "good.json"), tmp_path / "bad.json"
    bad.write_text(content)
    result = doctor("compare", str(bad if side == "old" else good), str(good if side == "old" else bad))
    assert result.exit_code == 3, result.output
    assert sentence in flat(result.output)
    assert "bad.json" in re.sub(r"\s+", "", result.output)
    assert "Traceback" not in result.output


def test_two_reports_that_judged_nothing_are_not_equal(tmp_path):
    """It said "no difference" and left with 0."""
    nothing = report_json.save(Report("fn", "could-not-run", "no GPU"), tmp_path / "nothing.json")
    result = doctor("compare", str(nothing), str(nothing))
    assert result.exit_code == 3
    assert "neither examination could run: there is nothing to compare" in flat(result.output)
    good = report_json.save(healthy(), tmp_path / "good.json")
    assert doctor("compare", str(nothing), str(good)).exit_code == 0
    assert doctor("compare", str(good), str(nothing)).exit_code == 1


def test_a_report_survives_the_checks():
    for report in (healthy(), window_defect(), replace(window_defect(), seconds=float("inf"))):
        assert report_json.loads(report_json.dumps(report)).to_dict() == report.to_dict()


def test_there_are_many_of_them():
    assert len(REPORTS) >= 20
