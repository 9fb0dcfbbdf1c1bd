"""multi_tensor_applier and the operators of amp_C."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from preamp.compat.apex import _amp_c as amp_C
from preamp.compat.apex._amp_c import MultiTensorApply, multi_tensor_applier
from preamp.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(777, 555), (1, 7, 3), (), (0,)]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
others = pytest.mark.parametrize("out", DTYPES)


def buffer() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def full(value: float, dtype: torch.dtype, sizes: list[Any] = SIZES) -> list[Tensor]:
    return [torch.full(size, value, dtype=dtype) for size in sizes]


def test_the_applier() -> None:
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    assert MultiTensorApply.available
    assert multi_tensor_applier.chunk_size == 2048 * 32
    seen = multi_tensor_applier(lambda *a: a, buffer(), [[torch.ones(1)]], 3.0, "x")
    assert seen[0] == 2048 * 32
    assert seen[3:] == (3.0, "x")


@dtypes
@others
@pytest.mark.parametrize("in_place", [False, True])
def test_scale(dtype: torch.dtype, out: torch.dtype, in_place: bool) -> None:
    ins = full(4.0, dtype)
    outs = ins if in_place else full(99.0, out)
    flag = buffer()
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [ins, outs], 1.0 / 4.0)
    assert all(torch.equal(t, torch.ones_like(t)) for t in outs)
    assert in_place or all(torch.equal(t, torch.full_like(t, 4.0)) for t in ins)
    assert not flag.item()


def test_a_flag_that_is_set_stays_set() -> None:
    ins, outs, flag = full(4.0, torch.float32), full(99.0, torch.float32), torch.ones(1, dtype=torch.int32)
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [ins, outs], 1.0)
    assert flag.item() == 1


@dtypes
@others
def test_axpby(dtype: torch.dtype, out: torch.dtype) -> None:
    xs, ys, outs, flag = full(4.0, dtype), full(2.0, torch.float32), full(99.0, out), buffer()
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [xs, ys, outs], 2.0, 8.0, -1)
    assert all(torch.equal(t, torch.full_like(t, 24.0)) for t in outs)
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [xs, ys, xs], 0.5, 1.0, 0)
    assert all(torch.equal(t, torch.full_like(t, 4.0)) for t in xs)
    assert not flag.item()


@pytest.mark.parametrize("check", [-1, 0, 1])
@pytest.mark.parametrize("where", [0, 1])
def test_axpby_looks_where_it_is_told(check: int, where: int) -> None:
    lists, flag = [full(1.0, torch.float16), full(1.0, torch.float32)], buffer()
    lists[where][1].view(-1)[3] = float("nan")
    amp_C.multi_tensor_axpby(1, flag, [*lists, full(0.0, torch.float32)], 1.0, 1.0, check)
    assert bool(flag.item()) == (check in (-1, where))


@dtypes
@pytest.mark.parametrize("per_tensor", [False, True])
def test_l2norm(dtype: torch.dtype, per_tensor: bool) -> None:
    tensors, flag = [torch.randn(s).to(dtype) for s in SIZES], buffer()
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [tensors], per_tensor)
    plain = torch.stack([t.double().norm() for t in tensors])
    assert norm.shape == (1,)
    assert norm.dtype is each.dtype is torch.float32
    torch.testing.assert_close(norm.double(), plain.norm().reshape(1), rtol=5e-5, atol=0)
    if per_tensor:
        torch.testing.assert_close(each.double(), plain, rtol=5e-5, atol=0)
    else:
        assert each.numel() == 0
    assert not flag.item()
    tensors[0].view(-1)[0] = float("inf")
    norm, _ = amp_C.multi_tensor_l2norm(1, flag, [tensors])
    assert not norm.isfinite() and flag.item() == 1


def test_empty_lists_and_lists_that_do_not_fit() -> None:
    flag = buffer()
    amp_C.multi_tensor_scale(1, flag, [[], []], 2.0)
    amp_C.multi_tensor_axpby(1, flag, [[], [], []], 1.0, 1.0)
    norm, each = amp_C.multi_tensor_l2norm(1, flag, [[]], True)
    assert norm.tolist() == [0.0]
    assert each.numel() == 0
    amp_C.multi_tensor_adam(1, flag, [[], [], [], []], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    amp_C.multi_tensor_sgd(1, flag, [[], [], []], 0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    assert not flag.item()
    with pytest.raises(RuntimeError, match="lengths"):
        amp_C.multi_tensor_scale(1, flag, [[torch.ones(1)], []], 2.0)
    with pytest.raises(RuntimeError, match="2 lists"):
        amp_C.multi_tensor_scale(1, flag, [[torch.ones(1)]], 2.0)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
    exponent=st.integers(-10, 10), ins=st.sampled_from(DTYPES), outs=st.sampled_from(DTYPES),
)  # fmt: skip
def test_scale_is_one_rounding(values: list[float], exponent: int, ins: torch.dtype, outs: torch.dtype) -> None:
    given, written, flag = [torch.tensor(values).to(ins)], [torch.empty(len(values), dtype=outs)], buffer()
    amp_C.multi_tensor_scale(1, flag, [given, written], 2.0**exponent)
    expected = (given[0].double() * 2.0**exponent).to(outs)
    assert torch.equal(written[0].nan_to_num(), expected.nan_to_num())
    assert bool(flag.item()) == (not given[0].isfinite().all())


# -- steps: the same as those of the optimizers


def step_lists(dtype: torch.dtype, states: int) -> tuple[list[torch.nn.Parameter], list[list[Tensor]]]:
    params = [torch.nn.Parameter(torch.rand(s).to(dtype)) for s in ((9, 5), (3,))]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    copies = [p.detach().clone() for p in params]
    zeros = [[torch.zeros(p.shape) for p in params] for _ in range(states)]
    return params, [[p.grad for p in params if p.grad is not None], copies, *zeros]


def agree(params: list[Any], copies: list[Tensor]) -> None:
    for mine, theirs in zip(params, copies, strict=True):
        assert torch.equal(mine, theirs)


@dtypes
def test_steps_are_the_optimizers(dtype: torch.dtype) -> None:
    flag = buffer()
    params, lists = step_lists(dtype, 2)
    FusedAdam(params, lr=0.1, weight_decay=0.1).step()
    amp_C.multi_tensor_adam(1, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)
    agree(params, lists[1])
    params, lists = step_lists(dtype, 1)
    FusedSGD(params, 0.1, momentum=0.9, weight_decay=0.1).step()
    amp_C.multi_tensor_sgd(1, flag, lists, 0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)
    agree(params, lists[1])
    params, lists = step_lists(dtype, 2)
    FusedLAMB(params, lr=0.1).step()
    norm, _ = amp_C.multi_tensor_l2norm(1, flag, [lists[0]])
    amp_C.multi_tensor_lamb(1, flag, lists, 0.1, 0.9, 0.999, 1e-6, 1, 1, 0.01, 1, 1, norm, 1.0, False)
    agree(params, lists[1])


def test_sgd_with_scaled_16_bit_gradients_and_copies() -> None:
    params, lists = step_lists(torch.float32, 1)
    lows = [torch.zeros(p.shape, dtype=torch.float16) for p in params]
    for param, grad in zip(params, lists[0], strict=True):
        param.grad = grad.half().float()
    lists = [[g.half() * 8 for g in lists[0]], *lists[1:], lows]
    FusedSGD(params, 0.1, momentum=0.9).step()
    amp_C.multi_tensor_sgd(1, buffer(), lists, 0.0, 0.9, 0.0, 0.1, False, True, False, 1.0 / 8)
    for param, value, low in zip(params, lists[1], lows, strict=True):
        torch.testing.assert_close(param.detach(), value)
        assert torch.equal(low, value.half())


def test_a_raised_flag_stops_every_step() -> None:
    flag = torch.ones(1, dtype=torch.int32)
    for states, operator, arguments in (
        (2, amp_C.multi_tensor_adam, (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)),
        (1, amp_C.multi_tensor_sgd, (0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)),
        (2, amp_C.multi_tensor_lamb, (0.1, 0.9, 0.99, 1e-6, 1, 1, 0.01, 1, 1, torch.ones(1), 1.0)),
    ):
        params, lists = step_lists(torch.float32, states)
        operator(1, flag, lists, *arguments)  # type: ignore[operator]
        agree(params, lists[1])
