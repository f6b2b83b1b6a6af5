"""What an examination costs, in processor time: a busy machine makes nothing fail."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from injection import ours

from backlight.doctor import Limits, Subject, diagnose
from backlight.doctor.subject import names
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
QUICK, FULL, CHILD = 2.0, 60.0, 1.5


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seconds(level: str, subject=ours, **settings) -> float:
    started = time.process_time()
    assert diagnose(subject, CAUSAL, level=level, **settings).healthy
    return time.process_time() - started


def test_quick_takes_less_than_two_seconds():
    seconds("quick", shape=(1, 1, 16, 16))  # what is imported and compiled on first use
    assert seconds("quick") < QUICK


@pytest.mark.later
def test_full_takes_less_than_a_minute():
    assert seconds("full") < FULL


def test_the_child_process_adds_less_than_a_second_and_a_half():
    """The work of the child and of its parent, less the same work without a child."""
    settings = {"shape": (1, 2, 40, 16), "subject": Subject(names.named("sdpa:math"), layout="BHSD")}
    seconds("quick", **settings)
    here = seconds("quick", **settings)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    parent = seconds("quick", limits=Limits(seconds=120), **settings)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert child + parent - here < CHILD
