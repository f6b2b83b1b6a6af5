"""transformers' own modelling tests with "backlight", and those that fail again with "sdpa": what fails with ours alone?

    git clone --depth 1 --branch v5.15.1 https://github.com/huggingface/transformers somewhere
    python tools/transformers_tests.py somewhere --models llama t5     (all of MODELS without it)
    python tools/transformers_tests.py somewhere --models whisper --limit 1800 --logs out [--resume]     in pieces

The installed transformers should be that version; its tests need datasets, parameterized and accelerate. Nothing is downloaded:
tests of the hub are left out. Counts go to docs/data/transformers-tests.json, and from there into docs/layers.md. With a limit
tests come in an order of their own, a fair sample as far as it goes, and what the time was too short for is counted.

This file is also the plugin of pytest that makes ours the attention of a run: our functions stand behind the name "sdpa", which
is what tests name or get by default, and "backlight" is the default of models that take no sdpa.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "data" / "transformers-tests.json"
PAGE = ROOT / "docs" / "layers.md"
BEGIN, END = "<!-- counts of transformers' tests -->", "<!-- end of counts -->"

MODELS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3", "t5", "bert", "vit", "whisper", "mixtral")
# many devices, other libraries, models of the hub, and pipelines that read images and sounds from it
LEFT_OUT = " and ".join(
    f"not {name}" for name in ("flash_attn", "flex", "deepspeed", "fsdp", "multi_gpu", "pipeline", "tp_", "Integration")
)
ATTENTION, OUTCOMES, ENDS = "BACKLIGHT_ATTENTION", "BACKLIGHT_OUTCOMES", "BACKLIGHT_ENDS"
PASSED, FAILED, SKIPPED, LATE = "passed", "failed", "skipped", "not run"

# --- inside pytest -----------------------------------------------------------------------------------------------------------

_outcomes: dict[str, str] = {}


def pytest_configure(config: Any) -> None:
    if os.environ.get(ATTENTION) == "backlight":
        _install()


def _install() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from backlight.integrations.transformers import attention_forward, attention_mask, register

    name = register()
    AttentionInterface.register("sdpa", attention_forward)
    AttentionMaskInterface.register("sdpa", attention_mask)
    usual = PreTrainedModel.get_correct_attn_implementation

    def ours_by_default(self: Any, requested_attention: str | None, *rest: Any, **options: Any) -> str:
        found = usual(self, requested_attention, *rest, **options)
        return name if requested_attention is None and found == "eager" and self._supports_attention_backend else found

    PreTrainedModel.get_correct_attn_implementation = ours_by_default


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Those that an earlier run has done stay done; with a limit the others come in an order that no file decides."""
    written = Path(os.environ[OUTCOMES])
    if written.exists():
        _outcomes.update(json.loads(written.read_text()))
    done = [item for item in items if _outcomes.get(_name(item.nodeid), LATE) != LATE]
    items[:] = [item for item in items if item not in set(done)]
    config.hook.pytest_deselected(items=done)
    if ENDS in os.environ:
        items.sort(key=lambda item: crc32(item.nodeid.encode()))


def pytest_collection_finish(session: Any) -> None:
    _outcomes.update({_name(item.nodeid): LATE for item in session.items})


def pytest_runtest_teardown(item: Any) -> None:
    if time.time() > float(os.environ.get(ENDS, "inf")):
        item.session.shouldstop = "the time is over"


def pytest_runtest_logreport(report: Any) -> None:
    name = _name(report.nodeid)
    if report.failed or (report.passed and report.when == "call" and _outcomes.get(name) != FAILED):
        _outcomes[name] = FAILED if report.failed else PASSED
    elif report.skipped and _outcomes.get(name, LATE) == LATE:
        _outcomes[name] = SKIPPED


def pytest_runtest_logfinish() -> None:
    # after every test: a run that is killed has told what it found
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


# --- around pytest -----------------------------------------------------------------------------------------------------------


def outcomes(options: argparse.Namespace, model: str, attention: str, only: str) -> dict[str, str]:
    """Test -> passed, failed, skipped or not run."""
    checkout, logs = options.checkout, options.logs
    # alone in its folder: others beside it have names of packages
    plugin = logs / "plugin"
    plugin.mkdir(exist_ok=True)
    shutil.copy(__file__, plugin)
    paths = (str(plugin), str(ROOT / "src"), str(checkout), os.environ.get("PYTHONPATH", ""))
    found = logs / f"{model}-{attention}.json"
    if attention == "sdpa" or not options.resume:
        found.unlink(missing_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "RUN_SLOW": "1", ATTENTION: attention, OUTCOMES: str(found)}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    if options.limit and attention == "backlight":
        environment[ENDS] = str(time.time() + options.limit)
    chosen = f"({LEFT_OUT}) and ({only})" if only else LEFT_OUT
    command = [sys.executable, "-m", "pytest", "-q", "-p", "transformers_tests", "-p", "no:cacheprovider", "--tb=short"]
    target = checkout / "tests" / "models" / model / f"test_modeling_{model}.py"
    with (logs / f"{model}-{attention}.log").open("a" if options.resume else "w") as log:
        subprocess.run(
            [*command, "-k", chosen, str(target)], cwd=checkout, env=environment, stdout=log, stderr=log, check=False
        )
    return json.loads(found.read_text())


def compared(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Counts with ours, and the tests that fail with ours alone."""
    ours = outcomes(options, model, "backlight", options.only)
    failed = sorted(name for name, outcome in ours.items() if outcome == FAILED)
    chosen = " or ".join(name.rpartition("::")[2] for name in failed)
    sdpa = outcomes(options, model, "sdpa", chosen) if failed else {}
    alone = [name for name in failed if sdpa.get(name) != FAILED]
    counts = {outcome: list(ours.values()).count(outcome) for outcome in (PASSED, FAILED, SKIPPED, LATE)}
    return counts | {"failed with ours alone": alone}


def table(record: dict[str, Any]) -> str:
    """The counts as they stand on the page."""
    lines = ["| model | passed | failed | failed with ours alone | not run |", "|---|---|---|---|---|"]
    for model, row in sorted(record["models"].items()):
        counts = (row[PASSED], row[FAILED], len(row["failed with ours alone"]), row.get(LATE, "-"))
        lines.append(f"| {model} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--only", default="", help="a -k expression of pytest: for a quick look, nothing is written")
    parser.add_argument("--logs", type=Path, help="where the logs of pytest and the outcomes go")
    parser.add_argument("--limit", type=float, default=0, help="seconds for each model; 0 = as long as it takes")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run left in --logs")
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    options.logs = (options.logs or Path(tempfile.mkdtemp())).resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    import torch
    import transformers

    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"models": {}}
    record |= {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    for model in options.models:
        record["models"][model] = compared(options, model)
        print(model, json.dumps(record["models"][model], indent=1), flush=True)
    if not options.only:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        write_page(record)


if __name__ == "__main__":
    main()
