"""Split masters lose nothing, and stochastic rounding is right in the mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from . import calls as fused

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x007FFFFF,
    0x00800000, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF818000, 0x3FFFFFFF, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000,
]  # fmt: skip


def floats(bits: Any) -> Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@example(bits=EDGES)
@settings(deadline=None)
def test_split_is_exact(bits: list[int]) -> None:
    master = floats(bits)
    weight, rest = fused.split(master)
    assert weight.dtype is torch.bfloat16 and rest.dtype is torch.int16
    again = fused.join(weight, rest)
    nan = master.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert again[nan].isnan().all() and weight[nan].isnan().all()

    number = master.view(torch.int32)
    tie = (number & 0xFFFF) == 0x8000
    nearest = master.bfloat16()
    assert torch.equal(weight[~tie & ~nan], nearest[~tie & ~nan])
    up = ((number + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(weight[tie & ~nan], up[tie & ~nan])  # away from zero
    gap = (weight.double() - master.double()).abs()
    beyond = weight.isinf() | master.isnan()
    assert bool((gap <= (nearest.double() - master.double()).abs())[~beyond].all())  # as near as the even one


@pytest.mark.parametrize("rest", [-0x8000, -1, 0, 1, 0x7FFF])
def test_a_weight_written_since_is_a_number_near_it(rest: int) -> None:
    """Zeroed by pruning or by padding, say: beside a negative distance that was NaN."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    weights = weights[weights.isfinite()]
    made = fused.join(weights, torch.full(weights.shape, rest, dtype=torch.int16))
    assert made.isfinite().all()
    assert made[weights == 0].abs().max() < 1e-40
    gap = (made.double() - weights.double()).abs()
    assert bool((gap <= (weights.double().abs() * 2**-7).clamp_min(2.0**-133)).all())


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), seed=st.integers(0, 2**62))
@example(bits=EDGES, seed=0)
@settings(deadline=None)
def test_24_bits_are_one_of_the_two_numbers_around(bits: list[int], seed: int) -> None:
    master = floats(bits)
    chances = fused.chances_like(master, seed, torch.tensor(3.0), 0)
    weight, rest = fused.split(master, torch.int8, chances)
    assert weight.dtype is torch.bfloat16 and rest.dtype is torch.int8
    made, nan = fused.join(weight, rest), master.isnan()
    assert made[nan].isnan().all() and not made[~nan].isnan().any()
    number, rounded = master.view(torch.int32)[~nan], made.view(torch.int32)[~nan]
    assert bool(((rounded == number & ~0xFF) | (rounded == (number & ~0xFF) + 0x100)).all())
    assert torch.equal(rounded[number & 0xFF == 0], number[number & 0xFF == 0])
    again = fused.split(made, torch.int8, fused.chances_like(master, seed + 1, torch.tensor(3.0), 0))
    assert torch.equal(again[0][~nan], weight[~nan]) and torch.equal(again[1][~nan], rest[~nan])
    weight, rest = fused.split(master, torch.int8)  # to nearest
    gap = (fused.join(weight, rest).double() - master.double()).abs()[~nan & (master.abs() < 3e38)]
    spacing = master.double().abs()[~nan & (master.abs() < 3e38)] * 2**-15
    assert bool((gap <= spacing.clamp_min(2.0**-141) / 2).all())


def test_24_bits_have_the_right_mean() -> None:
    values = torch.tensor([1.0 + 2.0**-17, -3.0 - 2.0**-16, 2.0**-130 * 1.3, 0.1, -1e30, 2.0**-149])
    many = values.repeat(20_000, 1)
    halves = fused.split(many, torch.int8, fused.chances_like(many, 5, torch.tensor(3.0), 0))
    error = (fused.join(*halves).double().mean(0) - values.double()).abs()
    spacing = (values.double().abs() * 2.0**-15).clamp_min(2.0**-141)
    assert bool((error <= 4.5 * 0.5 * spacing / 20_000**0.5).all())


def test_chances_are_even_and_apart() -> None:
    like = torch.zeros(1 << 16)
    drawn = [fused.chances_like(like, seed, torch.tensor(float(step)), spot)
             for seed, step, spot in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 31, 0, 0))]  # fmt: skip
    for numbers in drawn:
        assert int(numbers.min()) >= 0 and int(numbers.max()) < 2**32
        share = numbers.double() / 2**32
        assert float(share.mean()) == pytest.approx(0.5, abs=5 / (12 * 2**16) ** 0.5)
        counts = torch.histc(share, 64)
        assert float(((counts - 1024) ** 2 / 1024).sum()) < 130  # chi square of 63: 1e-6
        follows = torch.corrcoef(torch.stack([share[:-1], share[1:]]))[0, 1]
        assert abs(float(follows)) < 0.02
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            assert int((one == other).sum()) < 5
            assert abs(float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])) < 0.02


def test_stochastic_rounding_has_the_right_mean() -> None:
    values = torch.tensor([1.0 + 2.0**-10, -3.0 - 2.0**-9, 2.0**-130 * 1.3, 1e30, 0.1, -0.0, torch.inf, 2.0])
    many = values.repeat(20_000, 1)
    rounded = fused.round_stochastically(many, fused.chances_like(many, 5, torch.tensor(3.0), 0)).double()
    spacing = (many.bfloat16().double() * 2.0**-7).abs().clamp_min(2.0**-133)
    finite = values.isfinite()
    error = (rounded.mean(0) - values.double())[finite].abs()
    assert bool((error <= 4.5 * 0.5 * spacing[0][finite] / 20_000**0.5 + 1e-300).all())
    assert rounded[:, 6].eq(torch.inf).all() and rounded[:, 7].eq(2.0).all() and rounded[:, 5].eq(0).all()
    nan = fused.round_stochastically(torch.tensor([torch.nan]), torch.tensor([2**32 - 1]))
    assert nan.isnan().all()
