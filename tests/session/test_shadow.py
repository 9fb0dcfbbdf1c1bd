"""O1 and O4 with shadows: 16-bit copies beside float32 weights, 16-bit gradients on float32 leaves."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import preamp
from preamp.errors import PolicyError
from preamp.ledger import shadows_work

from .toys import batch, loss_of, mlp, same, weights

pytestmark = pytest.mark.skipif(
    not shadows_work("cpu", torch.bfloat16), reason="this torch has no Tensor.grad_dtype (it came with 2.10)"
)
LEVELS = pytest.mark.parametrize("level", ["O1", "O4"])


class Casts(TorchDispatchMode):
    """Every cast between float32 and 16 bits, with the shape of what was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and out.dtype is not args[0].dtype:
            self.shapes.append((out.shape, out.dtype))
        return out


def train(session: preamp.Session, model: nn.Module, steps: range, micro: int = 1, clip: bool = True) -> list[float]:
    losses = []
    for step in steps:
        for i in range(micro):
            with session.autocast():
                loss = loss_of(model, step * micro + i)
            session.backward(loss)
        if clip:
            session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
        losses.append(loss.item())
    return losses


@LEVELS
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "LAMB", "NovoGrad", "Lion"])
def test_it_trains_as_without(level: str, kind: str) -> None:
    """Bit for bit in the first forward pass; then up to the rounding of gradients, which rest in 16 bits."""
    runs = []
    for shadow in (False, True):
        model = mlp()
        optimizer = getattr(preamp.optim, kind)(model.parameters(), lr=1e-2)
        with preamp.prepare(model, optimizer, level=level, scale=256.0, shadow=shadow) as session:
            runs.append((train(session, model, range(12)), weights(model)))
        assert all(p.dtype is torch.float32 and p.grad is None for p in model.parameters())
    assert runs[0][0][0] == runs[1][0][0]
    assert runs[0][0] == pytest.approx(runs[1][0], rel=2e-2)


@LEVELS
def test_no_weight_is_cast_and_no_gradient(level: str) -> None:
    model = mlp(norm=False)
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level=level, shadow=True) as session:
        train(session, model, range(2))
        shapes = {p.shape for p in model.parameters()}
        with Casts() as casts:
            with session.autocast():
                loss = loss_of(model, 0)
            session.backward(loss)
        assert not [shape for shape, _ in casts.shapes if shape in shapes]
        low = torch.float16 if level == "O1" else torch.bfloat16
        assert {p.grad.dtype for p in model.parameters()} == {low}
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@LEVELS
def test_copies_are_what_the_weights_round_to(level: str) -> None:
    model = mlp()
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level=level, scale=8.0, shadow=True) as session:
        for change in ("step", "write", "load", "none"):
            if change == "step":
                train(session, model, range(3), micro=2)
            elif change == "write":
                with torch.no_grad():
                    model[0].weight.mul_(1.5)
            elif change == "load":
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            with session.autocast():
                mine = model(batch(0)[0])
            with preamp.autocast("cpu", dtype=preamp.policy(level).compute):
                theirs = copy.deepcopy(model)(batch(0)[0])  # whose weights have no copies
            assert torch.equal(mine, theirs), change


def test_skips_and_true_gradients() -> None:
    model = mlp()
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level="O1", scale=1024.0, shadow=True) as session:
        before = weights(model)
        with session.autocast():
            loss = loss_of(model, 0) * float("inf")
        session.backward(loss)
        assert session.step().skipped and same(weights(model), before)
        session.zero_grad()
        with session.autocast():
            loss = loss_of(model, 0)
        session.backward(loss)
        session.unscale_()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        reference = mlp()
        loss_of(reference, 0).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=2e-2, atol=2e-3)
        session.clip_grad_value_(1e-3)
        session.step()
        session.zero_grad()
        train(session, model, range(2))
        assert not same(weights(model), before)


def test_state_goes_to_and_from_a_session_without() -> None:
    finals: list[list[Tensor]] = []
    for shadow in (True, False):
        model = mlp()
        optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
        with preamp.prepare(model, optimizer, level="O4", shadow=True) as session:
            train(session, model, range(5))
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), session.state_dict()), file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        model = mlp()
        optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
        with preamp.prepare(model, optimizer, level="O4", shadow=shadow) as session:
            for thing, state in zip((model, optimizer, session), states, strict=True):
                thing.load_state_dict(state)
            train(session, model, range(5, 8))
        finals.append(weights(model))
    for a, b in zip(*finals, strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-3)


def test_shared_frozen_and_other_weights_stay_as_they_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out, self.frozen = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(4, 4)
            self.out.weight = self.embed.weight
            self.frozen.requires_grad_(False)
            self.conv = nn.Conv1d(4, 4, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.frozen(self.embed(tokens))
            return self.out(self.conv(hidden.transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    model = Tied()
    optimizer = preamp.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    with preamp.prepare(model, optimizer, level="O4", shadow=True) as session:
        for _ in range(3):
            with session.autocast():
                loss = model(torch.arange(6).view(2, 3)).float().pow(2).mean()
            session.backward(loss)
            assert model.embed.weight.grad.dtype is torch.float32 and model.frozen.weight.grad is None
            assert model.conv.weight.grad.dtype is torch.bfloat16
            session.step()
            session.zero_grad()
        with session.full_precision():
            assert model(torch.arange(3).view(1, 3)).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what dynamo does to trace it
def test_compiled_and_in_no_grad() -> None:
    model = mlp(norm=False)
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level="O4", shadow=True) as session:

        def loss(step_x: Tensor, step_y: Tensor) -> Tensor:
            with session.autocast():
                return nn.functional.cross_entropy(model(step_x).float(), step_y)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for step in range(3):
            x, y = batch(step)
            value = compiled(x, y)
            assert torch.allclose(value, loss(x, y), rtol=1e-3)
            session.backward(value)
            assert model[0].weight.grad.dtype is torch.bfloat16
            session.step()
            session.zero_grad()
        with torch.no_grad():
            assert torch.isfinite(loss(*batch(0)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"level": "O5"}, "parameters"),
        ({"level": "O0"}, "parameters"),
        ({"level": "O4", "optimizer": torch.optim.SGD}, "preamp.optim"),
        ({"level": "O1", "losses": ("a", "b")}, "several losses"),
    ],
)
def test_what_cannot_have_shadows(arguments: dict[str, object], says: str) -> None:
    model = mlp()
    kind = arguments.pop("optimizer", preamp.optim.SGD)
    with pytest.raises(PolicyError, match=says):
        preamp.prepare(model, kind(model.parameters(), lr=0.1), shadow=True, **arguments)
    assert all(p.grad_dtype is torch.float32 for p in model.parameters())
