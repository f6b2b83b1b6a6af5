"""The doctor for programs: schema, one line, SARIF, and a server that a client of the protocol drives."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from report_samples import could_not_run, healthy, one_head_only, window_defect
from test_trouble import doctor

from backlight.doctor.command import serve, tools
from backlight.doctor.defects.catalogue import BY_ID
from backlight.doctor.defects.games import GAMES
from backlight.doctor.defects.probed import PROBED
from backlight.doctor.defects.read import READ
from backlight.doctor.report import json as report_json
from backlight.doctor.report import line, model, sarif
from backlight.doctor.report.schema import schema, text

jsonschema = pytest.importorskip("jsonschema")

SMALL = {"shape": "1,2,16,8", "dtype": "fp32"}
SAMPLES = (healthy, window_defect, one_head_only, could_not_run)

# --- the schema -------------------------------------------------------------------------------------------------------------

PARTS = {
    "stage": model.StageRow,
    "finding": model.Finding,
    "probe": model.Probe,
    "picture": model.Picture,
    "reading": model.Reading,
    "where": model.Where,
}


def test_the_schema_is_one_and_has_the_fields_of_the_model():
    whole = schema()
    jsonschema.Draft202012Validator.check_schema(whole)
    assert whole["$id"].endswith(f":{model.SCHEMA}")
    assert whole["properties"]["schema"]["const"] == model.SCHEMA
    assert set(whole["properties"]) == {each.name for each in fields(model.Report)}
    for name, kind in PARTS.items():
        assert set(whole["$defs"][name]["properties"]) == {each.name for each in fields(kind)}, name


def test_the_schema_knows_the_words_of_the_model():
    parts = schema()["$defs"]
    assert tuple(schema()["properties"]["verdict"]["enum"]) == model.CHOICES["Verdict"]
    assert tuple(parts["stage"]["properties"]["status"]["enum"]) == model.CHOICES["Status"]
    assert tuple(parts["finding"]["properties"]["severity"]["enum"]) == model.CHOICES["Severity"]
    assert tuple(parts["finding"]["properties"]["confidence"]["enum"]) == model.CHOICES["Confidence"]
    assert tuple(parts["picture"]["properties"]["kind"]["enum"]) == model.CHOICES["PictureKind"]
    assert tuple(parts["reading"]["properties"]["kind"]["enum"]) == model.CHOICES["ReadingKind"]


@pytest.mark.parametrize("change", [{"verdict": "fine"}, {"seconds": "long"}, {"extra": 1}, {"findings": [{}]}])
def test_the_schema_refuses_what_is_no_report(change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(window_defect().to_dict() | change, schema())


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "docs" / "data").glob("doctor-*.json")), ids=lambda p: p.stem
)
def test_published_reports_follow_the_schema(path):
    found = json.loads(path.read_text())
    if "verdict" in found:
        jsonschema.validate(found, schema())


def test_the_command_prints_the_schema():
    result = doctor("schema")
    assert (result.exit_code, result.stdout) == (0, text())


# --- one line, SARIF --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_one_line_has_verdict_subject_and_ids(sample):
    report = sample()
    said = line.line(report)
    assert "\n" not in said
    assert f"{report.subject} [{','.join(report.finding_ids)}] " in said
    assert said.startswith(("HEALTHY", "DEFECT", "PRECISION", "TEST FAULT", "COULD NOT RUN"))


@pytest.mark.parametrize("sample", SAMPLES)
def test_sarif_has_what_the_standard_requires(sample):
    report = sample()
    found = json.loads(sarif.dumps(report, "1.0"))
    assert found["version"] == "2.1.0"
    (run,) = found["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [result["ruleId"] for result in run["results"]] == list(report.finding_ids)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
    assert run["invocations"][0]["executionSuccessful"] is (report.verdict != "could-not-run")
    assert run["invocations"][0]["exitCode"] == report.exit_code


def test_sarif_points_at_the_kernels_line():
    report = window_defect()
    report.location = "a folder/my_kernel.py:35"
    place = sarif.sarif(report)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "a%20folder/my_kernel.py"}, "region": {"startLine": 35}}
    failed = model.Report("k.py:fn", "could-not-run", "KeyError: 'o' (k.py:12: return table['o'])")
    (note,) = sarif.sarif(failed)["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    assert note["locations"][0]["physicalLocation"]["region"] == {"startLine": 12}


def test_formats_leave_standard_output_to_programs(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "import torch\ndef fn(q, k, v):\n    print('noise')\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, 2 * v)\n"
    )
    words = (f"{tmp_path}/kernel.py:fn", "--shape", "1,2,16,8", "--dtype", "fp32")
    result = doctor(*words, "--format", "line")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith("DEFECT ")
    result = doctor(*words, "--format", "json", "--json", str(tmp_path / "r.json"))
    assert json.loads(result.stdout)["findings"] == json.loads((tmp_path / "r.json").read_text())["findings"]
    result = doctor(*words, "--format", "sarif")
    assert json.loads(result.stdout)["runs"][0]["results"][0]["level"] == "error"
    for bad in (("--format", "xml"), ("--format", "line", "--json", "-")):
        result = doctor(*words, *bad)
        assert result.exit_code == 3
        assert "--format" in result.output


# --- the server -------------------------------------------------------------------------------------------------------------


def asked(method: str, number: int = 1, **params):
    return serve.answer_line(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}))


def test_the_handshake_agrees_on_a_version():
    for version in serve.VERSIONS:
        assert asked("initialize", protocolVersion=version)["result"]["protocolVersion"] == version
    assert asked("initialize", protocolVersion="1999-01-01")["result"]["protocolVersion"] == serve.VERSIONS[-1]
    assert asked("ping") == {"jsonrpc": "2.0", "id": 1, "result": {}}


def test_bad_messages_get_the_codes_of_the_protocol():
    assert serve.answer_line("{")["error"]["code"] == serve.PARSE_ERROR
    assert serve.answer_line("[]")["error"]["code"] == serve.INVALID_REQUEST
    assert asked("no/such")["error"]["code"] == serve.METHOD_NOT_FOUND
    assert asked("tools/call", name="none")["error"]["code"] == serve.INVALID_PARAMS
    assert serve.answer_line('{"jsonrpc": "2.0", "method": "notifications/initialized"}') is None
    out = io.StringIO()
    serve.answer_all(io.StringIO('\n{"jsonrpc": "2.0", "id": "a", "method": "ping"}\nnonsense\n'), out)
    assert [json.loads(line)["id"] for line in out.getvalue().splitlines()] == ["a", None]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("examine", {}, "needs 'subject'"),
        ("examine", {"subject": "sdpa", "colour": 1}, "takes no 'colour'"),
        ("examine", {"subject": "--report=somewhere"}, "subject must name a kernel"),
        ("explain_finding", {"id": "no-such"}, "no defect named 'no-such'"),
        ("list_defects", {"family": "none"}, "no family is called 'none'"),
        ("compare", {"old": "/nowhere.json", "new": "/nowhere.json"}, "cannot be read"),
    ],
)
def test_a_question_that_cannot_be_answered_is_said(name, arguments, says):
    result = asked("tools/call", name=name, arguments=arguments)["result"]
    assert result["isError"]
    assert says in result["content"][0]["text"]


def test_every_finding_can_be_explained():
    for name in (*BY_ID, *GAMES, *PROBED, *READ, "open"):
        found, said = tools.explain_finding({"id": name})
        assert found["id"] == name
        assert said
    jsonschema.validate(found, tools.TOOLS[2].outputs())


def test_every_option_of_the_command_is_offered_or_left_out_on_purpose():
    offered = tools.options_schema()["properties"]
    assert {"causal", "window", "shape", "dtype", "level", "timeout", "memory", "mask", "pictures"} <= set(offered)
    assert not {"report", "json", "format", "in_process", "typed", "rows"} & set(offered)
    for tool in tools.TOOLS:
        jsonschema.Draft202012Validator.check_schema(tool.described()["inputSchema"])
        jsonschema.Draft202012Validator.check_schema(tool.described()["outputSchema"])


KERNEL = """
import ctypes, torch

def fn(q, k, v):
    return 3 * torch.nn.functional.scaled_dot_product_attention(q, k, v)

def crash(q, k, v):
    ctypes.string_at(0)
"""


def test_a_client_of_the_protocol_drives_the_server(tmp_path):
    """The protocol's own client: handshake, list, and every tool; it checks results against the schemas itself."""
    pytest.importorskip("mcp")
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL)
    source = os.pathsep.join([str(Path(tools.__file__).parents[3]), *filter(None, sys.path)])
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "backlight", "doctor", "serve"],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )

    async def drive():
        async with Client(stdio_client(server)) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["examine", "list_defects", "explain_finding", "compare"]
            examined = await client.call_tool("examine", {"subject": f"{kernel}:fn", **SMALL})
            assert not examined.is_error
            report = examined.structured_content
            assert report["verdict"] == "defect"
            assert report["findings"][0]["next_check"]
            crashed = (await client.call_tool("examine", {"subject": f"{kernel}:crash", **SMALL})).structured_content
            assert crashed["verdict"] == "could-not-run"
            assert "kernel.py:8: ctypes.string_at(0)" in crashed["headline"]
            told = await client.call_tool("explain_finding", {"id": report["findings"][0]["id"]})
            assert told.structured_content["does"]
            found = await client.call_tool("list_defects", {"family": "windows"})
            assert "window+1" in [each["id"] for each in found.structured_content["defects"]]
            compared = await client.call_tool("compare", {"old": report, "new": report})
            assert compared.structured_content["got_worse"] is False
            assert (await client.call_tool("explain_finding", {"id": "none"})).is_error

    asyncio.run(drive())


def test_a_report_survives_the_way_through_a_program():
    report = window_defect()
    assert report_json.loads(report_json.dumps(report)) == report
