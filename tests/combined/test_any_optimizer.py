"""Optimizers that know nothing of preamp train 16-bit weights as float32 ones: they step masters."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp.errors import SessionError
from preamp.zoo import TASKS

from ..session.toys import same, squares

FLIGHTS = TASKS["flights"]
CLOSE, NEAR = 0.004, 0.01
"""How near O5 has to come to O0, in loss and in AUC, which seeds change by 0.003 to 0.01."""


def hidden(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers")]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if all(p is not each for each in hidden(model))]


def torch_muon(model: nn.Module) -> Any:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    return [torch.optim.Muon(hidden(model), 0.02), torch.optim.AdamW(others(model), 1e-3)]


def of(package: str, name: str, lr: float, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        module: Any = pytest.importorskip(package)
        given = model.named_parameters() if package == "adam_mini" else model.parameters()
        with contextlib.redirect_stdout(io.StringIO()):  # adam_mini names every parameter
            return getattr(module, name)(given, lr=lr, **options)

    return make


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch Muon": torch_muon,
    "preamp Muon": lambda model: [
        preamp.optim.Muon(hidden(model), 0.02, master="split"),
        preamp.optim.AdamW(others(model), 1e-3, master="split"),
    ],
    "preamp Lion": lambda model: preamp.optim.Lion(model.parameters(), 1e-4, master="split"),
    "preamp Lion, by chance": lambda model: preamp.optim.Lion(
        model.parameters(), 1e-4, master=None, rounding="stochastic"
    ),
    "lion-pytorch": of("lion_pytorch", "Lion", 1e-4),
    "schedulefree": of("schedulefree", "AdamWScheduleFree", 1e-3),
    "torch Adafactor": of("torch.optim", "Adafactor", 1e-3),
    "Adam-mini": of("adam_mini", "Adam_mini", 1e-3),
    "optimi AdamW": of("optimi", "AdamW", 1e-3, triton=False),
    "SOAP": of("pytorch_optimizer", "SOAP", 1e-3),
    "Prodigy": of("pytorch_optimizer", "Prodigy", 1.0),
}
SLOW = ("torch Muon",)
EACH = pytest.mark.parametrize(
    "name", [n if n not in SLOW else pytest.param(n, marks=pytest.mark.slow) for n in MAKERS]
)


def switch(optimizers: list[Optimizer], to: str) -> None:
    for optimizer in optimizers:
        getattr(optimizer, to, lambda: None)()


def trained(name: str, level: str, steps: int, size: int) -> tuple[float, float]:
    """(loss of the last tenth of the steps, AUC on flights that it has not seen)."""
    torch.manual_seed(0)
    model = FLIGHTS.build("ci", seed=0)
    made = MAKERS[name](model)
    optimizers: list[Optimizer] = made if isinstance(made, list) else [made]
    losses = []
    policy = f"{level},masters=no" if "by chance" in name else level
    with preamp.prepare(model, made, policy=policy) as session:
        switch(optimizers, "train")
        for inputs, late in FLIGHTS.batches("ci", seed=0, steps=steps, batch_size=size):
            with session.autocast():
                loss = FLIGHTS.loss(model(*inputs), late)
            session.backward(loss)
            session.clip_grad_norm_(1.0)
            assert not session.step().skipped
            session.zero_grad()
            losses.append(loss.item())
        switch(optimizers, "eval")
    model.eval()
    last = losses[-steps // 10 :]
    return sum(last) / len(last), FLIGHTS.evaluate(model, "ci", device=torch.device("cpu"))


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(
    ("steps", "size"), [(40, 256), pytest.param(400, 2048, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_o5_ends_where_o0_does(name: str, steps: int, size: int) -> None:
    (loss, auc), (wanted, best) = (trained(name, level, steps, size) for level in ("O5", "O0"))
    assert abs(loss - wanted) <= CLOSE and abs(auc - best) <= NEAR


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def step(session: Any, model: nn.Module, number: int) -> float:
    torch.manual_seed(number)
    loss = squares(session, model, torch.randn(16, 6))
    session.step()
    session.zero_grad()
    return loss.item()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_schedule_free_exchanges_masters(level: str) -> None:
    """`eval()` puts averaged weights into the model, `train()` takes them out: both in float32, whenever called."""
    schedulefree: Any = pytest.importorskip("schedulefree")
    model = small()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    methods = {name: getattr(optimizer, name).__func__ for name in ("train", "eval")}
    session = preamp.prepare(model, optimizer, level=level)
    optimizer.train()
    for number in range(5):
        step(session, model, number)
    now = weights(session, model)
    low = [p.dtype for p in model.parameters()]
    optimizer.eval()
    averaged = weights(session, model)
    assert all(not torch.equal(a, b) for a, b in zip(now, averaged, strict=True))
    assert [p.dtype for p in model.parameters()] == low
    with session.autocast():
        inside = model(torch.ones(1, 6)).float()
    optimizer.train()
    back = weights(session, model)
    for a, b in zip(back, now, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # it computes them back
    step(session, model, 9)
    with session.full_precision():
        optimizer.eval(), optimizer.train()
    optimizer.eval()
    session.close()
    assert {name: getattr(optimizer, name).__func__ for name in methods} == methods
    assert "eval" not in vars(optimizer) and "train" not in vars(optimizer)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    for p, mean in zip(model.parameters(), averaged, strict=True):
        assert not torch.equal(p, mean)  # one step more
    assert inside.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*rounds to the nearest")
@pytest.mark.parametrize("level", ["O3", "O5,masters=no"])
def test_schedule_free_without_masters(level: str) -> None:
    """Its states are 16-bit then, as the parameters are, which float32 parameters would not fit."""
    schedulefree: Any = pytest.importorskip("schedulefree")
    model = small()
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.05)
    session = preamp.prepare(model, optimizer, level=level)
    optimizer.train()
    step(session, model, 0)
    now = [p.detach().clone() for p in model.parameters()]
    optimizer.eval(), optimizer.train()
    for p, q in zip(model.parameters(), now, strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.01)
    with session.full_precision(), pytest.raises(SessionError, match="call it outside"):
        optimizer.eval()
    session.close()
    assert not {"train", "eval"} & set(vars(optimizer))


class Switched(torch.optim.SGD):
    """An optimizer whose `train` and `eval` are no methods."""

    train = property(lambda self: True)
    eval = property(lambda self: False)


def test_attributes_that_are_called_train_and_eval() -> None:
    model = small()
    optimizer = Switched(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O5") as session:
        step(session, model, 0)
        assert optimizer.train and not optimizer.eval
    assert not optimizer._optimizer_step_pre_hooks


def test_a_mode_that_it_has_already_exchanges_nothing() -> None:
    """Trainers call `train()` before each step; gradients of that step are not put aside, nor masters swapped."""
    schedulefree: Any = pytest.importorskip("schedulefree")
    model = small()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    with preamp.prepare(model, optimizer, level="O5") as session:
        optimizer.train()
        step(session, model, 0)
        before = [p.data_ptr() for p in model.parameters()]
        session.backward(model(torch.ones(1, 6)).float().sum())
        optimizer.train()
        assert [p.data_ptr() for p in model.parameters()] == before
        assert all(p.grad is not None for p in model.parameters())
        assert not session.step().skipped


def weights(session: Any, model: nn.Module) -> list[Tensor]:
    with session.full_precision(values_only=True):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["lion-pytorch", "schedulefree", "Adam-mini", "optimi AdamW", "SOAP"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    saved: list[Any] = []
    ends = []
    for _ in range(2):
        model = small()
        optimizer = MAKERS[name](model)
        with preamp.prepare(model, optimizer, level="O5") as session:
            switch([optimizer], "train")
            parts = model, optimizer, session
            for part, state in zip(parts, saved, strict=False):
                part.load_state_dict(state)
            if not saved:
                for number in range(4):
                    step(session, model, number)
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
            losses = [step(session, model, number) for number in range(4, 8)]
        ends.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])
