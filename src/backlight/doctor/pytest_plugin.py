"""pytest plugin: examine kernels inside tests and keep the report of a failing one.

    def test_my_kernel(doctor):
        doctor(my_kernel, AttentionSpec(causal=True), level="full")

    @pytest.mark.doctor(level="full", seed=3)          # settings for every call of the fixture in this test
    def test_other(doctor): ...

`--doctor-report=DIR` says where reports of failing tests go (default: pytest's cache folder). Finding ids become
JUnit properties.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from backlight.doctor.report.model import Report
    from backlight.spec import AttentionSpec


@dataclass(frozen=True)
class Examination:
    """One call of the fixture: what was examined, with what, and what came out."""

    subject: Any
    spec: AttentionSpec
    settings: dict[str, Any]
    report: Report
    failed: bool


EXAMINATIONS: pytest.StashKey[list[Examination]] = pytest.StashKey()
SECTION, NOT_KEPT = "doctor", "report not kept"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("doctor", "attention kernels under examination")
    group.addoption(
        "--doctor-report",
        metavar="DIR",
        default=None,
        help="keep reports of failing tests in DIR (default: pytest's cache folder)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "doctor(**settings): examines a kernel; keywords are settings of `diagnose` for the `doctor` fixture"
    )


def pytest_collection_finish() -> None:
    """Tests that use torch find the package's operators registered, as a program that imports it would."""
    if "torch" in sys.modules:
        import backlight

        backlight.attention  # noqa: B018 - asking for it loads it


@pytest.fixture
def doctor(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """doctor(fn, spec=None, q=None, k=None, v=None, allow=(), **settings) -> Report; fails the test unless fn is healthy.

    settings are keyword arguments of `backlight.doctor.diagnose`; a `doctor` marker gives defaults. `allow` lists finding ids
    that are known and accepted: a report with no other finding passes.
    """
    from backlight.doctor import diagnose
    from backlight.doctor.report import terminal
    from backlight.spec import AttentionSpec

    marked: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("doctor"))):
        marked |= marker.kwargs
    examinations = request.node.stash.setdefault(EXAMINATIONS, [])

    def examine(
        fn: Any,
        spec: AttentionSpec | None = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        allow: tuple[str, ...] = (),
        **settings: Any,
    ) -> Report:
        __tracebackhide__ = True
        spec = spec or AttentionSpec()
        chosen = marked | {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None} | settings
        report = diagnose(fn, spec, **chosen)
        unexpected = [f for f in report.findings if f.severity != "note" and f.id not in allow]
        failed = bool(unexpected) or (not report.healthy and not report.findings)
        examinations.append(Examination(fn, spec, chosen, report, failed))
        request.node.user_properties.append(("doctor_verdict", report.verdict))
        request.node.user_properties.extend(("doctor_finding", name) for name in report.finding_ids)
        if failed:
            pytest.fail(f"{report.headline}\n{terminal.text(report)}", pytrace=False)
        return report

    return examine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    outcome = yield
    if call.when == "call" and outcome.failed:
        lines = list(_keep(item, call))
        if lines:
            outcome.sections.append((SECTION, "\n".join(lines)))
    return outcome


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Repeats in the summary which reports could not be written. They travel as sections, so xdist's workers pass them on."""
    for report in terminalreporter.stats.get("failed", ()):
        for title, text in getattr(report, "sections", ()):
            for line in text.splitlines() if title == SECTION else ():
                if line.startswith(NOT_KEPT):
                    terminalreporter.write_line(f"doctor: {report.nodeid}: {line}", yellow=True)


def _keep(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[str, None, None]:
    """Files of every unhealthy examination of a failed test, and of a report that an exception carries (`assert_healthy`).

    Yields a line for each report: where it is, or why it is nowhere. A full disk must not take the test's own result with it.
    """
    examinations = [examination for examination in item.stash.get(EXAMINATIONS, []) if examination.failed]
    reports = [examination.report for examination in examinations]
    carried: Any = getattr(call.excinfo.value, "report", None) if call.excinfo is not None else None
    if hasattr(carried, "finding_ids") and not any(carried is report for report in reports):
        item.user_properties.extend(("doctor_finding", name) for name in carried.finding_ids)
        reports.append(carried)
    for number, report in enumerate(reports):
        try:
            yield _written(item, report, number, len(reports), examinations[number] if number < len(examinations) else None)
        except Exception as error:
            yield f"{NOT_KEPT}: {_first_line(error)}"


def _written(item: pytest.Item, report: Report, number: int, count: int, examination: Examination | None) -> str:
    from backlight.doctor.command.keep import keep_report

    folder, lacking = _folder(item, number, count), ""
    try:
        if examination is not None:
            _prepare_repro(examination, folder)
    except Exception as error:
        # the report is worth having without its script
        lacking = f", without a script: {_first_line(error)}"
    keep_report(report, folder)
    return f"report kept in {folder}{lacking}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _prepare_repro(examination: Examination, folder: Path) -> None:
    """Save the tensors that were handed in, and write a script when the kernel can be named from outside."""
    from torch import Tensor

    from backlight.doctor import diagnose
    from backlight.doctor.command import keep
    from backlight.doctor.subject.capture import save_capture
    from backlight.doctor.subject.case import Case

    given = {name: value for name, value in examination.settings.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in examination.settings.items() if name not in given}
    if given:
        save_capture(folder / "inputs.pt", given)
    reference = _importable(examination.subject)
    complete = not given or ({"q", "k", "v"} <= given.keys() and "cu_seqlens" not in given)
    if reference is None or not complete or plain.keys() - Case.__dataclass_fields__.keys():
        return
    case = Case.captured(given, examination.spec, **plain) if given else Case(spec=examination.spec, **plain)

    def examine(smaller: Case) -> Report:
        return diagnose(examination.subject, smaller.spec, **smaller.arguments())

    keep.reproduce(examination.report, case, reference, examine, folder, seconds=0.0)


def _importable(subject: Any) -> str | None:
    """`file.py:function` of a subject defined at the top of a file, else None: a closure cannot be called from outside."""
    import inspect
    import sys

    module, name = sys.modules.get(getattr(subject, "__module__", "")), getattr(subject, "__qualname__", "")
    if module is None or getattr(module, name, None) is not subject:
        return None
    path = inspect.getsourcefile(subject) if inspect.isfunction(subject) else None
    return f"{Path(path).resolve()}:{name}" if path else f"{module.__name__}:{name}"


def _folder(item: pytest.Item, number: int, count: int) -> Path:
    chosen = item.config.getoption("--doctor-report")
    if chosen is not None:
        base = Path(chosen)
    elif getattr(item.config, "cache", None) is not None:
        base = Path(item.config.cache.mkdir("doctor"))  # type: ignore[union-attr]
    else:
        base = Path(item.config.rootpath) / "doctor-reports"
    name = re.sub(r"[^\w.+=-]+", "-", item.nodeid).strip("-")
    return base / (name if count <= 1 else f"{name}-{number + 1}")
