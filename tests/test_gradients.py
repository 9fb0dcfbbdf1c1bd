"""Reading and changing gradients, held against the same in float64, for the tensors that backward really leaves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.kernels import check_and_unscale_, clip_values_, dense_values, global_norm, multiply_, read, reciprocal
from preamp.kernels.read import SMALL

from .rows import over

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ORDERS = (1.0, 2.0, 3.0, math.inf)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def sparse(dtype: torch.dtype = torch.float32) -> Tensor:
    indices, values = torch.tensor([[4, 0, 2]]), torch.randn(3, 5).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (7, 5), check_invariants=False).coalesce()


LAYOUTS: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "odd": lambda dtype: [normal(n, dtype=dtype) for n in (1, 3, 17, 255, 1031)],
    "empty": lambda dtype: [normal(0, dtype=dtype), normal(5, dtype=dtype), normal(3, 0, 2, dtype=dtype)],
    "only empty": lambda dtype: [normal(0, dtype=dtype)],
    "0-d": lambda dtype: [normal(dtype=dtype), normal(2, dtype=dtype)],
    "strided": lambda dtype: [
        normal(9, 8, dtype=dtype)[::2, 1::3],
        normal(6, 4, dtype=dtype).t(),
        normal(40, dtype=dtype)[3:20],
    ],
    "channels_last": lambda dtype: [
        normal(2, 5, 3, 4, dtype=dtype).to(memory_format=torch.channels_last),
        normal(2, 5, 3, 4, dtype=dtype),
    ],
    "sparse": lambda dtype: [sparse(dtype), normal(3, dtype=dtype)],
    "of several dtypes": lambda dtype: [*mixed(), normal(0, dtype=dtype)],
}
EVERY = over(layout=LAYOUTS, dtype=DTYPES)


def mixed() -> list[Tensor]:
    return [normal(13, dtype=d) for d in DTYPES] + [normal(4, 3, dtype=d).t() for d in DTYPES] + [sparse()]


def values64(gradients: list[Tensor]) -> list[Tensor]:
    return [g.to_dense().double().clone() for g in gradients]


def rounded(reference: Tensor, like: Tensor) -> Tensor:
    return reference.to(like.dtype).double()


def assert_equal(gradients: list[Tensor], references: list[Tensor]) -> None:
    for gradient, reference in zip(gradients, references, strict=True):
        eps = torch.finfo(gradient.dtype).eps if gradient.dtype is not torch.float64 else 2**-23
        tiny = torch.finfo(gradient.dtype).tiny * eps
        torch.testing.assert_close(gradient.to_dense().double(), reference, rtol=eps, atol=tiny, equal_nan=True)


# -- check_and_unscale_


@EVERY
def test_unscaling(layout: str, dtype: torch.dtype) -> None:
    gradients = LAYOUTS[layout](dtype)
    before = values64(gradients)
    strides = [g.stride() for g in gradients if g.layout is torch.strided]
    found = check_and_unscale_(gradients, torch.tensor(2.0**-5))
    assert found.dtype is torch.float32 and found.shape == () and found == 0
    assert_equal(gradients, [b * 2**-5 for b in before])
    assert strides == [g.stride() for g in gradients if g.layout is torch.strided]


def test_checking_alone_changes_nothing() -> None:
    gradients = mixed()
    before = values64(gradients)
    assert check_and_unscale_(gradients, None) == 0
    for gradient, reference in zip(gradients, before, strict=True):
        assert torch.equal(gradient.to_dense().double(), reference)


def test_unscaling_writes_only_into_the_view() -> None:
    storage = torch.ones(4, 4)
    check_and_unscale_([storage[:, 1]], torch.tensor(0.5))
    expected = torch.ones(4, 4)
    expected[:, 1] = 0.5
    assert torch.equal(storage, expected)


def test_unscaling_in_float16_rounds_once() -> None:
    gradient = torch.tensor([1000.0, 65504.0, 2.0**-24, 3 * 2.0**-24]).half()
    reference = gradient.double() * 2.0**-1
    check_and_unscale_([gradient], torch.tensor(0.5))
    assert torch.equal(gradient.double(), rounded(reference, gradient))
    large = torch.tensor([1000.0]).half()
    check_and_unscale_([large], torch.tensor(2.0**-30))  # a factor that is 0 in float16
    assert float(large) == 16 * 2.0**-24


def test_the_check_is_made_before_the_multiplication() -> None:
    overflowing = torch.tensor([60000.0]).half()
    assert check_and_unscale_([overflowing], torch.tensor(4.0)) == 0
    assert overflowing.isinf().all()
    hidden = torch.tensor([math.inf])
    assert check_and_unscale_([hidden], torch.tensor(0.0)) == 1
    assert check_and_unscale_([torch.full((33,), torch.finfo(d).max, dtype=d) for d in DTYPES], None) == 0


@settings(deadline=None, max_examples=150)
@given(
    layout=st.sampled_from([name for name in LAYOUTS if name != "only empty"]),
    dtype=st.sampled_from(DTYPES),
    bad=st.lists(
        st.tuples(st.integers(0), st.integers(0), st.sampled_from([math.inf, -math.inf, math.nan])), max_size=3
    ),
    inverse=st.sampled_from([None, 0.5, 2.0**-16]),
)
def test_found_exactly_when_an_entry_is_not_finite(
    layout: str, dtype: torch.dtype, bad: list[tuple[int, int, float]], inverse: float | None
) -> None:
    gradients = [*LAYOUTS[layout](dtype), normal(6, dtype=torch.bfloat16)]
    filled = [g for g in gradients if dense_values(g).numel()]
    for which, where, value in bad:
        target = dense_values(filled[which % len(filled)])
        index = torch.unravel_index(torch.tensor(where % (2**31) % target.numel()), target.shape)
        target[index] = value
    expected = any(not bool(dense_values(g).isfinite().all()) for g in gradients)
    assert expected == bool(bad)
    found = check_and_unscale_(gradients, None if inverse is None else torch.tensor(inverse))
    assert found == float(expected)


def test_no_gradients() -> None:
    assert check_and_unscale_([], None) == 0
    assert check_and_unscale_([], torch.tensor(0.5)).dtype is torch.float32
    assert global_norm([]) == 0
    reading = read([])
    assert (float(reading.found), float(reading.norm), len(reading.nonfinite)) == (0, 0, 0)
    multiply_([], torch.tensor(2.0))
    clip_values_([], 1.0)


# -- global_norm


def reference_norm(gradients: list[Tensor], order: float) -> float:
    flat = torch.cat([v.flatten() for v in values64(gradients)])
    return float(torch.linalg.vector_norm(flat, order)) if flat.numel() else 0.0


@over(layout=LAYOUTS, dtype=DTYPES, order=ORDERS)
def test_the_norm(layout: str, dtype: torch.dtype, order: float) -> None:
    gradients = LAYOUTS[layout](dtype)
    before = values64(gradients)
    norm = global_norm(gradients, order)
    assert norm.dtype is torch.float32 and norm.shape == ()
    assert float(norm) == pytest.approx(reference_norm(gradients, order), rel=1e-5)
    assert all(torch.equal(g.to_dense().double(), b) for g, b in zip(gradients, before, strict=True))


def test_a_norm_whose_squares_vanish_in_float16() -> None:
    gradient = torch.full((100,), 2.0**-20).half()
    assert float(global_norm([gradient])) == pytest.approx(10 * 2.0**-20, rel=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_what_is_not_finite(order: float) -> None:
    assert global_norm([torch.ones(3), torch.tensor([1.0, math.inf]).half()], order) == math.inf
    assert global_norm([torch.ones(3), torch.tensor([1.0, math.nan])], order).isnan()


# -- multiply_ and clip_values_


@EVERY
def test_multiplying(layout: str, dtype: torch.dtype) -> None:
    gradients = LAYOUTS[layout](dtype)
    before, kinds = values64(gradients), [(g.dtype, g.layout, g.is_sparse and g.is_coalesced()) for g in gradients]
    factor = torch.tensor(0.37)
    multiply_(iter(gradients), factor)
    assert_equal(gradients, [b * float(factor) for b in before])
    assert kinds == [(g.dtype, g.layout, g.is_sparse and g.is_coalesced()) for g in gradients]


@EVERY
def test_clipping_values(layout: str, dtype: torch.dtype) -> None:
    gradients = LAYOUTS[layout](dtype)
    before = values64(gradients)
    clip_values_(iter(gradients), 0.5)
    for gradient, reference in zip(gradients, before, strict=True):
        assert torch.equal(gradient.to_dense().double(), reference.clamp(-0.5, 0.5))


def test_clipping_what_is_not_finite() -> None:
    gradient = torch.tensor([-math.inf, math.inf, math.nan, 0.1])
    clip_values_([gradient], 0.25)
    wanted = torch.tensor([-0.25, 0.25, math.nan, 0.1])
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=0, equal_nan=True)


# -- sparse and complex


def test_a_real_embedding_gradient() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None and not gradient.is_coalesced()
    for attempt in (
        lambda: check_and_unscale_([gradient], None),
        lambda: global_norm([gradient]),
        lambda: clip_values_([gradient], 1.0),
    ):
        with pytest.raises(ValueError, match="coalesced"):
            attempt()
    multiply_([gradient], torch.tensor(2.0))  # the same before and after equal indices are added up
    gradient = gradient.coalesce()
    multiply_([gradient], torch.tensor(0.5))
    assert float(global_norm([gradient])) == pytest.approx(math.sqrt(3 * 4 + 3 * 1))
    clip_values_([gradient], 1.5)
    assert gradient.to_dense()[1].tolist() == [1.5, 1.5, 1.5]


def test_complex_gradients() -> None:
    gradient = torch.tensor([3 + 4j, 0 - 1j])
    assert check_and_unscale_([gradient, torch.ones(2)], torch.tensor(2.0)) == 0
    assert torch.equal(gradient, torch.tensor([6 + 8j, 0 - 2j]))
    assert float(global_norm([gradient], math.inf)) == 10
    assert float(global_norm([gradient], 1.0)) == 12
    multiply_([gradient], torch.tensor(0.5))
    clip_values_([gradient], 2.0)
    assert torch.equal(gradient, torch.tensor([2 + 2j, 0 - 1j]))
    gradient[0] = complex(1, math.inf)
    assert check_and_unscale_([gradient], None) == 1


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_the_reciprocal_is_that_of_float64_rounded(scale: float) -> None:
    """By which torch's scaler unscales; the quotient of float32 rounds to the same number."""
    expected = np.float32(1.0 / np.float64(scale))
    assert reciprocal(torch.tensor(scale)).item() == expected
    assert reciprocal(torch.tensor(scale, dtype=torch.float64)).dtype is torch.float32


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
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(LAYOUTS[layout](dtype))


def test_sizes_and_dtypes_side_by_side() -> None:
    torch.manual_seed(2)
    check([normal(SMALL + 1), normal(3), normal(SMALL), sparse(), normal(2 * SMALL, dtype=torch.bfloat16)])


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
