"""`half_function`, `float_function`, `promote_function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import preamp
from preamp.tree import tensors

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DECORATORS = {"half": preamp.half_function, "float": preamp.float_function, "promote": preamp.promote_function}
REGIONS: dict[str, Callable[[], Any]] = {
    "preamp": lambda: preamp.autocast("cpu", dtype=BF16),
    "torch": lambda: torch.autocast("cpu", dtype=BF16),
}


def received(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.parametrize("name", DECORATORS)
def test_wraps(name: str) -> None:
    def function(x: Tensor, *, scale: float = 2.0) -> Tensor:
        """Twice."""
        return x * scale

    decorated = DECORATORS[name](function)
    assert decorated.__name__ == "function" and decorated.__doc__ == "Twice."
    assert decorated.__wrapped__ is function  # type: ignore[attr-defined]
    with REGIONS["preamp"]():
        assert torch.equal(decorated(torch.ones(2), scale=3.0).float(), torch.full((2,), 3.0))
        assert decorated.__call__ is not None


@pytest.mark.parametrize("name", DECORATORS)
def test_outside_a_region_nothing_happens(name: str) -> None:
    x, y = torch.randn(2), torch.randn(2).half()
    values = {"x": [x, y]}
    args, kwargs = DECORATORS[name](received)(values, y=y)
    assert args[0] is values and kwargs["y"] is y
    with torch.autocast("cpu", enabled=False):
        args, kwargs = DECORATORS[name](received)(values, y=y)
        assert args[0] is values and kwargs["y"] is y


@pytest.mark.parametrize("where", REGIONS)
def test_in_a_float_function_everything_is_float32(where: str) -> None:
    w = torch.randn(3, 3, requires_grad=True)

    @preamp.float_function
    def inner(x: Tensor) -> tuple[torch.dtype, ...]:
        return x.dtype, (x @ w).dtype, torch.is_autocast_enabled("cpu")  # type: ignore[return-value]

    with REGIONS[where]():
        assert inner(torch.randn(2, 3) @ w) == (FP32, FP32, False)
        assert torch.is_autocast_enabled("cpu")
        assert (torch.randn(2, 3) @ w).dtype is BF16


def test_an_exception_in_a_float_function_restores_the_region() -> None:
    @preamp.float_function
    def fail(x: Tensor) -> None:
        raise KeyError

    with REGIONS["preamp"]():
        with pytest.raises(KeyError):
            fail(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


def test_promotion_casts_only_what_differs() -> None:
    x, h = torch.randn(2), torch.randn(2).bfloat16()
    promote = preamp.promote_function(received)
    with REGIONS["preamp"]():
        (a, b), _ = promote(h, h)
        assert a is h and b is h
        (a, b), _ = promote(x, h)
        assert a is x and b.dtype is FP32
        (a, b), _ = promote(h, h.half())
        assert a.dtype is FP32 and b.dtype is FP32  # neither 16-bit format holds the other


def test_gradients_flow_through_the_casts() -> None:
    x = torch.randn(3, requires_grad=True)
    square = preamp.half_function(lambda t: t * t)
    with REGIONS["preamp"]():
        y = square(x)
    assert y.dtype is BF16
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is FP32
    assert torch.equal(x.grad, 2 * x.detach().bfloat16().float())


def test_methods_and_modules() -> None:
    class Model(torch.nn.Module):
        @preamp.float_function
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.t()

    with REGIONS["preamp"]():
        assert Model()(torch.randn(2, 2).bfloat16()).dtype is FP32
    assert Model()(torch.randn(2, 2).bfloat16()).dtype is BF16


leaf = st.sampled_from([FP16, BF16, FP32, FP64, torch.int64, torch.bool]).map(lambda d: torch.ones(2).to(d))
tree = st.recursive(
    leaf | st.none() | st.text(max_size=2) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(tree, st.sampled_from(sorted(DECORATORS)), st.sampled_from(sorted(REGIONS)))
def test_any_tree(value: Any, name: str, where: str) -> None:
    castable = {FP16, BF16, FP32}
    before = list(tensors(value))
    found = {t.dtype for t in before} & castable
    with REGIONS[where]():
        (after_value,), named = DECORATORS[name](received)(value, key=value)
    after = list(tensors(after_value))
    assert [t.dtype for t in tensors(named["key"])] == [t.dtype for t in after]
    expected = {
        "half": BF16, "float": FP32, "promote": FP32 if len(found) > 1 else None,
    }[name]  # fmt: skip
    for old, new in zip(before, after, strict=True):
        if old.dtype not in castable or expected in (None, old.dtype):
            assert new is old
        else:
            assert new.dtype is expected and torch.equal(new.float(), old.float())
    if all(t.dtype not in castable for t in before):
        assert after_value is value
