"""An examination in a child process, for a program that must outlive the kernel it examines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import NoReturn

import torch

from backlight.doctor.report.model import Report
from backlight.doctor.subject import apart, trouble
from backlight.doctor.subject.apart import Limits, Link
from backlight.doctor.subject.subject import Subject
from backlight.problems.problem import Problem


def in_child(examine: Callable[[], Report], limits: Limits, subject: Subject, problem: Problem) -> Report:
    """The report of `examine`, made in a child; a report "could-not-run" when the child does not live to give one."""
    device = problem.call.q.device
    if not apart.possible():
        raise ValueError("limits need a child process, which the doctor has on Linux alone; leave them out")
    if device.type == "cuda" and torch.cuda.is_initialized():
        raise ValueError(
            "limits: CUDA is in use in this process and a child cannot share it; use `backlight doctor` or leave them out"
        )
    watched = apart.split(limits, resident_only=device.type != "cpu")
    if watched is None:
        _in_the_child(examine, limits, subject)
    ended = watched.wait(subject.file)
    if ended.interrupted:
        raise KeyboardInterrupt
    if not ended.said:
        return _could_not_run(subject, ended.sentence)
    told = json.loads(ended.said)
    if "broke" in told:
        raise RuntimeError(f"the examination broke off: {told['broke']}")
    return Report.from_dict(told)


def _in_the_child(examine: Callable[[], Report], limits: Limits, subject: Subject) -> NoReturn:
    link = apart.link()
    assert link is not None
    leave = os._exit

    def give_up(sentence: str) -> None:
        _say(link, _could_not_run(subject, sentence).to_dict())
        leave(1)

    try:
        # the pool of threads that the parent may have had is not in this process
        torch.set_num_threads(1)
        with trouble.patience(limits.seconds, give_up, link.last_words):
            found = examine().to_dict()
        _say(link, found)
    except KeyboardInterrupt:
        leave(130)
    except BaseException as error:
        _say(link, {"broke": f"{trouble.said(error)} ({trouble.last_line(error)})"})
    finally:
        leave(1)


def _say(link: Link, words: dict[str, object]) -> None:
    link.tell(json.dumps(words, allow_nan=False))


def _could_not_run(subject: Subject, sentence: str) -> Report:
    return Report(subject.name, "could-not-run", sentence, subject.location)
