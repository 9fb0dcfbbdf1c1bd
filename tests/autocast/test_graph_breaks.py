"""Regions in compiled code that breaks its graph: a print, a logger, an .item(), as in any real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError

from ..rows import over

# what dynamo itself meets when it goes on after a break with a tensor that is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("ipu")
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def break_between(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ x.T
    torch._dynamo.graph_break()
    return product, product.softmax(-1)


def the_region_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    with preamp.autocast("cpu"):
        return break_between(x)


@preamp.autocast("cpu")
def decorated(x: Tensor) -> tuple[Tensor, Tensor]:
    return break_between(x)


def a_break_before(x: Tensor) -> tuple[Tensor, Tensor]:
    print("hello")
    with preamp.autocast("cpu"):
        return x @ x.T, (x @ x.T).softmax(-1)


def a_break_in_each_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    with preamp.autocast("cpu"):
        print("hello")
        with preamp.autocast("cpu", enabled=False):
            print(float((x @ x.T)[0, 0]))
            assert (x @ x.T).dtype is FP32
        return break_between(x)


def a_call_that_breaks(x: Tensor) -> tuple[Tensor, Tensor]:
    with preamp.autocast("cpu"):
        return decorated(x)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_sessions_region_goes_on_after_a_break(level: str) -> None:
    x = torch.randn(3, 4)
    with preamp.prepare(nn.Linear(4, 4), None, level=level) as session:

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            with session.autocast():
                return break_between(x)

        expected = run(x)
        inside, outside = torch.compile(run, backend="eager"), torch.compile(break_between, backend="eager")
        decorated_inside = torch.compile(session.autocast()(break_between), backend="eager")
        for compiled in (inside, decorated_inside, session.autocast()(outside)):
            found = compiled(x)
            assert [t.dtype for t in found] == [session.policy.compute, FP32]
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "function", [the_region_inside, decorated, a_break_before, a_break_in_each_of_two, a_call_that_breaks]
)
def test_regions_of_ones_own(function: Callable[[Tensor], tuple[Tensor, Tensor]], backend: str) -> None:
    run, x = torch.compile(function, backend=backend), torch.randn(3, 4)
    for _ in range(2):
        found, expected = run(x), function(x)
        assert [t.dtype for t in found] == [BF16, FP32]
        assert all(map(torch.equal, found, expected))


def test_an_error_inside_of_a_region_with_a_break_leaves_it() -> None:
    def fails(x: Tensor) -> Tensor:
        with preamp.autocast("cpu"):
            torch._dynamo.graph_break()
            if x.sum().item() > -1e9:
                raise ZeroDivisionError
            return x @ x.T

    with pytest.raises(ZeroDivisionError):
        torch.compile(fails, backend="eager")(torch.ones(2, 2))


@over(whose=["preamp", "session"], strict=[False, True])
def test_export_of_a_region_is_refused(whose: str, strict: bool) -> None:
    """An exported program holds torch's region, whose lists are not preamp's rules."""
    model = nn.Linear(8, 8)
    session = preamp.prepare(model, None, level="O4")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with session.autocast() if whose == "session" else preamp.autocast("cpu", BF16):
                return self.model(x).softmax(-1)  # type: ignore[no-any-return]

    with session:
        wanted: Any = PolicyError if not strict else Exception
        with pytest.raises(wanted, match=r"export a copy without a region|PolicyError|Unsupported context manager"):
            torch.export.export(Wrapped(), (torch.ones(2, 8),), strict=strict)
        exported = torch.export.export(model, (torch.ones(2, 8),), strict=strict)
        assert exported.module()(torch.ones(2, 8)).dtype is FP32
