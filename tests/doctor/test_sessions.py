"""What `watch` says of loops around a session: steps past it, losses past it, regions that are not its own."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import PreampWarning, SessionError
from preamp.report import Finding

Made = tuple[nn.Module, Any, preamp.Session, Callable[[], Tensor]]


def prepared(level: str, kind: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Made:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(64, 8)
    optimizer = kind(model.parameters(), lr=0.01, eps=1e-4)
    session = preamp.prepare(model, optimizer, level=level, **options)
    return model, optimizer, session, lambda: F.mse_loss(model(x).float(), x.sum(1, keepdim=True).expand(64, 8))


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = (first + number for number, line in enumerate(lines) if text in line and "line_of" not in line)
    return found


def told(findings: tuple[Finding, ...], code: str) -> list[Finding]:
    return [one for one in findings if one.code == code]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_raw_loop_where_masters_exist(level: str, fused: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=fused)
    with preamp.prepare(model, optimizer, level=level) as session, preamp.doctor.watch(session) as seen:
        model(x).float().square().mean().backward()
        with pytest.raises(SessionError):
            optimizer.step()  # here
    found = [one for one in told(seen.findings, "PA107") if one.severity == "error"]
    assert [one.line for one in found] == [line_of(test_a_raw_loop_where_masters_exist, "# here")]
    assert "session.backward(loss)" in str(found[0].fix) and "session.step()" in str(found[0].fix)
    assert not told(seen.findings, "PA111"), "the session has masters, and has refused the step"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_raw_step_of_scaled_gradients_also_where_its_error_is_caught(level: str) -> None:
    _, optimizer, session, loss_now = prepared(level)
    with preamp.doctor.watch(session) as seen:
        for _ in range(3):
            with session.autocast():
                loss = loss_now()
            session.backward(loss)
            try:
                optimizer.step()  # here
            except RuntimeError:
                session.zero_grad()
    session.close()
    line = line_of(test_a_raw_step_of_scaled_gradients_also_where_its_error_is_caught, "# here")
    assert [(one.line, one.severity) for one in told(seen.findings, "PA107")] == [(line, "error")]


@pytest.mark.parametrize("mixed", [False, True])
def test_float16_backward_past_the_session_has_no_loss_scale(mixed: bool) -> None:
    _, optimizer, session, loss_now = prepared("O2", preamp.optim.AdamW)
    with preamp.doctor.watch(session) as seen:
        for _ in range(2):
            loss = loss_now()
            if mixed:
                session.backward(loss)
                session.step()
                session.zero_grad()
                loss = loss_now()
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    (found,) = told(seen.findings, "PA107")
    assert found.line == line_of(test_float16_backward_past_the_session_has_no_loss_scale, "# here")
    assert str(found.fix).startswith("session.backward(loss)")
    assert not told(seen.findings, "PA111"), "preamp.optim steps the session's masters"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_losses_with_scales_of_their_own_are_scaled(level: str) -> None:
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4) for model in models]
    x = torch.randn(64, 8)
    with (
        preamp.prepare(models, optimizers, level=level, losses=["g", "d"]) as session,
        preamp.doctor.watch(session) as seen,
    ):
        for _ in range(2):
            for name, model in zip(("g", "d"), models, strict=True):
                with session.autocast():
                    loss = model(x).float().square().mean()
                session.backward(loss, name=name)
            session.step()
            session.zero_grad()
    assert not seen.findings


@pytest.mark.parametrize(("level", "wanted", "foreign"), [
    ("O1", "fp16", torch.bfloat16), ("O2", "fp16", torch.bfloat16), ("O3", "fp16", torch.bfloat16),
    ("O4", "bf16", torch.float16), ("O5", "bf16", torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_a_region_that_is_not_the_sessions(level: str, wanted: str, foreign: torch.dtype, inside: bool) -> None:
    model, _, session, loss_now = prepared(level)
    with warnings.catch_warnings(), preamp.doctor.watch(session) as seen:
        warnings.simplefilter("ignore")
        if inside:  # as Accelerate does it: whatever region is around the model's call, this one is within
            model.forward = torch.autocast("cpu", foreign)(model.forward)  # type: ignore[method-assign]  # here
        with session.autocast() if inside else torch.autocast("cpu", foreign):  # there
            loss = loss_now()
        session.backward(loss)
        session.step()
    session.close()
    (found,) = told(seen.findings, "PA109")
    assert found.evidence == {"prepared for": wanted, "observed": "bf16" if wanted == "fp16" else "fp16"}
    assert found.line == line_of(test_a_region_that_is_not_the_sessions, "# here" if inside else "# there")
    assert str(found.fix).startswith("with session.autocast():  # in place of torch.autocast(...)")
    assert found.severity == ("error" if foreign is torch.float16 else "warning")
    for other in told(seen.findings, "PA107"):
        assert str(other.fix).startswith("with session.autocast():") is (wanted == "bf16")


def test_a_region_that_a_framework_has_made_is_switched_off_there() -> None:
    _, _, session, loss_now = prepared("O4")
    made = {"__file__": "framework.py"}
    exec(
        compile("import torch\ndef region(): return torch.autocast('cpu', torch.float16)", "framework.py", "exec"), made
    )
    with preamp.doctor.watch(session) as seen:
        with made["region"]():  # type: ignore[operator]
            loss = loss_now()
        with pytest.warns(PreampWarning, match="in fp16, in another region"):
            session.backward(loss)
        session.step()
    session.close()
    (found,) = told(seen.findings, "PA109")
    assert "switch the framework's own mixed precision off" in str(found.fix)


def test_a_session_without_a_scale_has_none_that_could_grow() -> None:
    """Behind a scaler, too: steps that it skips are no fall of a scale."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O4") as session, preamp.doctor.watch(model) as watch:
        scaler = preamp.SessionScaler(session)
        for step in range(12):
            optimizer.zero_grad()
            with session.autocast():
                loss = model(torch.randn(4, 8)).float().square().mean()
            scaler.scale(loss * (math.inf if step > 5 else 1)).backward()
            scaler.step(optimizer)
    assert "PA203" not in {finding.code for finding in watch.report().findings}


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_region_of_another_model_is_its_own(level: str) -> None:
    model, _, session, loss_now = prepared(level)
    other, x = nn.Linear(8, 8), torch.randn(4, 8)
    dtype = torch.bfloat16 if level in ("O1", "O2") else torch.float16
    with preamp.doctor.watch({"own": model, "other": other}) as seen:
        seen._watch.scales.sessions.add(session)
        with session.autocast():
            loss = loss_now()
        with torch.autocast("cpu", dtype):
            loss = loss + other(x).float().mean()
        session.backward(loss)
        session.step()
    session.close()
    assert not told(seen.findings, "PA109")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_session_behind_a_scaler_that_nobody_updates_is_healthy(level: str) -> None:
    """HF Trainer's loop has no update of its own: the session updates its scale in its step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level) as session, preamp.doctor.watch(model) as watch:
        scaler = preamp.SessionScaler(session)
        for _ in range(6):
            optimizer.zero_grad()
            with session.autocast():
                loss = model(torch.randn(4, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # from here to the step the parameters hold masters
            scaler.step(optimizer)
    report = watch.report()
    assert [finding for finding in report.findings if finding.severity != "info"] == []
    assert f"({'float16' if level == 'O2' else 'bfloat16'} parameters" in report.verdict


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_that_is_called_outside_of_the_session_s_region_is_found(inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O4") as session, preamp.doctor.watch(model) as watch:
        for _ in range(3):
            with session.autocast() if inside else contextlib.nullcontext():
                loss = model(torch.randn(4, 8)).square().mean()
            told = inside or session.steps
            with contextlib.nullcontext() if told else pytest.warns(PreampWarning, match="in fp32, in no region"):
                session.backward(loss)
            session.step()
            session.zero_grad()
    found = [finding for finding in watch.report().findings if finding.code == "PA109"]
    assert [finding.severity for finding in found] == ([] if inside else ["warning"])
    assert inside or "outside of session.autocast()" in found[0].message


def _ways(session: preamp.Session) -> dict[str, Callable[[torch.Tensor], None]]:
    """To go back from a loss: the session leaves it and starts from the scale, or multiplies it."""
    return {
        "backward": session.backward,
        "half": lambda loss: session.backward(loss.half()),
        "gradient": lambda loss: session.backward(loss, gradient=torch.ones(())),
        "scale": lambda loss: session.scale(loss).backward(),
        "scaler": lambda loss: preamp.SessionScaler(session).scale(loss).backward(),
    }


@pytest.mark.parametrize("way", ["backward", "half", "gradient", "scale", "scaler"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_losses_are_shown_as_the_script_has_them(level: str, way: str) -> None:
    _, _, session, loss_now = prepared(level, scale=1024.0)
    losses = []
    with preamp.doctor.watch(session) as seen:
        for _ in range(3):
            with session.autocast():
                loss = loss_now()
            losses.append(loss.item())
            _ways(session)[way](loss)
            session.step()
            session.zero_grad()
    session.close()
    shown = [step["loss"] for step in seen.report().data["processes"][0]["steps"]]
    assert shown == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("way", ["backward", "scale"])
def test_an_overflow_of_the_scale_is_known_for_one(way: str) -> None:
    """The first steps of a scale that begins too high are no finding, and told as what they are."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(64, 8)
    with preamp.prepare(model, optimizer, level="O1", scale=2.0**30) as session, preamp.doctor.watch(session) as seen:
        for _ in range(2):
            with session.autocast():
                loss = model(x).float().square().sum()
            _ways(session)[way](loss)
            assert session.step().skipped
            session.zero_grad()
    (process,) = seen.report().data["processes"]
    assert [(one["step"], one["scale"]) for one in process["overflows"]] == [(0, 2.0**30), (1, 2.0**30)]
    assert not told(seen.findings, "PA201")


def test_what_float16_lost_is_measured_alike_however_the_scale_came() -> None:
    found = {}
    for way in ("backward", "scale"):
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64), torch.randn(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with preamp.prepare(model, optimizer, level="O1", scale=2.0) as session, preamp.doctor.watch(session) as seen:
            for _ in range(3):
                with session.autocast():
                    loss = 1e-6 * model(x).float().square().mean()
                _ways(session)[way](loss)
                session.step()
                session.zero_grad()
        found[way] = [(one.message, one.evidence) for one in told(seen.findings, "PA202")]
    assert found["backward"] == found["scale"] and found["scale"]


@pytest.mark.filterwarnings("ignore:gradients were changed")
def test_a_scaler_that_a_session_has_replaced_and_clipping_past_the_session() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with preamp.prepare(model, optimizer, level="O2") as session, preamp.doctor.watch(model) as watch:
        torch.amp.GradScaler("cpu")  # left over
        for _ in range(4):
            with session.autocast():
                loss = model(torch.randn(16, 16)).float().square().mean()
            session.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            session.step()
            session.zero_grad()
        report = watch.report()
    assert [one.code for one in report.findings if one.severity != "info"] == ["PA106"], "scaled ones are large"
