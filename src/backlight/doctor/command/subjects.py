"""Names become subjects: a kernel of PyTorch's or a peer's, one of our backends, a demo, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.doctor.report.model import Report
    from backlight.doctor.subject.case import Case
    from backlight.doctor.subject.subject import Subject


def resolve(subject: str, layout: str = "auto", precision: str | None = None) -> Subject:
    """A subject by its name; names of ours compute in the precision."""
    from dataclasses import replace

    import backlight
    from backlight import registry
    from backlight.doctor.defects import stories
    from backlight.doctor.subject import names
    from backlight.doctor.subject.subject import Subject

    own = subject in ("backlight", names.EMULATED) or subject in registry.names()
    if subject in names.NAMED or subject.startswith("sdpa:") or own:
        reads = ("auto", "BHSD", "packed") if own else ("auto", "BHSD")
        if layout not in reads:
            raise ValueError(f"--layout is for functions of yours: {subject} reads {' or '.join(reads[1:])}, got {layout!r}")
    if subject in names.NAMED or subject.startswith("sdpa:"):
        return Subject(names.named(subject), layout="BHSD", name=subject)
    if subject.startswith("demo:"):
        return stories.subject_of(subject.removeprefix("demo:"))
    if own:
        return names.own(subject, backlight.attention, backlight.attention_varlen, layout, precision)
    if ":" not in subject:
        known = [*names.NAMED, "backlight", *registry.names()]
        raise names.UnknownSubject(f"no kernel is called {subject!r}; there are {', '.join(known)}, or write file.py:function")
    found = names.user_subject(subject)
    return found if layout == "auto" else replace(found, layout=layout)


def own_kernels() -> list[tuple[str, str]]:
    """(name, summary) of the package's public call and of every backend."""
    from backlight import registry

    backends = [(name, registry.get(name).summary) for name in registry.names()]
    in_e4m3 = ("emulated", "the public call in e4m3, emulated in PyTorch; with --precision fp8, like backlight and hopper")
    return [("backlight", "the public call, its own choice of backend"), *backends, in_e4m3]


def version() -> str:
    """Of this package."""
    import backlight

    return backlight.__version__


def examiner(subject: str, case: Case, layout: str = "auto", against: str | None = None) -> Callable[[Case], Report]:
    """A function that examines the named subject with a case; names are resolved once."""
    from backlight.doctor import diagnose
    from backlight.doctor.subject.names import NAMED

    packs = case.packed and layout == "auto" and subject not in NAMED and not subject.startswith(("sdpa:", "demo:"))
    target = resolve(subject, "packed" if packs else layout, case.precision)
    reference = None if against is None else resolve(against, precision=case.precision)

    def run(case: Case) -> Report:
        report = diagnose(target, case.spec, against=reference, **case.arguments())
        report.subject = subject
        return report

    return run
