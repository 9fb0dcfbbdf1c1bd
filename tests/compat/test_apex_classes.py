"""What becomes of a model's class and forward when amp casts at its door: O0, O2, O3, O5."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from preamp.compat.apex import amp

X = torch.ones(2, 3)


class Tagger(nn.Module):
    """Takes what a trainer looks for in its signature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Documented."""
        out: Tensor = self.linear(input_ids) * scale
        return out


def cast(model: nn.Module, level: str = "O2") -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_the_signature_stays(level: str) -> None:
    """Trainers drop the columns of a data set that are no parameters of forward."""
    before = inspect.signature(Tagger().forward)
    model = cast(Tagger(), level)
    assert inspect.signature(model.forward) == before and list(before.parameters) == ["input_ids", "labels", "scale"]
    assert model.forward.__doc__ == "Documented." and model(X, scale=2.0).dtype is torch.float32


def wrapped(model: nn.Module) -> list[Any]:
    """Put a function around forward on the instance, as frameworks do; what it saw of its results."""
    seen: list[Any] = []
    inner: Callable[..., Tensor] = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(inner(*args, **kwargs))
        return seen[-1]  # type: ignore[no-any-return]

    model.forward = forward
    return seen


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_that_was_wrapped_survives_close(before: bool) -> None:
    """Wrapped before amp began or not, and while it is on; and amp begins again."""
    model = Tagger()
    inside = wrapped(model) if before else []
    cast(model)
    outside = wrapped(model)
    first = model(X)
    assert first.dtype is torch.float32 and len(outside) == 1 and model.linear.weight.dtype is torch.float16
    amp.close()
    model.float()
    assert type(model) is Tagger
    torch.testing.assert_close(model(X), first, rtol=1e-2, atol=1e-2)
    assert len(outside) == 2 and len(inside) == (2 if before else 0)
    cast(model, "O5")
    assert model(X).dtype is torch.float32 and outside[-1].dtype is torch.float32 and len(outside) == 3
    assert len(inside) == (3 if before else 0) and (not before or inside[-1].dtype is torch.bfloat16)


class Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_models_and_their_classes_are_let_go() -> None:
    """Classes that torch.nn.utils.parametrize made for one module, and those of models made in a loop."""

    def gone() -> list[weakref.ref[Any]]:
        class Local(nn.Linear):
            pass

        refs: list[weakref.ref[Any]] = []
        for model in (Local(3, 2), parametrize.register_parametrization(nn.Linear(3, 2), "weight", Halving())):
            model = cast(model)
            model(X)
            refs += [weakref.ref(model), weakref.ref(type(model)), weakref.ref(copy.deepcopy(model))]
            amp.close()
        return refs

    refs = gone()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
