"""On torch's operators: plain maths. `tests/optim` holds them to torch's own fused optimizers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.kernels import dispatch, foreach

from . import calls as fused
from . import steps
from .steps import ADAGRAD, ADAM, NAMES, PLAIN, SETTINGS, SGD, WITH_KERNELS, Run, awkward, by_operators, far, gradients


@pytest.fixture(autouse=True)
def operators() -> Any:
    with by_operators():
        yield


@pytest.mark.parametrize("operator", ["stock", "plain"])
@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=NAMES)
def test_plain_maths(name: str, options: dict[str, Any], operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if operator == "plain":
        monkeypatch.setattr(dispatch, "_has_kernel", lambda *_: False)
    params = awkward()
    run, wanted = Run(name, options, params), PLAIN[name](params, options)
    for i in range(10):
        grads = gradients(params, torch.float32, i)
        wanted.step([grad * 0.5 for grad in grads])
        run.take(grads, torch.tensor(0.5))
    assert far(run.params, wanted.params) < 16


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_shape_dtype_and_factor(data: st.DataObject) -> None:
    name, options = data.draw(st.sampled_from(SETTINGS))
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 33]), min_size=1, max_size=4))
    low = data.draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    factor = data.draw(st.sampled_from([1.0, 2.0**-10, 0.37, 0.0]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    params = [torch.randn(n) for n in sizes]
    low_gradients = [data.draw(st.booleans()) for _ in sizes]
    lows = [p.to(low) for p in params] if low else None
    run, wanted = Run(name, options, params, lows), PLAIN[name](params, options)
    for i in range(3):
        grads = [
            g.to(low) if low and has else g
            for g, has in zip(gradients(params, torch.float32, i), low_gradients, strict=True)
        ]
        wanted.step([grad.double() * factor for grad in grads])
        run.take(grads, torch.tensor(factor), torch.zeros(()))
    if name == "novograd" and factor == 0.0:
        return  # 0 / 0 up to eps: both are right
    assert far(run.params, wanted.params) < 16
    for p, copy in zip(run.params, lows or [], strict=lows is not None):
        assert torch.equal(copy, p.to(copy.dtype))


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=NAMES)
def test_found_writes_nothing(name: str, options: dict[str, Any]) -> None:
    params = awkward()
    steps.check_found_writes_nothing(Run(name, options, params, [p.to(torch.bfloat16) for p in params]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_parameters_without_masters(dtype: torch.dtype) -> None:
    """The gradient is multiplied in float32 inside the step: in float16 it would be lost."""
    params = [torch.ones(5, dtype=dtype)]
    states = [[torch.zeros(5, dtype=dtype)] for _ in range(2)]
    grads = [torch.full((5,), 2.0**-8, dtype=dtype)]
    o = {**ADAM, "eps": 2.0**-40, "lr": 0.5}
    fused.adam_(params, grads, *states, [], None, torch.zeros(()), factor=torch.tensor(2.0**-16), **o)
    assert torch.equal(params[0], torch.full((5,), 0.5, dtype=dtype))


def test_gradients_are_not_changed_without_need() -> None:
    params = [torch.randn(5)]
    for name, options in (("adam", ADAM), ("sgd", SGD), ("adagrad", ADAGRAD)):
        grads = gradients(params, torch.float32, 0)
        kept = grads[0].clone()
        run = Run(name, options, params)
        run.take(grads)
        run.take(grads, torch.tensor(1.0))
        assert torch.equal(grads[0], kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), WITH_KERNELS, ids=NAMES[: len(WITH_KERNELS)])
def test_slices_change_nothing(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [*awkward()[:-1], torch.randn(40, 50), torch.randn(64)]
    run = Run(name, options, params, [p.to(dtype) for p in params])
    twin = run.twin()
    for i in range(3):
        grads = [g if number % 3 else g.float() for number, g in enumerate(gradients(params, dtype, i))]
        monkeypatch.setattr(foreach, "SLICE", 256)
        run.take([g.clone() for g in grads], torch.tensor(0.3))
        monkeypatch.setattr(foreach, "SLICE", 2**18)
        twin.take(grads, torch.tensor(0.3))
    assert all(torch.equal(a, b) for a, b in zip(run.everything(), twin.everything(), strict=True))


def test_no_parameters() -> None:
    step = torch.zeros(())
    fused.adam_([], [], [], [], [], None, step, **ADAM)
    assert float(step) == 0
    with pytest.raises(ValueError, match="norm_type"):
        fused.novograd_([], [], [], torch.zeros(0), None, step, lr=0.1, norm_type=1)
