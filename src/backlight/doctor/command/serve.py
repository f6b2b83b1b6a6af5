"""`backlight doctor serve`: the doctor as tools of the Model Context Protocol, JSON-RPC 2.0, one message a line.

Written by hand because it is one loop over four methods; the protocol's own package would bring a web server with it. Requests
are answered in the order in which they come. Examinations run in processes of their own: no kernel ends the server.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from backlight.doctor.command import tools
from backlight.doctor.command.streams import OutputAside

# revisions that begin with `initialize`; a client that asks for another one is offered the newest of these
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
INSTRUCTIONS = (
    "Examines attention kernels against a float64 oracle. Call examine after every change of a kernel; do the "
    "next_check of the first finding before changing code; explain_finding tells about an id; compare tells "
    "what a change made better or worse."
)


class Refused(Exception):
    """An answer that is an error of the protocol."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def serve() -> None:
    """Until standard input ends. Whatever else is printed in this process goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out, OutputAside():
        answer_all(sys.stdin, out)


def answer_all(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        if line.strip():
            answer = answer_line(line)
            if answer is not None:
                answers.write(json.dumps(answer, allow_nan=False) + "\n")
                answers.flush()


def answer_line(line: str) -> dict[str, Any] | None:
    """The answer to one message; None for those that want none."""
    try:
        message = json.loads(line)
    except ValueError as error:
        return _error(None, PARSE_ERROR, f"not JSON: {error}")
    if not isinstance(message, Mapping) or message.get("jsonrpc") != "2.0":
        return _error(None, INVALID_REQUEST, "expected one JSON-RPC 2.0 message")
    if "id" not in message or "method" not in message:
        # a notification, or an answer to a question that we never ask
        return None
    number, method = message["id"], message["method"]
    try:
        if method not in METHODS:
            raise Refused(METHOD_NOT_FOUND, f"no method {method!r}")
        params = message.get("params") or {}
        if not isinstance(params, Mapping):
            raise Refused(INVALID_PARAMS, "params must be an object")
        return {"jsonrpc": "2.0", "id": number, "result": METHODS[method](params)}
    except Refused as error:
        return _error(number, error.code, error.message)
    except Exception as error:
        return _error(number, INTERNAL_ERROR, f"{type(error).__name__}: {error}")


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


# --- methods ----------------------------------------------------------------------------------------------------------------


def initialize(params: Mapping[str, Any]) -> dict[str, Any]:
    from backlight.doctor.command.subjects import version

    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "backlight-doctor", "title": "backlight doctor", "version": version()},
        "instructions": INSTRUCTIONS,
    }


def list_tools(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"tools": [tool.described() for tool in tools.TOOLS]}


def call_tool(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a tool finds; a question that it cannot answer is a result with `isError`, which whoever asked can read."""
    tool = next((tool for tool in tools.TOOLS if tool.name == params.get("name")), None)
    if tool is None:
        raise Refused(
            INVALID_PARAMS, f"no tool is called {params.get('name')!r}; there are {', '.join(t.name for t in tools.TOOLS)}"
        )
    arguments = params.get("arguments") or {}
    unknown = [name for name in arguments if name not in tool.inputs["properties"]]
    missing = [name for name in tool.inputs["required"] if name not in arguments]
    try:
        if unknown or missing:
            known = ", ".join(tool.inputs["properties"])
            raise ValueError(
                f"{tool.name} {f'needs {missing[0]!r}' if missing else f'takes no {unknown[0]!r}; it takes {known}'}"
            )
        found, text = tool.run(arguments)
    except (ValueError, TypeError, LookupError) as error:
        said = error.args[0] if error.args else error
        return {"content": [{"type": "text", "text": str(said)}], "isError": True}
    return {"content": [{"type": "text", "text": text}], "structuredContent": found, "isError": False}


METHODS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "initialize": initialize,
    "ping": lambda params: {},
    "tools/list": list_tools,
    "tools/call": call_tool,
}
