"""How often weights are cast, counted under a dispatch mode; and that a cast never serves a weight that has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preamp

from ..rows import over
from .toys import backward, batch, loss_of, mlp, same, step, train, weights


class Casts(TorchDispatchMode):
    """Counts casts to 16 bits of the weights that are given, by the memory they live in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.of = {p.data_ptr(): 0 for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and out.dtype in (torch.float16, torch.bfloat16) and args[0].data_ptr() in self.of:
            self.of[args[0].data_ptr()] += 1
        return out

    @property
    def most(self) -> int:
        return max(self.of.values())


@pytest.mark.parametrize(("level", "casts"), [("O1", 1), ("O4", 1), ("O2", 0), ("O5", 0), ("O3", 0), ("O0", 0)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_casts_per_weight_and_region(level: str, casts: int, micro_batches: int) -> None:
    model = mlp()
    with preamp.prepare(model, preamp.optim.SGD(model.parameters(), 1e-3), level=level) as session:
        for step in range(3):
            with Casts(model) as counted:
                for i in range(micro_batches):
                    backward(session, model, step, sync=i == micro_batches - 1)
                session.step()
            session.zero_grad()
            assert counted.most == casts * micro_batches, (step, counted.of)


def output(region: Any, model: nn.Module) -> Tensor:
    with region:
        result: Tensor = model(batch(0)[0])
    return result.detach()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "write": lambda model: [p.mul_(2) for p in model.parameters()],
    "write through .data": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "other data": lambda model: [setattr(p, "data", p.data * 2) for p in model.parameters()],
    "load": lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}),
    "fused step": lambda model: fused_step(model),
}


def fused_step(model: nn.Module) -> None:
    """An optimizer's kernel changes weights without counting their versions up."""
    parameters = [p.detach() for p in model.parameters()]
    gradients = [p.clone() for p in parameters]
    options = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    torch._fused_sgd_(parameters, gradients, [], lr=1.0, maximize=True, **options)


@over(level=["O1", "O4"], change=CHANGES, whose=["the session's", "a stranger's"])
def test_no_region_serves_a_cast_of_what_was(level: str, change: str, whose: str) -> None:
    """Between micro-batches of the session: the model, another one, in a session's region, preamp's or torch's."""
    model, stranger = mlp(norm=False), mlp(1, norm=False)
    dtype = torch.float16 if level == "O1" else torch.bfloat16
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), level=level, scale=2.0) as session:
        train(session, model, range(2))
        for _ in range(2):
            looked_at = model if whose == "the session's" else stranger
            backward(session, model, 0, sync=False)
            output(session.autocast(), looked_at)
            with torch.no_grad():
                CHANGES[change](looked_at)
            with torch.autocast("cpu", dtype):
                expected = copy.deepcopy(looked_at)(batch(0)[0])
            for region in (session.autocast(), preamp.autocast("cpu", dtype), torch.autocast("cpu", dtype)):
                assert torch.equal(output(region, looked_at), expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_region_left_open_over_several_steps(level: str) -> None:
    """Whether the session steps or, where no scale is in the way, the script itself."""

    def run(left_open: bool, own: bool) -> list[Tensor]:
        model = mlp(norm=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with preamp.prepare(model, optimizer, level=level, scale=1.0 if own else 2.0) as session:
            with session.autocast(enabled=left_open):
                for index in range(4):
                    if own:
                        session.autocast()(loss_of)(model, index).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    else:
                        step(session, model, index)
            return weights(model)

    for own in (False, True):
        assert same(run(True, own), run(False, own)), own


@over(level=["O0", "O1", "O2", "O4", "O5"], reentrant=[True, False])
def test_a_region_opened_inside_of_the_checkpointed_function(level: str, reentrant: bool) -> None:
    def run(checkpointed: bool) -> list[Tensor]:
        model = mlp()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=2.0) as session:

            def block(x: Tensor) -> Tensor:
                with session.autocast():
                    return model[:3](x).float()  # type: ignore[no-any-return, index]

            for step in range(3):
                for i in range(2):
                    x, y = batch(step + i)
                    x.requires_grad_()
                    hidden = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
                    with session.autocast():
                        loss = nn.functional.cross_entropy(model[3](hidden).float(), y)
                    session.backward(loss, sync=i == 1)
                session.step()
                session.zero_grad()
            return weights(model)

    assert same(run(True), run(False))
