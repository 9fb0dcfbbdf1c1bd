"""The kernel that reads gradients, in Triton's interpreter; `test_kernels.py` says how these tests are run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from preamp.kernels import Reading

from ..rows import over
from .where import inside

pytest.importorskip("triton")
pytestmark = [
    inside,
    # the first, unscaled sum of squares of huge numbers overflows by design; the interpreter's NumPy says so
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check(gradients: list[Tensor]) -> None:
    from preamp.kernels.triton.read import read

    got = Reading(*read(gradients))
    values = torch.cat([g.double().reshape(-1) for g in gradients])
    assert float(got.found) == float(not values.isfinite().all())
    assert got.nonfinite.tolist() == [not bool(g.isfinite().all()) for g in gradients]
    if got.found:
        assert not math.isfinite(got.norm)
    else:
        assert float(got.norm) == pytest.approx(float(values.norm().clamp_max(3.4028234e38)), rel=1e-6)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, with zeros."""
    device = torch.get_default_device()
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-24, 8, shape, generator=generator, device="cpu")
    values = torch.randn(shape, generator=generator, device="cpu").ldexp(powers)
    return (values * (torch.rand(shape, generator=generator, device="cpu") > 0.1)).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_one_dtype(dtype: torch.dtype) -> None:
    check([numbers(5).to(dtype), numbers(0).to(dtype), numbers(3, 1000).to(dtype), numbers(2048, seed=1).to(dtype)])


def test_several_dtypes_views_and_layouts() -> None:
    flat = numbers(5000).half()
    check([
        numbers(40, 40)[:, ::2], flat[1:], numbers(7).bfloat16(), numbers(6, 4).t(), numbers(1)[0].half(),
        numbers(2, 3, 5, 5).to(memory_format=torch.channels_last),
    ])  # fmt: skip


@over(dtype=DTYPES, bad=[math.nan, math.inf, -math.inf, -math.nan])
def test_one_bad_entry(dtype: torch.dtype, bad: float) -> None:
    gradients = [numbers(100, seed=i).to(dtype) for i in range(4)]
    gradients[2][99] = bad
    check(gradients)
    check(gradients[2:3])


@over(dtype=DTYPES[1:], power=[-149, -130, -100, -64, -41, -40, -39, 49, 50, 51, 63, 64, 100, 127])
def test_squares_out_of_range(dtype: torch.dtype, power: int) -> None:
    one = 2.0**power
    check([torch.tensor([one, -one, 0.0]).to(dtype)])
    check([torch.full((2500,), one / 64).to(dtype), torch.tensor([one]).to(dtype), numbers(50).to(dtype)])


def test_nothing() -> None:
    check([torch.zeros(0), torch.zeros(0, 3)])


def test_long_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preamp.kernels.triton.read.MANY", 1)
    check([numbers(40_000).half(), numbers(3).half(), numbers(16_384).half(), numbers(2049).bfloat16()])
    check([torch.full((20_000,), 1e30), torch.full((5000,), 1e-30)])


def test_through_the_public_door() -> None:
    """Where Triton runs, `read` is the kernel, and a session's step is one; they mean what they mean without."""
    from preamp.kernels import read

    gradients = [numbers(40, 3).half(), numbers(5000).half(), torch.zeros(3).half()]
    reading = read(gradients)
    values = torch.cat([g.double().reshape(-1) for g in gradients])
    assert float(reading.norm) == pytest.approx(float(values.norm()), rel=1e-6)
    assert not reading.nonfinite.any() and reading.found.item() == 0
