"""PA202 as measured: against a step in float32 that the test computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.doctor.findings.pa202 import PA202
from preamp.doctor.measure import spread_of
from preamp.doctor.shadow.facts import GradientSpread, GradientsRead

from ..sick.expect import HERE, doctor


class Kept:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, facts: Any) -> None:
        if kind == "underflow":
            self.rows += facts["rows"]


def step(scale: float, *, region_inside: bool = False, dropout: float = 0.0) -> tuple[list[dict[str, Any]], Any, Any]:
    """One step at a scale; the doctor's rows, its findings, and the gradients in float32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
            self.drop = nn.Dropout(dropout)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            with torch.autocast("cpu", dtype=torch.float16, enabled=region_inside or torch.is_autocast_enabled("cpu")):
                return self.last(self.drop(torch.relu(self.first(x))))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 16)
    optimizer = torch.optim.Adam(model.parameters())
    scaler, kept = torch.amp.GradScaler("cpu", init_scale=scale), Kept()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with preamp.doctor.watch(model, sinks=[kept]) as w:
        with torch.autocast("cpu", dtype=torch.float16, enabled=not region_inside):
            loss = 1e-5 * model(x).float().square().mean()
        before = torch.get_rng_state()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert model.calls == 1, "the second call left no trace"
        assert torch.equal(torch.get_rng_state(), before)
    twin = Net()
    twin.load_state_dict(state)
    (1e-5 * twin.last(torch.relu(twin.first(x))).square().mean()).backward()
    return kept.rows, w.findings, {name: p.grad for name, p in twin.named_parameters()}


@pytest.mark.parametrize("region_inside", [False, True])
def test_what_is_lost_is_what_float32_has(region_inside: bool) -> None:
    rows, findings, exact = step(1.0, region_inside=region_inside)
    by_name = {row["name"]: row for row in rows}
    assert set(by_name) == {"first.weight", "first.bias", "last.weight"}, (
        "of the eight values of last.bias none is told"
    )
    for name, row in by_name.items():
        full = exact[name]
        some = full != 0
        without = ((full.abs() <= 2.0**-25) & some).sum() / some.sum()
        assert row["without_scale"] == pytest.approx(float(without), abs=0.02)
    assert by_name["first.weight"]["lost"] > 0.25
    found = [f for f in findings if f.code == "PA202"]
    assert {f.module for f in found} >= {"first"}
    assert all("float32" in f.message for f in found)


def test_what_float32_makes_zero_is_not_lost_by_float16() -> None:
    """Shadows are float64, and hold it."""
    kinds: list[str] = []

    class Kinds:
        def write(self, kind: str, facts: Any) -> None:
            kinds.append(kind)

    torch.manual_seed(0)
    model = nn.Linear(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.doctor.watch(model, sinks=[Kinds()]) as w:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-60 * model(torch.randn(32, 16)).float().square().mean()
        loss.backward()
        optimizer.step()
    assert "failed" not in kinds and "PA202" not in {finding.code for finding in w.findings}


def test_a_scale_from_the_cure_cures() -> None:
    _, findings, _ = step(1.0)
    fix = next(f.fix for f in findings if f.code == "PA202")
    scale = eval(fix.partition("init_scale=")[2].rstrip(")"))
    rows, findings, _ = step(scale)
    assert not [f for f in findings if f.code == "PA202"]
    assert max(row["lost"] for row in rows) < 0.02
    assert max(row["relative"] for row in rows) < 0.02


@pytest.mark.parametrize("how", ["divided", "added"])
def test_a_share_or_a_sum_of_scaled_losses_is_scaled(how: str) -> None:
    """An overflow that the scale alone brings about is none of the script's, and the scale is not missing."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with preamp.doctor.watch(model) as w:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(32, 16))
            a, b = (scaler.scale(each) for each in (out.float().square().mean(), out.float().abs().mean()))
            (a / 4 if how == "divided" else a + 0.5 * b).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**24 and [one for one in w.findings if one.severity != "info"] == []


def test_a_scale_that_the_run_has_had_is_no_cure() -> None:
    tiny = spread_of(torch.full((32,), 1e-9))
    rows = [GradientSpread("m", "m.weight", tiny, False, 1.0, 1.0)]

    def fix(*scales: float) -> str:
        (finding,) = PA202().read(GradientsRead(rows, *scales))
        return str(finding.fix)

    assert fix(8.0, 1024.0).startswith("scaler = torch.amp.GradScaler(init_scale=2.0**")
    for scale, highest in ((8.0, 2.0**50), (2.0**50, 2.0**50)):
        assert "init_scale" not in fix(scale, highest) and "train in bfloat16" in fix(scale, highest)


def test_a_step_that_draws_is_done_again_with_the_same_draws() -> None:
    rows, findings, _ = step(2.0**16, dropout=0.5)
    assert not [f for f in findings if f.code == "PA202"]
    assert max(row["relative"] for row in rows) < 0.02


def test_a_float32_loss_after_one_in_float16_hides_nothing() -> None:
    torch.manual_seed(0)
    small, other, kept = nn.Linear(16, 16), nn.Linear(4, 4), Kept()
    with preamp.doctor.watch([small, other], sinks=[kept]):
        optimizer = torch.optim.SGD([*small.parameters(), *other.parameters()], lr=0.1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-6 * small(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        other(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
    assert {row["name"] for row in kept.rows if row["lost"] > 0.25} == {"weight", "bias"}


def test_a_step_past_the_scaler_is_recorded_with_the_scale_on_its_gradients() -> None:
    class Samples:
        scales: tuple[float, ...] = ()

        def write(self, kind: str, facts: Any) -> None:
            self.scales += (facts["scale"],) if kind == "telemetry" else ()

    torch.manual_seed(0)
    model, kept = nn.Linear(16, 4), Samples()
    with preamp.doctor.watch(model, sinks=[kept]) as w:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(model(torch.randn(8, 16)).square().mean()).backward()
        optimizer.step()
    assert kept.scales == (256.0,)
    assert [f.code for f in w.findings if f.severity == "error"] == ["PA107"]


def test_the_scale_of_apex_is_followed_down_where_the_loss_is_nan(tmp_path: Path) -> None:
    report, _ = doctor(HERE / "scripts" / "apex_scale_collapse.py", tmp_path / "out")
    (found,) = [one for one in report["findings"] if one["code"] == "PA203"]
    assert found["severity"] == "error" and found["evidence"]["last scale"] < 1


def test_what_a_hidden_infinity_has_made_zero_is_no_underflow(tmp_path: Path) -> None:
    report, _ = doctor(HERE / "scripts" / "rms_norm_beside_an_empty_row.py", tmp_path / "out")
    assert [one["code"] for one in report["findings"]] == ["PA201"]
