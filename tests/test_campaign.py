"""`tools/campaign.py`: commands within a time, and that those it lists are there."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path

import campaign
import pytest

from backlight.bench.command import run as bench
from backlight.bench.contenders import select
from backlight.bench.suites import SUITES


def part(name: str, code: str, limit: int = 60) -> campaign.Part:
    return campaign.Part(name, limit, "", f"-c '{code}'")


def test_what_became_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    parts = [
        part("right", 'print("done with {name} in {seconds}")'),
        part("wrong", "raise SystemExit(3)"),
        part("endless", 'import time; print("begun", flush=True); time.sleep(600)', limit=2),
    ]
    assert campaign.campaign(parts, tmp_path, 1) == {"right": "ok", "wrong": "failed", "endless": "stopped"}
    assert time.monotonic() - begin < 60
    assert re.fullmatch(r"done with right in (49|50)\n", (tmp_path / "right.log").read_text())
    assert "begun" in capsys.readouterr().out


def test_what_has_no_time_left_does_not_begin(tmp_path: Path) -> None:
    assert campaign.campaign([part("late", "pass", limit=100)], tmp_path, 0.5) == {"late": "no time left"}
    assert not (tmp_path / "late.log").exists()


@pytest.mark.parametrize("each", campaign.PARTS, ids=lambda each: each.name)
def test_commands_are_there(each: campaign.Part) -> None:
    suite = re.match(r"-m backlight bench run (\S+)", each.command)
    assert suite is None or suite[1] in SUITES
    source = "" if suite else (campaign.ROOT / each.command.split()[0]).read_text()
    for option in re.findall(r"--([a-z-]+)", each.command):
        known = option.removeprefix("no-") in inspect.signature(bench).parameters if suite else f'"--{option}"' in source
        assert known, f"{each.name} has no --{option}"
    for names in re.findall(r"--contenders (\S+)", each.command):
        assert len(select(tuple(names.split(",")))) == len(names.split(","))


def test_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(campaign.PARTS)
    with pytest.raises(SystemExit):
        campaign.main([str(tmp_path), "nonsense"])
    assert "nonsense" in capsys.readouterr().err
