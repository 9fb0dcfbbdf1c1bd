"""Scripts as tutorials and posts print them, with a network of the zoo for torchvision's: they run as they stand."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest
from torch import nn

from preamp.zoo import TASKS

pytestmark = pytest.mark.usefixtures("installed_as_apex")


def network() -> nn.Module:
    """In the place of torchvision.models.resnet18."""
    return TASKS["seresnext"].build("ci", seed=0)


def loader() -> list[Any]:
    return [(x[0], y) for x, y in TASKS["seresnext"].batches("ci", seed=0, steps=3, batch_size=4)]


def run(script: str) -> dict[str, Any]:
    space: dict[str, Any] = {"network": network, "dataloader": loader(), "math": math}
    exec(compile(textwrap.dedent(script), "script.py", "exec"), space)
    return space


LOOP = """
    import torch
    import torch.nn as nn
    import torch.optim as optim
    from apex import amp

    # Check if GPU is available
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # Define model, loss, and optimizer
    model = network().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    # Initialize mixed precision with Apex
    model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")

    # Example training loop
    for epoch in range(2):
        for inputs, labels in dataloader:  # Assume `dataloader` is defined
            inputs, labels = inputs.to(device), labels.to(device)

            # Forward pass
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            if epoch == 0 and inputs is dataloader[0][0]:
                first = float(loss.detach())

            # Backward pass
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

            # Update weights
            optimizer.step()
"""


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_loop(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    space = run(LOOP.format(level=level))
    assert math.isfinite(float(space["loss"].detach()))
    assert f"Selected optimization level {level}" in capsys.readouterr().out


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_and_validation_in_fp32(level: str) -> None:
    space = run(LOOP.format(level=level).replace("# Update weights\n", (
        "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)\n"
    )) + """
    model.float()
    model.eval()
    with torch.no_grad(), amp.disable_casts():
        outputs = model.forward(dataloader[0][0])
    """)  # fmt: skip
    assert space["outputs"].isfinite().all()
