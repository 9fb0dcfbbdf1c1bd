"""`gradients.read`: one look that tells everything, against float64 and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.kernels import dense_values, read
from preamp.kernels.read import SMALL

from .test_gradients import EACH, EVERY, LAYOUTS, mixed, normal, sparse


def flat64(gradients: list[Tensor]) -> np.ndarray:
    parts = [dense_values(g).double().numpy().ravel() for g in gradients]
    return np.concatenate(parts) if parts else np.zeros(0)


def check(gradients: list[Tensor]) -> None:
    before = [g.clone() for g in gradients]
    reading = read(gradients)
    bad = [not np.isfinite(flat64([g])).all() for g in gradients]
    assert reading.nonfinite.tolist() == bad
    assert bool(reading.found) == any(bad) and reading.found.dtype is torch.float32
    if not any(bad):
        norm = float(np.linalg.norm(flat64(gradients)))
        assert float(reading.norm) == pytest.approx(norm, rel=2e-5, abs=1e-30)
    else:
        assert not math.isfinite(float(reading.norm))
    for gradient, copy in zip(gradients, before, strict=True):
        assert torch.equal(dense_values(gradient).nan_to_num(), dense_values(copy).nan_to_num()), "read wrote"


@EVERY
@EACH
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(LAYOUTS[layout](dtype))


def test_mixed_dtypes_and_sizes() -> None:
    torch.manual_seed(2)
    check(mixed())
    check([normal(SMALL + 1), normal(3), normal(SMALL), sparse(), normal(2 * SMALL, dtype=torch.bfloat16)])


def test_none() -> None:
    reading = read([])
    assert (float(reading.found), float(reading.norm), len(reading.nonfinite)) == (0, 0, 0)


places = st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.sampled_from([math.inf, -math.inf, math.nan]))


@settings(max_examples=60, deadline=None)
@given(st.lists(places, max_size=3), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_wherever_something_is_not_finite(bad: list[tuple[int, int, float]], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gradients = [normal(n, dtype=dtype) for n in (1, 7, 300, SMALL + 5)]
    for which, where, value in bad:
        gradients[which][where % gradients[which].numel()] = value
    check(gradients)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 7, 100, SMALL - 1, SMALL, SMALL + 1]), min_size=1), st.data())
def test_many_of_any_sizes(sizes: list[int], data: st.DataObject) -> None:
    """However many are laid side by side to be read, each is read once."""
    torch.manual_seed(4)
    sizes = sizes * 5
    gradients = [normal(n) for n in sizes]
    if data.draw(st.booleans()) and sum(sizes):
        which = data.draw(st.sampled_from([i for i, n in enumerate(sizes) if n]))
        gradients[which][data.draw(st.integers(0, sizes[which] - 1))] = math.nan
    check(gradients)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40))
def test_every_float16_pattern_is_finite_as_numpy_says(patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint16).view(np.float16)
    check([torch.from_numpy(values.copy()), torch.zeros(2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_gradients_are_finite(dtype: torch.dtype) -> None:
    """The square of 1e30 is not a float32, and a step must not be skipped for that."""
    large = torch.full((11,), 1e30, dtype=dtype)
    check([large, normal(3).to(dtype)])
    check([torch.full((SMALL + 1,), 2e36, dtype=dtype), normal(3).to(dtype)])
    check([large, torch.tensor([math.nan], dtype=dtype)])


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait, on devices other than the CPU."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


def test_on_accelerators_nothing_waits() -> None:
    with torch.device("meta"), Syncs() as syncs:
        reading = read([torch.ones(4), torch.ones(2, 3).half()])
    assert reading.found.device.type == "meta" and syncs.seen == 0
