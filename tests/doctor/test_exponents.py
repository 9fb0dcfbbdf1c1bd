"""Counts by power of two, against numpy; and what follows from them for a number format."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.doctor.exponents import Exponents
from preamp.doctor.findings.pa202 import scale_window
from preamp.doctor.measure import sampling_step, spread_of
from preamp.formats import BF16, FP8_E4M3, FP16

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


def counted(values: object, dtype: torch.dtype = torch.float32) -> Exponents:
    return spread_of(torch.tensor(values, dtype=dtype))


@settings(deadline=None, max_examples=150)
@given(st.lists(floats, max_size=40))
def test_counts_are_numpys(values: list[float]) -> None:
    found = counted(values)
    array = np.abs(np.array(values, dtype=np.float32))
    fine = array[np.isfinite(array) & (array > 0)]
    exponents = np.frexp(fine)[1] - 1
    assert found.total == len(values)
    assert found.zeros == int((array == 0).sum())
    assert found.infinite == int((~np.isfinite(array)).sum())
    assert found.largest == (float(fine.max()) if len(fine) else 0.0)
    for index, count in enumerate(found.counts):
        assert count == int((exponents == found.first + index).sum())
    assert sum(found.counts) == len(fine)
    assert Exponents.from_dict(asdict(found)) == found


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(2.0**-40, 2.0**20, width=32), min_size=1, max_size=40),
    st.sampled_from([FP16, BF16, FP8_E4M3]),
)
def test_shares_are_those_of_the_cast(values: list[float], held) -> None:
    found = counted(values)
    there = torch.tensor(values).to(held.dtype).float()
    # A value at the very threshold counts with its power of two: half of the smallest subnormal rounds to zero.
    on_threshold = sum(v == held.flush_threshold for v in values)
    zero = int((there == 0).sum())
    assert zero - on_threshold <= round(found.flushed(held) * len(values)) <= zero
    small = sum(v < held.smallest_normal for v in values)
    assert math.isclose(found.below(held.smallest_normal), small / len(values))
    assert math.isclose(
        found.headroom(held), math.log2(held.max / max(float(np.float32(v)) for v in values)), abs_tol=1e-6
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(floats, max_size=20), st.lists(floats, max_size=20), st.integers(-20, 20))
def test_parts_add_up_and_scale(first: list[float], second: list[float], power: int) -> None:
    whole, parts = counted(first + second), counted(first) + counted(second)
    assert parts.total == whole.total
    assert (parts.some, parts.zeros, parts.infinite, parts.largest) == (
        whole.some, whole.zeros, whole.infinite, whole.largest,
    )  # fmt: skip
    for held in (FP16, BF16):
        assert math.isclose(parts.flushed(held), whole.flushed(held))
    assert whole.times(2.0**power).times(2.0**-power) == whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_any_dtype_is_read(dtype: torch.dtype) -> None:
    found = counted([0.0, 1.5, -2.0, 0.25], dtype)
    assert (found.first, found.counts, found.zeros) == (-2, (1, 0, 1, 1), 1)


def test_float16_keeps_its_subnormals() -> None:
    found = counted([2.0**-24, 2.0**-15, 2.0**-14], torch.float16)
    assert found.below(FP16.smallest_normal) == pytest.approx(2 / 3)
    assert found.flushed(FP16) == 0
    assert found.times(2.0**-2).flushed(FP16) == pytest.approx(1 / 3)


def test_a_large_tensor_is_counted_by_a_sample() -> None:
    values = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    values[:, ::64] = 0.0  # a step that divides 64 would see nothing else, or nothing of it
    values[:, 1::64] *= np.float32(2.0**-40)
    values[7, 77], values[8, 78], values[9, 79] = np.inf, np.nan, 1e30
    step = sampling_step(values.shape)
    found = spread_of(torch.from_numpy(values))
    assert step == 33
    assert abs(found.total - values.size) <= step + 2
    assert (found.infinite, found.largest) == (2, float(np.float32(1e30)))
    assert found.zeros / values.size == pytest.approx(1 / 64, rel=0.02)
    small = sum(count for i, count in enumerate(found.counts) if found.first + i < -30)
    assert small / values.size == pytest.approx(1 / 64, rel=0.02)
    exact = spread_of(torch.from_numpy(values[:2]))
    assert exact.total == 2 * 4096


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
def test_the_step_of_a_sample(shape: list[int]) -> None:
    step, count = sampling_step(shape), math.prod(shape)
    assert step == 1 or all(size % step for size in shape[1:])
    assert (step == 1) == (count <= 2**13)


def test_an_empty_tensor_and_one_without_order() -> None:
    assert counted([]).total == 0
    assert counted([]).headroom(FP16) is None
    base = torch.arange(12.0).reshape(3, 4)
    assert spread_of(base.T) == spread_of(base)
    assert base.equal(torch.arange(12.0).reshape(3, 4)), "the tensor is not written"


def test_the_window_of_scales_does_what_it_says() -> None:
    torch.manual_seed(0)
    grads = torch.randn(200_000) * 1e-6
    low, top = scale_window(spread_of(grads * 1024).times(1 / 1024))
    assert low < top
    for power in (low, top):
        there = (grads * 2.0**power).half()
        assert bool(there.isfinite().all())
        assert float((there == 0).float().mean()) <= 1.1e-2
    assert float(((grads * 2.0 ** (low - 1)).half() == 0).float().mean()) > 1e-2
    assert not bool((grads * 2.0 ** (top + 3)).half().isfinite().all())


def test_a_spread_that_no_scale_covers() -> None:
    grads = torch.cat([torch.full((1000,), 1e-12), torch.full((1000,), 1e3)])
    low, top = scale_window(spread_of(grads))
    assert low > top
