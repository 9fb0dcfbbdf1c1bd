"""Moments in 8 bits: what codes keep, that chance is right in the mean, and that a step is Adam's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ..rows import over
from . import calls as fused
from .eight_bits import KINDS, OPTIONS, SETTINGS, Run
from .steps import awkward, by_operators, check_found_writes_nothing, gradients

CODES = [torch.int8, torch.uint8]
ONE = {torch.int8: 15, torch.uint8: 30}


def all_codes(codes: torch.dtype) -> Tensor:
    top = ONE[codes] << 3
    return torch.arange(-top if codes is torch.int8 else 0, top + 1).to(codes)


def meanings(codes: torch.dtype) -> np.ndarray:
    """Shares of the scale, float64, in the order of `all_codes`: NumPy's float16 numbers with 3 bits of mantissa."""
    every = all_codes(codes).numpy().astype(np.int32)
    shares = (np.abs(every) << 7).astype(np.uint16).view(np.float16).astype(np.float64) * 2.0 ** (15 - ONE[codes])
    return shares * np.sign(every)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_are_float16_numbers_cut_short(codes: torch.dtype) -> None:
    wanted = torch.from_numpy(meanings(codes)) * 0.75
    assert torch.equal(fused.dequantize(all_codes(codes), torch.tensor([0.75])).double(), wanted)
    assert float(wanted.max()) == 0.75 and bool((wanted.diff() > 0).all())


@pytest.mark.parametrize("codes", CODES, ids=str)
@given(scale=st.floats(2.0**-90, 2.0**127, width=32), chance=st.integers(0, 2**16 - 1))
@settings(deadline=None)
def test_a_code_keeps_its_code_whatever_the_chance(codes: torch.dtype, scale: float, chance: int) -> None:
    every = all_codes(codes)
    values = fused.dequantize(every, torch.tensor([scale]))
    for chances in (None, torch.full((every.numel(),), chance)):
        again, scales = fused.quantize(values, codes, chances)
        assert torch.equal(again, every)
        assert float(scales) == float(torch.tensor(scale))


numbers = st.floats(-(2.0**50), 2.0**50, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-40)


@pytest.mark.parametrize("codes", CODES, ids=str)
@given(data=st.lists(numbers, min_size=1, max_size=600), chance=st.integers(0, 2**16 - 1) | st.none())
@example(data=[0.0] * 300, chance=7)
@example(data=[1e15, 1e-12, 0.0, -1e-12], chance=0)
@settings(deadline=None)
def test_a_value_goes_to_one_of_its_two_codes(codes: torch.dtype, data: list[float], chance: int | None) -> None:
    """One of the two codes around it, or the nearer; the largest of a block is exact, no second moment is made 0."""
    values = torch.tensor(data) if codes is torch.int8 else torch.tensor(data).abs()
    chances = None if chance is None else torch.full((len(data),), chance)
    made, scales = fused.quantize(values, codes, chances)
    again = fused.dequantize(made, scales)
    assert scales.shape == (fused.blocks_of(len(data)),)
    assert made.dtype is codes and made.shape == values.shape
    grid = np.unique(np.abs(meanings(codes)))
    for block, scale in zip(range(0, len(data), 256), scales, strict=True):
        old, new = values[block : block + 256].double().abs(), again[block : block + 256].double().abs()
        assert float(scale) == float(old.max())
        assert torch.equal(new[old == old.max()].float(), values[block : block + 256].abs()[old == old.max()])
        share = (old / max(float(scale), 1e-300)).numpy()
        above = np.clip(np.searchsorted(grid, share), 1, len(grid) - 1)
        spacing = torch.from_numpy(grid[above] - grid[above - 1]) * float(scale)
        least = torch.from_numpy(share) < grid[1]  # of a second moment, code 1 always
        bound = torch.where(least | (chance is not None), spacing, spacing / 2)
        assert bool(((new - old).abs() <= bound * (1 + 1e-3) + old * 1e-6).all())
    assert bool((again.sign() * values.sign() >= 0).all())
    if codes is torch.uint8:
        assert torch.equal(made > 0, values > 0)


@pytest.mark.slow
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_chance_is_right_in_the_mean(codes: torch.dtype) -> None:
    values = torch.tensor([1.0, 0.9, 0.3, 1e-2, 1e-4] + ([-0.3, -2e-5, 3e-7] if codes is torch.int8 else [3e-9]))
    every = torch.arange(2**16)
    total = torch.zeros(len(values), dtype=torch.float64)
    for chance in every.split(2**12):
        for one in chance[::16]:
            made = fused.quantize(values, codes, torch.full((len(values),), int(one)))
            total += fused.dequantize(*made).double()
    mean = total / 2**12
    assert torch.allclose(mean, values.double(), rtol=1e-4, atol=2.0**-29), mean  # of 4096 chances


def followed(nearest: bool) -> float:
    """The root of a second moment in 8 bits over that in float32, for elements whose gradients fell to a tenth."""
    torch.manual_seed(0)
    size, steps = 1024, 3500
    deviation = torch.randn(size).exp()
    exact = torch.zeros(size)
    codes, scales = fused.quantize(exact, torch.uint8)
    for step in range(steps):
        if step == 500:
            deviation[::2] *= 0.1
        square = (torch.randn(size) * deviation).square()
        exact = 0.999 * exact + 0.001 * square
        moved = 0.999 * fused.dequantize(codes, scales) + 0.001 * square
        codes, scales = fused.quantize(moved, torch.uint8, None if nearest else torch.randint(2**16, (size,)))
    return float((fused.dequantize(codes, scales) / exact).sqrt()[::2].median())


def test_an_element_that_falls_silent_is_forgotten() -> None:
    """Rounding to nearest would keep its second moment, and with it a step that is several times too small."""
    assert followed(nearest=False) == pytest.approx(1.0, abs=0.1)
    assert followed(nearest=True) > 2


@over(kind=KINDS, options=SETTINGS)
def test_a_step_is_that_of_adam_on_what_the_codes_mean(kind: str, options: dict[str, Any]) -> None:
    run = Run(kind, options, awkward())
    for i in range(4):
        grads = gradients(run.params, torch.bfloat16, i, same_layout=i != 1)
        wide = [p.clone() for p in run.masters()]
        first, second = (
            [fused.dequantize(c, s) for c, s in zip(run.moments[k], run.moments[k + 1], strict=True)] for k in (0, 2)
        )
        step = run.step.clone()
        with by_operators():
            run.take([g.clone() for g in grads], torch.tensor(0.5))
            fused.adam_(wide, grads, first, second, [], None, step, amsgrad=False, factor=torch.tensor(0.5), **options)
        assert torch.equal(step, run.step)
        rounds = {"nearest": 2.0**-8, "stochastic": 2.0**-7, "split24": 2.0**-15}.get(kind, 0.0)
        for mine, theirs in zip(run.masters(), wide, strict=True):
            assert bool(((mine - theirs).abs() <= theirs.abs() * rounds + 2.0**-23).all())
        for k, moments in ((0, first), (2, second)):
            for codes, scales, moment in zip(run.moments[k], run.moments[k + 1], moments, strict=True):
                again = fused.dequantize(codes, scales)
                if moment.numel():
                    gap = (again - moment).abs() / moment.abs().max()
                    assert float(gap.max()) <= 0.0626  # the largest spacing of codes


def test_chances_depend_on_seed_step_and_place_alone() -> None:
    with by_operators():
        runs = [Run("stochastic", OPTIONS, awkward()[:7], seed=seed) for seed in (1, 1, 2)]
        for run in runs:
            for i in range(3):
                run.take(gradients(run.params, torch.bfloat16, i))
    assert all(torch.equal(a, b) for a, b in zip(runs[0].everything(), runs[1].everything(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(runs[0].everything(), runs[2].everything(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_found_writes_nothing(kind: str) -> None:
    with by_operators():
        check_found_writes_nothing(Run(kind, OPTIONS, awkward()))


def test_no_step_is_enormous() -> None:
    """Gradients 18 decades apart in a block: Adam's steps stay below 3; a second moment of 0 would make one of 1e8."""
    torch.manual_seed(0)
    with by_operators():
        run = Run("float32", {**OPTIONS, "lr": 1.0}, [torch.zeros(2048)])
        spread = torch.logspace(-12, 6, 2048)[torch.randperm(2048)]
        for i in range(50):
            grads = gradients(run.params, torch.float32, i)
            before = run.params[0].clone()
            run.take([grads[0] * spread])
            assert float((run.params[0] - before).abs().max()) < 50
