"""`transformers.Trainer` with attn_implementation="backlight": steps of every family end where those with "eager" end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra `test` brings it)")

from small_families import FAMILIES  # noqa: E402
from small_models import B, made  # noqa: E402

from backlight.integrations.transformers import register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory

STEPS = 3


def trained(name: str, implementation: str, folder: Path, **options: Any) -> tuple[nn.Module, list[float]]:
    """The model after STEPS steps of plain gradient descent, each with a batch of its own, and the losses.

    Adam would divide gradients that are nothing but rounding by their own size.
    """
    make, batch = FAMILIES[name]
    model = made(make)
    model.set_attn_implementation(implementation)
    rows: list[dict[str, Tensor]] = []
    for _ in range(STEPS):
        columns = batch()
        rows += [{key: column[i] for key, column in columns.items()} for i in range(B)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=B, optim="sgd", learning_rate=0.1, use_cpu=True,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "checkpointed"), [*((name, False) for name in FAMILIES), ("t5", True), ("gpt-oss", True)])
def test_steps(name: str, checkpointed: bool, tmp_path: Path) -> None:
    register()
    eager, losses = trained(name, "eager", tmp_path)
    ours, own = trained(name, "backlight", tmp_path, gradient_checkpointing=checkpointed)
    assert len(own) == STEPS
    assert own == pytest.approx(losses, rel=1e-5)
    start, end = (dict(model.named_parameters()) for model in (made(FAMILIES[name][0]), eager))
    for key, parameter in ours.named_parameters():
        error, way = (parameter - end[key]).norm(), (end[key] - start[key]).norm()
        # every step rounds the parameter once; what moves by less than 1e-9 has a gradient of rounding
        rounding = STEPS * torch.finfo(parameter.dtype).eps * end[key].norm() + 1e-9
        assert error <= 1e-4 * way + rounding, f"{key}: off by {error:.1e} on a way of {way:.1e}"
    still = {key for key in start if torch.equal(start[key], end[key]) and end[key].requires_grad}
    # the choice of one expert has a weight of 1, whatever the router says
    assert all("router" in key for key in still), still
