"""The report model, its JSON form and comparison, and the terminal face."""

from __future__ import annotations

import json as stdlib_json
import math
import re

import pytest
from report_samples import could_not_run, healthy, one_head_only, window_defect

from backlight.doctor.report import SCHEMA, Finding, Report, StageRow, json, terminal, words

SAMPLES = {"window": window_defect, "one-head": one_head_only, "healthy": healthy, "could-not-run": could_not_run}


@pytest.fixture(params=SAMPLES)
def report(request) -> Report:
    return SAMPLES[request.param]()


# --- model and JSON ----------------------------------------------------------------------------------------------------------


def test_json_round_trip(report):
    assert json.loads(json.dumps(report)) == report


def test_json_is_strict_and_carries_its_schema(report):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = stdlib_json.loads(json.dumps(report), parse_constant=refuse)
    assert data["schema"] == SCHEMA
    assert next(iter(data)) == "schema"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_survive(value):
    before = Report("fn", "defect", "x", stages=[StageRow("dq", gain=value, gains=[1.0, value], note="NaN")])
    row = json.loads(json.dumps(before)).stages[0]
    for after in (row.gain, row.gains[1]):
        assert after == value or (math.isnan(after) and math.isnan(value))
    assert row.note == "NaN"


def test_an_unknown_schema_is_refused(tmp_path):
    data = healthy().to_dict() | {"schema": SCHEMA + 1}
    path = tmp_path / "later.json"
    path.write_text(stdlib_json.dumps(data))
    with pytest.raises(ValueError, match=f"schema {SCHEMA + 1}"):
        json.load(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"schema": 1}', "not json"])
def test_a_file_that_is_no_report_gets_a_sentence(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is not a report"):
        json.load(path)


@pytest.mark.parametrize(("verdict", "code"), [("healthy", 0), ("defect", 1), ("precision", 2), ("could-not-run", 3)])
def test_exit_codes(verdict, code):
    assert Report("fn", verdict, "").exit_code == code


def test_findings_are_ranked_by_score_and_notes_come_last():
    report = healthy()
    report.findings += [Finding("b", "", score=1.0), Finding("a", "", score=2.0)]
    assert report.finding_ids == ("a", "b", "atomics")


# --- comparison --------------------------------------------------------------------------------------------------------------


def test_a_report_compared_with_itself_shows_nothing(report):
    result = json.compare(report, report)
    assert result == json.Comparison()
    assert result.exit_code == 0


def test_a_repaired_kernel_is_better():
    repaired = window_defect()
    repaired.verdict, repaired.findings = "healthy", []
    for row in repaired.stages:
        row.status, row.rho_a, row.rho_b = "ok", 0.6, 1.0
    result = json.compare(window_defect(), repaired)
    assert result.exit_code == 0
    assert "verdict: defect -> healthy" in result.better
    assert any("window+1" in line for line in result.gone)
    assert "p (bwd): culprit -> ok" in result.better
    assert not result.worse
    back = json.compare(repaired, window_defect())
    assert back.exit_code == 1
    assert any("window+1" in line for line in back.new)
    assert "p (bwd): ok -> culprit" in back.worse


def test_a_ratio_that_became_nan_is_worse():
    old, new = healthy(), healthy()
    new.stages[1].rho_a = math.nan
    assert json.compare(old, new).worse == ["dq: rho_A 0.6 -> nan"]


def test_small_ratios_may_move_freely():
    old, new = healthy(), healthy()
    old.stages[1].rho_a, new.stages[1].rho_a = 0.2, 1.1
    assert json.compare(old, new) == json.Comparison()


def test_more_non_finite_values_are_worse():
    old, new = one_head_only(), one_head_only()
    new.stages[0].nonfinite = 4
    assert json.compare(old, new).worse == ["dq: 3 -> 4 non-finite values"]


def test_changed_settings_are_noted_not_judged():
    old, new = healthy(), healthy()
    new.recipe = new.recipe | {"seed": 7}
    result = json.compare(old, new)
    assert result.notes == ["recipe seed: 0 -> 7"]
    assert result.exit_code == 0


# --- terminal ----------------------------------------------------------------------------------------------------------------


def test_the_terminal_stays_within_100_columns(report):
    report.headline = "a very long headline " * 12
    assert all(len(line) <= terminal.WIDTH for line in terminal.text(report).splitlines())


def test_the_terminal_says_what_matters_in_order():
    lines = terminal.text(window_defect())
    wanted = [
        "DEFECT   backward window is one too wide",
        "confidence high   mechanism established",
        "my_kernel.py:12",
        "causal, window 95,0",
        "p (bwd)  CULPRIT    1.000    9.2     14  b0 h2 rows 96-103  192 leaked cells, all at i-j = 96",
        "1. The backward pass sees one key more than the window allows.  [window+1]",
        "explains 99.99 % of the error",
        "Next check: Run again with --window 96,0",
        "2. Something before dv is wrong.  [open]",
        "exact support: 192 cells outside the window are not zero",
        "tile sweep (the kernel has no tile config)",
        "Zeros that are right",
        "seed 0; dtype bfloat16",
        "tf32 off; deterministic off",
        "gradcheck passed",
    ]
    places = [lines.find(line) for line in wanted]
    assert -1 not in places, wanted[places.index(-1)]
    assert places == sorted(places)


def test_gains_by_head_and_non_finite_values_are_shown():
    text = re.sub(r"\s+", " ", terminal.text(one_head_only()))
    assert "gain by head 1.000 0.000 0.000 0.000" in text
    assert "3 non-finite values" in text


def test_a_fault_of_the_test_is_not_called_a_defect():
    report = window_defect()
    report.findings[1].severity = "test-fault"
    assert terminal.text(report).startswith(" TEST FAULT   backward window")
    assert report.exit_code == 1


def test_colour_is_optional():
    assert "\x1b[" not in terminal.text(window_defect())
    assert "\x1b[" in terminal.text(window_defect(), colour=True)


def test_markup_in_user_text_is_not_interpreted():
    report = window_defect()
    report.subject, report.findings[0].title = "fn[bold]", "shape [2, 4] [red]broken"
    text = terminal.text(report)
    assert "fn[bold]" in text
    assert "shape [2, 4] [red]broken" in text


# --- words -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1.00"),
        (0.02, "0.0200"),
        (1234.6, "1235"),
        (2e-7, "2.00e-07"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(("share", "text"), [(0.5, "50.00 %"), (0.999999, "99.99 %"), (1.0, "99.99 %"), (None, "-")])
def test_an_explained_share_is_never_rounded_up(share, text):
    assert words.percent(share) == text


@pytest.mark.parametrize("gains", [[1.0, math.nan], [math.nan, 1.0], [1.0, 0.9]])
def test_a_nan_gain_makes_heads_differ(gains):
    assert words.gains_differ(StageRow("dq", gains=gains))


def test_spec_words():
    assert words.spec_words({}) == "plain softmax attention"
    assert words.spec_words({"causal": True, "window": (None, 3), "softcap": 30.0, "bias": True, "bias_origin": 2}) == (
        "causal, window *,3, softcap 30.0, bias, bias origin 2"
    )
