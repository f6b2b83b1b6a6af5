"""Bad words and bad records: one sentence each, with an exit code that nobody can take for "slower"."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from bench_records import record, times
from typer.testing import CliRunner

from backlight.bench import command, runner
from backlight.bench.record import BadRecord, check
from backlight.bench.results import load, read

NAN, INF = float("nan"), float("inf")
HUGE = "99999999999999999999"
BAD_ARGUMENTS, BAD_RECORD, NOT_COMPARABLE = 2, 3, 4


def bench(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(command.app, list(arguments), prog_name="backlight bench")


def flat(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def written(folder: Path, name: str, data: Any) -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


# --- words ------------------------------------------------------------------------------------------------------------------

WORDS: list[tuple[str, str]] = [
    ("nothing", "no suite is called 'nothing'; there are plain"),
    ("smoke extra", "(extra)"),
    ("--frobnicate", "--frobnicate"),
    ("smoke --contenders nobody", "no contender is called 'nobody'"),
    ("smoke --contenders backlight,nobody", "no contender is called 'nobody'"),
    ("smoke --contenders ,", "--contenders names nobody, got ','"),
    ("smoke --device abacus", "--device must be auto or a torch device such as cpu or cuda:0, got 'abacus'"),
    ("smoke --device meta", "--device must be auto, cpu or cuda, got 'meta'"),
    ("smoke --device cpu:3", "--device must be auto, cpu or cuda, got 'cpu:3'"),
    ("list --device abacus", "--device must be auto or a torch device such as cpu or cuda:0, got 'abacus'"),
    *[
        (f"smoke --rounds {word}", f"--rounds must be a whole number from 1 to 1000, got '{word}'")
        for word in ("0", "-1", "x", "1.5", HUGE)
    ],
    *[
        (f"smoke --seconds {word}", f"--seconds must be a finite number of at least 1, got '{word}'")
        for word in ("0", "-1", "x", "nan", "inf")
    ],
    *[
        (f"smoke --processes {word}", f"--processes must be a whole number from 0 to 256, got '{word}'")
        for word in ("-1", "x", "2.5", HUGE)
    ],
    ("smoke --out FILE/results", "cannot be written: "),
    ("--profile nothing", "no case is called 'nothing'"),
    ("smoke --profile CASE", "SUITE smoke would be ignored: --profile takes one case apart"),
    ("--profile CASE --rounds 3", "--rounds 3 would be ignored: --profile takes one case apart"),
    ("--profile CASE --quick", "--quick True would be ignored: --profile takes one case apart"),
    ("--resume nowhere.json", "nowhere.json"),
    ("smoke --resume GOOD", "SUITE smoke would be ignored: --resume goes on as the record began"),
    ("--resume GOOD --rounds 4", "--rounds 4 would be ignored: --resume goes on as the record began"),
    ("--resume GOOD --contenders eager", "--contenders eager would be ignored: --resume goes on as the record began"),
    ("--resume GOOD --quick", "--quick True would be ignored: --resume goes on as the record began"),
    ("compare nowhere.json nowhere.json", "nowhere.json"),
    ("compare GOOD", "Missing argument"),
    ("compare GOOD GOOD GOOD", "extra argument"),
    ("compare . .", "directory"),
    ("show nowhere.json", "nowhere.json"),
    ("plot nowhere.json", "nowhere.json"),
    ("plot GOOD --out FILE/pictures", "cannot be written: "),
]


@pytest.mark.parametrize(("words", "sentence"), WORDS, ids=[words.replace(HUGE, "huge") for words, _ in WORDS])
def test_bad_words_get_a_sentence_and_exit_code_2(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("a run was begun"))
    (tmp_path / "file").write_text("")
    places = {"GOOD": written(tmp_path, "good.json", record()), "CASE": "causal,s=128"}
    given = [places.get(word, word).replace("FILE", str(tmp_path / "file")) for word in words.split()]
    done = bench(*given)
    assert done.exit_code == BAD_ARGUMENTS, done.output
    assert sentence in flat(done.output)
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "good.json"}, "bad words must leave nothing behind"


# --- records ----------------------------------------------------------------------------------------------------------------

GONE = object()


def edited(*path: Any, value: Any) -> dict[str, Any]:
    """A good record with one field replaced, or taken away."""
    data = copy.deepcopy(record())
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


TIME = ("rows", 0, "times", "forward")
RECORDS: dict[str, tuple[Any, str]] = {
    "empty": ("", "is not JSON"),
    "text": ("hello", "is not JSON"),
    "half": ('{"schema": 1, "rows": [', "is not JSON"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "a list": ([], "must be a bench result of schema 1, got 'list'"),
    "a number": (3, "must be a bench result of schema 1, got 'int'"),
    "no schema": ({}, "must be a bench result of schema 1, got None"),
    "another schema": (edited("schema", value=99), "must be a bench result of schema 1, got 99"),
    "schema as text": (edited("schema", value="1"), "must be a bench result of schema 1, got '1'"),
    **{
        f"no {name}": (edited(name, value=GONE), f"the record has no {name}")
        for name in ("suite", "kind", "status", "machine", "ceilings", "settings", "cases", "rows")
    },
    "suite": (edited("suite", value=3), "suite must be text, got 3"),
    "kind": (edited("kind", value="slow"), "kind must be one of speed, memory, overhead, profile, got 'slow'"),
    "status": (edited("status", value=None), "status must be one of running, interrupted, stopped, complete, got None"),
    "machine": (edited("machine", value="H200"), "machine must be an object, got 'H200'"),
    "ceilings": (edited("ceilings", value=[1]), "ceilings must be an object, got [1]"),
    "a ceiling": (edited("ceilings", "copy_tb_s", value="4"), "ceilings.copy_tb_s must be a positive number, got '4'"),
    "no matmul": (edited("ceilings", "matmul_tflops", value=GONE), "ceilings has no matmul_tflops"),
    "matmul": (
        edited("ceilings", "matmul_tflops", "bfloat16", value=0),
        "matmul_tflops.bfloat16 must be a positive number, got 0",
    ),
    "settings": (edited("settings", value=None), "settings must be an object, got None"),
    "contenders": (edited("settings", "contenders", value="backlight"), "settings.contenders must be a list, got 'backlight'"),
    "a contender": (edited("settings", "contenders", 0, value=7), "settings.contenders[0] must be text, got 7"),
    "rounds": (edited("settings", "rounds", value=0), "settings.rounds must be a whole number above 0, got 0"),
    "quick": (edited("settings", "quick", value="no"), "settings.quick must be true or false, got 'no'"),
    "cases": (edited("cases", value={}), "cases must be a list, got {}"),
    "a case": (edited("cases", 0, value="plain"), "cases[0] must be an object, got 'plain'"),
    "case without id": (edited("cases", 0, "id", value=GONE), "cases[0] has no id"),
    "bytes": (
        edited("cases", 0, "input_bytes", value=-1),
        "cases[0].input_bytes must be a number that is not negative, got -1",
    ),
    "flops": (edited("cases", 0, "flops", "forward", value="many"), "cases[0].flops.forward must be a number"),
    "rows": (edited("rows", value=3), "rows must be a list, got 3"),
    "a row": (edited("rows", 0, value=None), "rows[0] must be an object, got None"),
    "row without case": (edited("rows", 0, "case", value=GONE), "rows[0] has no case"),
    "row of another case": (
        edited("rows", 0, "case", value="else"),
        "rows[0].case must be the id of one of the cases, got 'else'",
    ),
    "row without contender": (edited("rows", 0, "contender", value=GONE), "rows[0] has no contender"),
    "row status": (edited("rows", 0, "status", value="fine"), "rows[0].status must be one of ok, suspect, wrong"),
    "reason": (edited("rows", 2, "reason", value=5), "rows[2].reason must be text, got 5"),
    "times": (edited("rows", 0, "times", value=[1.0]), "rows[0].times must be an object, got [1.0]"),
    "a time": (edited(*TIME, value=1.0), "rows[0].times.forward must be an object, got 1.0"),
    **{
        f"median {word!r}": (
            edited(*TIME, "median_ms", value=word),
            f"rows[0].times.forward.median_ms must be a positive number, got {word!r}",
        )
        for word in (NAN, INF, -1.0, 0, "fast", None, True, [1.0])
    },
    "no median": (edited(*TIME, "median_ms", value=GONE), "rows[0].times.forward has no median_ms"),
    "no p20": (edited(*TIME, "p20_ms", value=GONE), "rows[0].times.forward has no p20_ms"),
    "p80": (edited(*TIME, "p80_ms", value="x"), "rows[0].times.forward.p80_ms must be a positive number, got 'x'"),
    "order": (
        edited(*TIME, value=times(1.0) | {"p80_ms": 0.5}),
        "rows[0].times.forward.median_ms must be between p20_ms 0.99 and p80_ms 0.5",
    ),
    "no rounds": (edited(*TIME, "round_medians_ms", value=GONE), "rows[0].times.forward has no round_medians_ms"),
    "empty rounds": (edited(*TIME, "round_medians_ms", value=[]), "round_medians_ms must be a list of at least 1, got []"),
    "a round": (edited(*TIME, "round_medians_ms", 1, value=NAN), "round_medians_ms[1] must be a positive number, got nan"),
    "rates": (edited("rows", 0, "tflops", value=GONE), "rows[0].tflops has no forward"),
    "a rate": (
        edited("rows", 0, "tflops", "both", value="x"),
        "rows[0].tflops.both must be a number that is not negative, got 'x'",
    ),
    "memory": (edited("rows", 0, "memory", "peak_bytes", value="x"), "rows[0].memory.peak_bytes must be a number"),
    "profile": (edited("profiles", 0, "phases", value=3), "profiles[0].phases must be an object, got 3"),
    "twice": (edited("rows", 1, value=record()["rows"][0]), "rows must hold 'backlight' of "),
}


@pytest.mark.parametrize("name", RECORDS)
def test_bad_records_get_a_sentence_and_exit_code_3(tmp_path, name):
    """They gave tracebacks and exit code 1, the code for "slower"; NaN compared as neither slower nor faster."""
    content, sentence = RECORDS[name]
    good, bad = written(tmp_path, "good.json", record()), written(tmp_path, "bad.json", content)
    for words in (("compare", bad, good), ("compare", good, bad), ("show", bad), ("plot", bad), ("--resume", bad)):
        done = bench(*words)
        assert done.exit_code == BAD_RECORD, (words, done.output)
        assert sentence in flat(done.output)
        assert "bad.json" in done.output
        assert "Traceback" not in done.output


def test_what_only_a_table_misses_is_the_record_too(tmp_path):
    data = record()
    del data["cases"][0]["input_bytes"]
    data["kind"] = "memory"
    done = bench("show", written(tmp_path, "bad.json", data))
    assert done.exit_code == BAD_RECORD
    assert "bad.json lacks something that is to be shown: KeyError 'input_bytes'" in flat(done.output)


def test_a_record_without_permission(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BadRecord, match=r"run\.json cannot be read: Permission denied"):
        load(tmp_path / "run.json")


def test_records_of_this_repository_pass():
    kept = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json.gz"))
    ours = [data for path in kept if (data := json.loads(read(path))).get("schema") == 1]
    assert len(ours) >= 5
    for data in ours:
        check(data)


# --- records that cannot be compared ----------------------------------------------------------------------------------------


def other(**changes: Any) -> dict[str, Any]:
    data = record()
    return data | changes


def renamed() -> dict[str, Any]:
    data = record()
    for entry, key in ((case, "id") for case in data["cases"]):
        entry[key] += ",other"
    for row in data["rows"]:
        row["case"] += ",other"
    return data


def only(contender: str) -> dict[str, Any]:
    return other(rows=[row for row in record()["rows"] if row["contender"] == contender])


def on(**machine: Any) -> dict[str, Any]:
    return other(machine=record()["machine"] | machine)


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other cases": (record(), renamed(), "the records have no time in common (plain with 30 rows and plain with 30)"),
    "other contenders": (only("backlight"), only("fa3-bare"), "the records have no time in common"),
    "an empty one": (record(), other(rows=[]), "the records have no time in common (plain with 30 rows and plain with 0)"),
    "two empty ones": (other(rows=[]), other(rows=[]), "the records have no time in common"),
    "only failures": (only("sdpa-cudnn"), only("sdpa-cudnn"), "the records have no time in common"),
    "another card": (record(), on(card="Other card"), "of different devices: card Test card and Other card"),
    "a processor": (record(), on(device="cpu", card=None), "of different devices: device cuda and cpu"),
    "another processor": (
        on(device="cpu"),
        on(device="cpu", cpu="Other"),
        "of different devices: cpu Test processor and Other",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_records_with_nothing_to_compare_are_exit_code_4(tmp_path, name):
    """`bench compare` of records with nothing in common said "0 slower" and left with 0."""
    old, new, sentence = APART[name]
    done = bench("compare", written(tmp_path, "old.json", old), written(tmp_path, "new.json", new))
    assert done.exit_code == NOT_COMPARABLE, done.output
    assert sentence in flat(done.output)


def test_what_the_later_record_never_tried_is_said(tmp_path):
    done = bench("compare", written(tmp_path, "old.json", record()), written(tmp_path, "new.json", only("backlight")))
    assert done.exit_code == 0
    assert "6 of the earlier rows with times are not in the later record" in flat(done.output)


def test_an_interruption_is_130(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("backlight.bench.results.load", interrupt)
    good = written(tmp_path, "good.json", record())
    assert bench("show", good).exit_code == 130


def test_help_names_the_exit_codes():
    assert "4 records that cannot be compared" in flat(bench("--help").output)


def test_there_are_many_of_them():
    assert len(WORDS) >= 40
    assert len(RECORDS) >= 55
    assert len(APART) >= 8
