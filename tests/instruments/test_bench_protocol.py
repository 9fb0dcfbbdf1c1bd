"""What makes the bench's comparisons fair: contenders that do the same work, and counts that are not silence."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preamp.bench import _counting
from preamp.bench._counting import SilentProfiler, counted_launches, launches
from preamp.bench.training import Work, _optimizer
from preamp.bench.training._by_hand import Graphed
from preamp.bench.training._contenders import BF16, EAGER, REFERENCE, Contender, Trainer
from preamp.bench.training._optimizer import RIVALS, Rival, _makers, _Problem, installed, optimizer_row, speeds
from preamp.scaling import DynamicScale

CPU = torch.device("cpu")
SHAPES: list[tuple[int, ...]] = [(6, 10)] * 3


# -- kernels are counted, or it is said that they cannot be


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Has torch's profiler report so many kernels more than those of `launches` itself; None: nothing at all."""

    def report(kernels: int | None) -> None:
        kind = torch.profiler.DeviceType
        seen = [] if kernels is None else [SimpleNamespace(device_type=kind.CUDA)] * (2 + kernels)
        found = SimpleNamespace(events=lambda: [*seen, SimpleNamespace(device_type=kind.CPU)])

        class Profile:
            def __init__(self, **_: Any) -> None: ...

            def __enter__(self) -> Any:
                return found

            def __exit__(self, *_: Any) -> None: ...

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.profiler, "profile", Profile)
        monkeypatch.setattr(
            _counting, "torch", SimpleNamespace(**{**vars(torch), "zeros": lambda *a, **k: Tensor([0])})
        )

    return report


@pytest.mark.parametrize("kernels", [0, 1, 700])
def test_a_profiler_that_speaks_is_believed(profiler: Callable[[int | None], None], kernels: int) -> None:
    profiler(kernels)
    assert launches(lambda: None) == kernels


def test_a_silent_profiler_is_no_count_of_zero(profiler: Callable[[int | None], None]) -> None:
    profiler(None)
    with pytest.raises(SilentProfiler, match="saw 0 kernels where two additions alone are two"):
        launches(lambda: None)
    found = counted_launches(lambda: None)
    assert found["launches"] is None and "CUPTI" in str(found["not counted"])


def test_without_a_gpu_nothing_is_counted() -> None:
    assert counted_launches(lambda: None) == {"launches": None}


# -- the optimizer alone


def test_every_scale_is_dynamic_and_no_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.amp.GradScaler] = []
    real = torch.amp.GradScaler

    def scaler(*given: Any, **more: Any) -> torch.amp.GradScaler:
        made.append(real(*given, **more))
        return made[-1]

    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    problem = _Problem(SHAPES, CPU, clip=1.0)
    makers = _makers(problem)
    try:
        for make in makers.values():
            step = make()
            for _ in range(4):
                step()
        enabled = [each for each in made if each.is_enabled()]
        assert len(enabled) == 3  # fused, foreach, captured; bfloat16 needs none
        for each in enabled:  # four steps towards the next growth: none was skipped
            assert each.get_scale() == 1 and each._get_growth_tracker() == 4
            assert each.get_growth_interval() == DynamicScale().growth_interval
        assert len(problem.sessions) == 4
        for session in problem.sessions:
            report = session.last_step
            assert session.steps == 4 and report is not None and not report.skipped and report.scale == 1
        ours = [s.state_dict() for s in problem.sessions[:2]]
        assert all("growth" in str(state) for state in ours)  # a dynamic scale's state
    finally:
        for session in problem.sessions:
            session.close()


def test_copies_are_timed_on_memory_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Tensor] = []

    def median(work: Any, device: torch.device) -> float:
        timed.extend(cell.cell_contents for cell in work.__closure__)
        return 1.0

    monkeypatch.setattr(_optimizer, "_median", median)
    speeds(CPU, "tiny")
    source = next(t for t in timed if t.dtype is torch.float32 and t.any())
    assert source.unique().numel() > source.numel() // 2  # random: nothing that memory could compress


class FakeAdam(torch.optim.Adam):
    """Takes what another library's optimizer takes."""

    made: list[dict[str, Any]]

    def __init__(self, params: Any, lr: float, **more: Any) -> None:
        FakeAdam.made.append(more)
        self._step_supports_amp_scaling = "master_weights" in more  # 16-bit gradients are left to it, scaled
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        if self._step_supports_amp_scaling:
            assert grad_scaler is not None
            grad_scaler._check_inf_per_device(self)  # of the 16-bit gradients, as Apex's does


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.package)
def test_a_rival_that_is_installed_is_a_contender(rival: Rival, monkeypatch: pytest.MonkeyPatch) -> None:
    real, FakeAdam.made = importlib.metadata.version, []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1" if name == rival.package else real(name))
    for name in (rival.package, rival.module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[rival.module], rival.kind, FakeAdam, raising=False)
    row = optimizer_row("8 x 60", CPU, 3, None)
    found = {each["name"]: each for each in row.contenders}
    assert FakeAdam.made == [rival.arguments]
    assert found[rival.name].get("error") is None and len(found[rival.name]["seconds"]) == 3
    clipped = optimizer_row("8 x 60", CPU, 3, None, clip=1.0)
    assert (rival.name in {each["name"] for each in clipped.contenders}) != rival.masters


def test_what_is_not_installed_is_none() -> None:
    assert {rival.package for rival in installed()} <= {d.metadata["Name"] for d in importlib.metadata.distributions()}


# -- whole steps


def toy(clip: float | None = None) -> Work:
    def batch(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3, 8, 8, generator=generator)
        return x, x.mean((1, 2, 3))[:, None]

    def build() -> nn.Module:
        flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1))
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *flat)

    return Work(
        name="toy", what="", build=build, batch=batch, loss=lambda out, y: F.mse_loss(out.float(), y), count=8,
        optimizer="AdamW", lr=1e-2, clip=clip, images=True,
    )  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.1])
def test_masters_by_hand_train_as_torch_amp_does(clip: float | None) -> None:
    by_hand = next(contender for contender in EAGER if contender.by_hand)
    losses: dict[str, list[float]] = {}
    for contender in (Contender(name="fp32"), REFERENCE, by_hand):
        trainer = Trainer(contender, toy(clip), CPU)
        losses[contender.name] = [float(trainer.step()) for _ in range(30)]
        if contender.by_hand:
            dtypes = {name: p.dtype for name, p in trainer._model.named_parameters()}
            assert dtypes["0.weight"] is torch.float16 and dtypes["1.weight"] is torch.float32
            assert all(p.grad is None for p in trainer._model.parameters())
        trainer.close()
    full = losses["fp32"]
    assert full[-1] < 0.5 * full[0]
    for name in (REFERENCE.name, by_hand.name):
        assert losses[name][-1] == pytest.approx(full[-1], rel=0.1, abs=1e-3), name


def test_captured_torch_has_capturable_fused_states() -> None:
    captured = next(c for c in EAGER if c.captured and not c.ours)
    trainer = Trainer(captured, toy(), CPU)
    (group,) = trainer._optimizer.param_groups
    assert group["capturable"] and group["fused"] and isinstance(trainer.train, Graphed)
    assert isinstance(trainer.step(), Tensor)
    trainer.close()


def test_modes_go_to_inductor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def compiling(model: Any, *, backend: str, dynamic: bool, mode: str | None) -> Any:
        asked.append((backend, mode))
        return model

    monkeypatch.setattr(torch, "compile", compiling)
    reduced = Contender(name="x", dtype=BF16, compiled=True, mode="reduce-overhead")
    for backend in ("inductor", "eager"):
        Trainer(reduced, toy(), CPU, backend=backend).close()
    assert asked == [("inductor", "reduce-overhead"), ("eager", None)]
