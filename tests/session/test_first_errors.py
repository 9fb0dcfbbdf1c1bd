"""What is said about the mistakes of the first hour: what was seen, why it hurts, what to write instead.

A loop that forgets `session.autocast()` is told at its first loss; others hear nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.errors import PolicyError, PreampWarning, SessionError

from ..releases import TORCH
from .toys import batch, mlp

Loss = Callable[["preamp.Session", nn.Module, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """A function of the user's, whose backward nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def in_region(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with session.autocast():
        return model(x).float().square().mean()


def in_torchs(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", session.policy.compute):
        return model(x).float().square().mean()


def in_ours(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with preamp.autocast("cpu", session.policy.compute):
        return model(x).float().square().mean()


def checkpointed(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()


def own_function(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return Doubled.apply(model(x)).square().mean()


def without_products(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def compiled(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        with session.autocast():
            return model(x).float().square().mean()

    return torch.compile(forward, backend="aot_eager")(x)


def outside(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(level: str, loss: Loss, steps: int = 3) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", PreampWarning)
        with preamp.prepare(model, optimizer, level=level) as session:
            for _ in range(steps):
                session.backward(loss(session, model, torch.randn(8, 4)))
                session.step()
                session.zero_grad()
    told = [each for each in found if each.category is PreampWarning]
    assert TORCH < (2, 8) or all(each.filename == __file__ for each in told)  # before: a frame too near
    return [str(each.message) for each in told]


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O4", "bf16")])
def test_a_forgotten_region_is_told_once_where_the_loss_is(level: str, dtype: str) -> None:
    (told,) = trained(level, outside)
    assert told.startswith(f"the session computes in {dtype} inside of session.autocast(), and this loss was computed")


@pytest.mark.parametrize(
    "loss", [in_region, in_torchs, in_ours, checkpointed, own_function, without_products, compiled],
    ids=lambda loss: loss.__name__,
)  # fmt: skip
def test_regions_and_what_cannot_be_looked_into_are_not_told(loss: Loss) -> None:
    assert trained("O4", loss) == []


@pytest.mark.parametrize(("level", "left_in", "told_as"), [
    ("O4", torch.float16, "fp16"), ("O1", torch.bfloat16, "bf16"),
])  # fmt: skip
def test_a_region_of_torch_that_was_left_in_is_told(level: str, left_in: torch.dtype, told_as: str) -> None:
    def in_torchs_own(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", left_in):
            return outside(session, model, x).float()

    (told,) = trained(level, in_torchs_own)
    assert f"this loss was computed in {told_as}, in another region, as torch.autocast makes them" in told


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_levels_that_need_no_region_are_not_told(level: str) -> None:
    assert trained(level, outside) == []


def test_convolutions_and_attention_are_seen() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "attend": nn.MultiheadAttention(4, 2, batch_first=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4, 4)
    for loss in (lambda: model["conv"](x).sum(), lambda: model["attend"](x, x, x)[0].sum()):
        with (
            preamp.prepare(model, optimizer, level="O4") as session,
            pytest.warns(PreampWarning, match="this loss was computed in fp32, in no region"),
        ):
            session.backward(loss())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), eps=1e-4)


LEVELS: list[tuple[Any, str]] = [
    ("O9", r"there is no level 'O9'; the levels are O0, .*auto. What they are: preamp levels"),
    ("bf16", r"there is no level 'bf16'; .* Write 'bf16-mixed' \(O4\) or 'bf16-master' \(O5\)$"),
    ("16-mixed", r"'fp16-mixed' \(O1\) or 'bf16-mixed' \(O4\)$"),
    (2, r"got 2. Write 'O2'$"),
    (torch.float16, r"got torch.float16. Write 'fp16-mixed' \(O1\) or 'fp16-master' \(O2\)"),
    (" ", r"Write 'O0' for that, or 'auto'"),
]


@pytest.mark.parametrize(("level", "message"), LEVELS, ids=str)
def test_what_is_said_about_a_level_that_is_none(level: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        preamp.prepare(model := mlp(), adamw(model), level=level)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "parameters": (nn.Module.parameters, r"is a generator. Make one first: .*torch.optim.AdamW\(model.parameters\(\)"),
    "of Keras": (lambda m: type("Adam", (), {})(), r"takes torch.optim optimizers; .* is an Adam. Make one"),
    "a class": (lambda m: torch.optim.SGD, r"is the class SGD. Make one first: optimizer = SGD\("),
    "a scheduler": (
        lambda m: torch.optim.lr_scheduler.StepLR(adamw(m), 1), r"is a StepLR. Give it the scheduler's optimizer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_what_is_said_about_something_else_than_an_optimizer(what: str) -> None:
    make, message = OPTIMIZERS[what]
    with pytest.raises(SessionError, match=message):
        preamp.prepare(model := mlp(), make(model))


def test_what_is_said_about_other_arguments() -> None:
    model = mlp()
    with pytest.raises(PolicyError, match=r"no field 'opt_level'; .*opt_level of Apex or torch.amp is level= here"):
        preamp.prepare(model, adamw(model), opt_level="O2")
    with pytest.raises(PolicyError, match=r"dtype of Apex or torch.amp is level=, 'O4' for bfloat16"):
        preamp.prepare(model, adamw(model), dtype=torch.bfloat16)
    with pytest.raises(PolicyError, match=r"init_scale of Apex or torch.amp is of scale=DynamicScale\(\.\.\.\) here"):
        preamp.prepare(model, adamw(model), init_scale=4.0)
    with pytest.raises(PolicyError, match=r"Write masters$"):
        preamp.prepare(model, adamw(model), master=True)
    with pytest.raises(AttributeError, match=r"write preamp.prepare\(.*install_as_apex\(\)"):
        preamp.initialize(model)
    with pytest.raises(SessionError, match=r"no optimizer: .*prepare\(model, None\) for inference"):
        preamp.prepare(model, level="O5")
    with pytest.raises(SessionError, match=r"is an AdamW. The model comes first: prepare\(model, optimizer\)"):
        preamp.prepare(adamw(model), model)
    with pytest.raises(SessionError, match=r"the meta device: .* Write model.to_empty\(device=...\)"):
        preamp.prepare(meta := nn.Linear(2, 2, device="meta"), adamw(meta))
    with pytest.raises(SessionError, match=r"the model \(ReLU\) has no parameters, and the AdamW has 6"):
        preamp.prepare(nn.ReLU(), adamw(model))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_model_in_float64_is_warned_of(level: str) -> None:
    model = mlp().double()
    with pytest.warns(PreampWarning, match=r"float64, .* Write model.float\(\)"):
        preamp.prepare(model, adamw(model), level=level).close()


def test_float64_where_it_is_meant_is_not() -> None:
    model = mlp().double()
    preamp.prepare(model, adamw(model), level="O0").close()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    preamp.prepare(model, adamw(model), level="O4").close()


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_session_that_is_unpacked_is_closed_and_told(level: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with pytest.raises(SessionError, match=r"session = preamp.prepare\(model, optimizer\), and go on"):
        model, optimizer = preamp.prepare(model, optimizer, level=level)
    with preamp.prepare(model, optimizer, level=level) as session:
        with session.autocast():
            loss = model(batch(0)[0]).float().sum()
        session.backward(loss)
        session.step()
        with pytest.raises(SessionError, match="in place"):
            list(session)
        session.zero_grad()  # training goes on
