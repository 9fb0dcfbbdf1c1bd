"""What the door costs, counted: the operators of a step are those of the same step with casts written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.compat.apex import amp

from .toys import scaled_backward

LOW = torch.bfloat16


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Network(nn.Module):
    """A layer of each kind: attention by hand, norm, activation, a weight used twice, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.transpose(-1, -2), -1) @ v)
        x = x + self.out(F.gelu(x))
        return F.mse_loss(x, torch.zeros_like(x))


def by_hand(model: Network, x: Tensor) -> Tensor:
    """The same with every cast that the lists ask for, and no other."""
    weights = {name: p.to(LOW) for name, p in model.named_parameters() if "norm" not in name}

    def linear(name: str, given: Tensor) -> Tensor:
        return F.linear(given, weights[f"{name}.weight"], weights[f"{name}.bias"])

    q, k, v = linear("qkv", model.norm(x).to(LOW)).chunk(3, -1)
    attended = F.softmax((q @ k.transpose(-1, -2)).float(), -1).to(LOW) @ v
    x = x + linear("out", attended).float()
    x = x + linear("out", F.gelu(x).to(LOW)).float()
    return F.mse_loss(x, torch.zeros_like(x))


def counted(step: Callable[[], None]) -> Counter[str]:
    with Counting() as mode:
        step()
    return mode.seen


def test_a_step_dispatches_what_casts_by_hand_do() -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 5, 8)

    def plain() -> None:
        by_hand(model, x).backward()

    expected = counted(plain)
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)

    def step() -> None:
        scaled_backward(model(x), optimizer)

    seen = counted(step)
    assert seen == expected
    assert seen["aten._to_copy.default"] == expected["aten._to_copy.default"] > 0
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_a_compiled_model_casts_as_it_does_uncompiled() -> None:
    """Wrappers are plain Python, which the compiler traces through."""
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    expected = model(x)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    compiled: Any = torch.compile(model, backend="aot_eager")
    loss = compiled(x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2)
