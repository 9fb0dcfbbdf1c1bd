"""What the logger "preamp" is told: skipped steps, long rows of them, and collapses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F

import preamp
from preamp.errors import ScaleCollapse

from .toys import batch, mlp


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="preamp"):
        yield


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "preamp" and record.levelno == level]


def train(session: preamp.Session, bad: Sequence[bool]) -> None:
    (model,) = session.models.values()
    for index, overflows in enumerate(bad):
        x, y = batch(index)
        with session.autocast():
            loss = F.cross_entropy(model(x), y)
        session.backward(loss * float("inf") if overflows else loss)
        session.step()
        session.zero_grad()


def prepared(level: str = "O4", **options: object) -> preamp.Session:
    model = mlp()
    return preamp.prepare(model, torch.optim.AdamW(model.parameters()), level=level, **options)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_skip_is_told_with_its_step(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with prepared(level) as session:
        train(session, [False, True, False, True])
    assert told(caplog, logging.INFO) == [f"step {n} was skipped: a gradient is not finite" for n in (1, 3)]
    assert not told(caplog, logging.WARNING)


def test_a_long_row_is_a_warning_and_so_is_the_collapse(caplog: pytest.LogCaptureFixture) -> None:
    with prepared(scale=preamp.DynamicScale(2.0**20, patience=25)) as session:
        with pytest.raises(ScaleCollapse) as raised:
            train(session, [True] * 30)
        at_10, at_20, collapse = told(caplog, logging.WARNING)
    assert (
        at_10
        == "10 steps in a row were skipped, and the scale of loss 'loss' stands at 1024: 25 end it by ScaleCollapse"
    )
    assert at_20.startswith("20 steps in a row") and collapse == str(raised.value)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_row_at_a_level_without_a_scale_says_nothing_of_one(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with prepared(level) as session, pytest.raises(ScaleCollapse, match=r"skipped steps in a row.*0\.weight"):
        train(session, [True] * 110)
    first = told(caplog, logging.WARNING)[0]
    assert first.startswith("10 steps in a row were skipped") and "scale" not in first.replace("ScaleCollapse", "")


def test_a_step_that_is_taken_ends_the_row(caplog: pytest.LogCaptureFixture) -> None:
    with prepared(scale=preamp.DynamicScale(2.0**20, patience=None)) as session:
        train(session, ([True] * 9 + [False]) * 2 + ([True] * 10 + [False]) * 2)
    assert [text[:19] for text in told(caplog, logging.WARNING)] == ["10 steps in a row w"] * 2


def test_what_only_the_device_knows_comes_when_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with preamp.prepare(model, optimizer, level="O4", scale="dynamic", skip="device") as session:
        train(session, [False, True, True, False])
    assert told(caplog, logging.INFO) == ["1 of the last 1 steps were skipped: a gradient was not finite"] * 2


def test_a_scaler_tells_it_too(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = preamp.GradScaler("cpu", patience=12)
    for index in range(14):
        scaler.scale(weight.sum() * (1.0 if index == 1 else float("inf"))).backward()
        scaler.step(optimizer)
        if index == 13:
            with pytest.raises(ScaleCollapse) as raised:
                scaler.update()
        else:
            scaler.update()
        optimizer.zero_grad()
    info, (row, collapse) = told(caplog, logging.INFO), told(caplog, logging.WARNING)
    assert info[0] == "step 0 was skipped: a gradient is not finite" and len(info) == 13
    assert row.startswith("10 steps in a row were skipped, and the scale of loss 'loss' stands at ")
    assert collapse == str(raised.value)


def test_an_application_without_logging_sees_nothing() -> None:
    logger = logging.getLogger("preamp")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers) and logger.propagate
