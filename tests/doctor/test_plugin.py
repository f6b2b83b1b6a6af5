"""The pytest plugin: what a failing examination leaves behind. The engine is replaced where only the plugin is under test."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from importlib.metadata import entry_points

import pytest

# pytester forgets modules that its runs import, and an operator library cannot be registered twice
import backlight.doctor.command.keep
import backlight.doctor.pytest_plugin
from backlight.doctor.command.repro import try_script

pytest_plugins = ["pytester"]

MODULE = "backlight.doctor.pytest_plugin"
LOADED = [] if any(point.value == MODULE for point in entry_points(group="pytest11")) else ["-p", MODULE]

FAKE_ENGINE = """
    import backlight.doctor
    from backlight.doctor.report import Finding, Report

    def fake(fn, spec, **settings):
        verdict = fn.__name__
        findings = [] if verdict == "healthy" else [Finding("scale-dk", "dk is too large by a constant.", score=1.0)]
        return Report(fn.__name__, verdict, "dk is wrong", findings=findings, recipe={k: v for k, v in settings.items()})

    import pytest

    @pytest.fixture(autouse=True)
    def engine(monkeypatch):
        monkeypatch.setattr(backlight.doctor, "diagnose", fake, raising=False)

    def kernel(name):
        def fn(q, k, v): ...
        fn.__name__ = name
        return fn

    # closures, which no script could call from outside: these tests are about the plugin alone
    healthy, defect, precision = map(kernel, ("healthy", "defect", "precision"))
"""


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(FAKE_ENGINE + source)
    return pytester.runpytest_inprocess(*LOADED, *arguments)


def test_a_healthy_kernel_passes_and_leaves_nothing(pytester):
    result = run(pytester, "\n    def test_it(doctor): assert doctor(healthy).verdict == 'healthy'\n", "--doctor-report=out")
    result.assert_outcomes(passed=1)
    assert not (pytester.path / "out").exists()


@pytest.mark.parametrize("verdict", ["defect", "precision"])
def test_a_sick_kernel_fails_and_leaves_its_report(pytester, verdict):
    result = run(pytester, f"\n    def test_it(doctor): doctor({verdict})\n", "--doctor-report=out")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*dk is wrong*", "*1. dk is too large by a constant.*scale-dk*", "*report kept in out*"])
    (folder,) = (pytester.path / "out").iterdir()
    assert "test_it" in folder.name
    assert json.loads((folder / "report.json").read_text())["findings"][0]["id"] == "scale-dk"
    assert "dk is too large by a constant." in (folder / "report.html").read_text()


def test_reports_go_to_the_cache_by_default(pytester):
    result = run(pytester, "\n    def test_it(doctor): doctor(defect)\n")
    result.stdout.fnmatch_lines(["*report kept in *.pytest_cache*"])
    assert list((pytester.path / ".pytest_cache").rglob("report.html"))


def test_two_examinations_in_one_test_leave_two_reports(pytester):
    source = """
    def test_it(doctor):
        for kernel in (defect, healthy, precision):
            try:
                doctor(kernel)
            except pytest.fail.Exception as error:
                last = error
        raise last
    """
    run(pytester, source, "--doctor-report=out").assert_outcomes(failed=1)
    assert len(list((pytester.path / "out").iterdir())) == 2


def test_marker_gives_settings_and_the_call_overrides_them(pytester):
    source = """
    @pytest.mark.doctor(level="full", seed=3)
    def test_it(doctor):
        assert doctor(healthy, seed=4).recipe == {"level": "full", "seed": 4}
    """
    run(pytester, source, "--strict-markers").assert_outcomes(passed=1)


def test_known_findings_can_be_allowed(pytester):
    source = """
    def test_known(doctor): doctor(defect, allow=("scale-dk",))
    def test_other(doctor): doctor(defect, allow=("scale-dq",))
    """
    run(pytester, source).assert_outcomes(passed=1, failed=1)


def test_finding_ids_reach_junit(pytester):
    run(pytester, "\n    def test_it(doctor): doctor(defect)\n", "--junit-xml=out.xml")
    found = ElementTree.parse(pytester.path / "out.xml").iter("property")
    assert {(p.get("name"), p.get("value")) for p in found} == {("doctor_verdict", "defect"), ("doctor_finding", "scale-dk")}


def test_a_report_carried_by_an_exception_is_kept(pytester):
    source = """
    def test_it():
        error = AssertionError("not healthy")
        error.report = fake(defect, None)
        raise error
    """
    run(pytester, source, "--doctor-report=out", "--junit-xml=out.xml").assert_outcomes(failed=1)
    assert list((pytester.path / "out").rglob("report.json"))
    assert "scale-dk" in (pytester.path / "out.xml").read_text()


def test_tensors_handed_in_are_kept(pytester):
    source = """
    import torch
    def test_it(doctor):
        q = torch.ones(1, 1, 8, 8)
        doctor(defect, None, q, q, q)
    """
    run(pytester, source, "--doctor-report=out").assert_outcomes(failed=1)
    assert list((pytester.path / "out").rglob("inputs.pt"))


REAL_KERNELS = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def good(q, k, v):
        return scaled_dot_product_attention(q, k, v)

    def dk_doubled(q, k, v):
        k = k.clone()
        if k.requires_grad:
            k.register_hook(lambda dk: 3.5 * dk)
        return scaled_dot_product_attention(q, k, v)

    def test_good(doctor): doctor(good, shape=(1, 2, 24, 16))
    def test_bad(doctor): doctor(dk_doubled, shape=(1, 2, 24, 16))
    def test_given(doctor):
        q, k, v = torch.randn(3, 1, 2, 24, 16).bfloat16()
        doctor(dk_doubled, None, q, k, v)
"""


def test_with_the_real_engine_a_failing_test_leaves_a_script_that_works(pytester):
    pytester.makepyfile(test_kernels=REAL_KERNELS)
    result = pytester.runpytest_inprocess(*LOADED, "--doctor-report=out")
    result.assert_outcomes(passed=1, failed=2)
    for folder in (pytester.path / "out").iterdir():
        kept = {path.name for path in folder.iterdir()}
        assert {"report.html", "report.json", "repro.py"} <= kept
        assert ("inputs.pt" in kept) == ("given" in folder.name)
        # a script is kept only after it was run once; the one with tensors beside it is the one that could break when moved
        if "given" in folder.name:
            trial = try_script((folder / "repro.py").read_text(), folder)
            assert trial.reproduced, trial.output
            assert "expected: scale-dk" in trial.output


def test_a_report_that_cannot_be_written_leaves_the_run_alone(pytester):
    """An unwritable folder ended the whole run with an internal error: no result of any test, the passing ones included."""
    pytester.makefile("", occupied="a file where the reports would go")
    source = """
    def test_before(): pass
    def test_it(doctor): doctor(defect)
    def test_after(doctor): doctor(healthy)
    """
    result = run(pytester, source, "--doctor-report=occupied/reports")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["doctor: *::test_it: report not kept: *occupied*"])
    assert "INTERNALERROR" not in result.stdout.str()


def test_a_script_that_cannot_be_written_does_not_take_the_report_with_it(pytester, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backlight.doctor.subject.capture, "save_capture", full)
    source = """
    import torch
    def test_it(doctor):
        q = torch.ones(1, 1, 8, 8)
        doctor(defect, None, q, q, q)
    """
    result = run(pytester, source, "--doctor-report=out")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*report kept in *, without a script: *No space left on device*"])
    assert list((pytester.path / "out").rglob("report.html"))


def test_the_plugin_does_not_import_torch(pytester):
    """Every run of the environment paid 5 s and 210 MB for a fixture that few tests ask for."""
    pytester.makeconftest("""
        import sys
        def pytest_unconfigure():
            assert sys.modules["backlight.doctor.pytest_plugin"]
            print("heavy:", sorted({"torch", "numpy", "backlight.api", "typer"} & set(sys.modules)))
    """)
    pytester.makepyfile("")
    result = pytester.runpytest_subprocess(*LOADED, "--co", "-s")
    result.stdout.fnmatch_lines(["heavy: []"])


def test_tests_that_use_torch_find_the_operators_registered(pytester):
    """The package is loaded early and light; a test that only imports it must still find what an import promises."""
    pytester.makepyfile("""
        import backlight
        import torch

        def test_it():
            assert torch.ops.backlight.attention
            assert backlight.attention(*torch.zeros(3, 1, 1, 4, 8)).shape == (1, 1, 4, 8)
    """)
    pytester.runpytest_subprocess(*LOADED).assert_outcomes(passed=1)
