"""LAMB and NovoGrad where each process has parts of the tensors: together they step as one that has all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from . import calls as fused
from .steps import LAMB, SETTINGS, Run, far

LAYERWISE = [(name, options) for name, options in SETTINGS if name in ("lamb", "novograd")]
SIZES = (3000, 40, 1, 7)
CUTS = ((1025, 2100), (0, 40), (1, 1), (3, 3))
"""Where three processes' parts of each tensor end; some have none of it."""


def cut(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """What each of three processes has."""
    return [[t.tensor_split(ends)[i].clone() for t, ends in zip(tensors, CUTS, strict=True)] for i in range(3)]


def take_together(runs: list[Run], grads: list[list[Tensor]], found: Tensor, **given: Any) -> None:
    """A step of processes that wait for each other: first each says what it found, then all get the same."""
    said: list[Tensor] = []
    largest: set[bool] = set()

    def tell(numbers: Tensor, most: bool) -> Tensor:
        said.append(numbers.clone())
        largest.add(most)
        return numbers

    def act(run: Run, own: list[Tensor], whole: Callable[[Tensor, bool], Tensor]) -> None:
        run.options = {**run.options, **given, "shard_sum": whole}
        run.take([g.clone() for g in own], torch.tensor(0.5, device=found.device), found)

    for run, own in zip(runs, grads, strict=True):
        act(run.twin(), own, tell)
    if not said:
        all_numbers = torch.empty(0)
    else:
        assert {tuple(numbers.shape) for numbers in said} == {tuple(said[0].shape)}
        assert len(said) == len(runs)  # who has only empty parts speaks too, or the others wait for ever
        assert len(largest) == 1
        all_numbers = torch.stack(said).amax(0) if largest.pop() else torch.stack(said).sum(0)
    for run, own in zip(runs, grads, strict=True):
        act(run, own, lambda numbers, most: all_numbers)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), LAYERWISE, ids=[f"{name}-{i}" for i, (name, _) in enumerate(LAYERWISE)])
def test_parts_are_stepped_as_the_whole(name: str, options: dict[str, Any], low: torch.dtype | None) -> None:
    compare(name, options, low, "cpu")


@pytest.mark.parametrize(("name", "options"), LAYERWISE, ids=[f"{name}-{i}" for i, (name, _) in enumerate(LAYERWISE)])
def test_a_skipped_step_tells_no_number_that_nobody_wrote(name: str, options: dict[str, Any]) -> None:
    told = []

    def whole(numbers: Tensor, most: bool) -> Tensor:
        told.append(numbers.clone())
        return numbers

    norm = {"grad_norm": torch.tensor(1.0)} if name == "lamb" else {}
    run = Run(name, {**options, **norm, "shard_sum": whole}, [torch.randn(size) for size in SIZES], None)
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN then
    try:
        run.take([torch.randn(size) for size in SIZES], torch.tensor(0.5), torch.tensor(1.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(numbers.isfinite().all()) for numbers in told)


def compare(name: str, options: dict[str, Any], low: torch.dtype | None, device: str) -> None:
    """Three processes' parts beside the whole."""
    torch.manual_seed(2)
    params = [torch.randn(size, device=device) for size in SIZES]
    twins = None if low is None else [p.to(low) for p in params]
    parts = [Run(name, options, own, None if low is None else [p.to(low) for p in own]) for own in cut(params)]
    alone = Run(name, options, params, twins)
    for step in range(4):
        grads = [torch.randn(size, device=device) * 3 for size in SIZES]
        found = torch.tensor(float(step == 2), device=device)
        norm = {"grad_norm": torch.cat(grads).norm() * 0.5} if name == "lamb" else {}
        alone.take([g.clone() for g in grads], torch.tensor(0.5, device=device), found)
        take_together(parts, cut(grads), found, **norm)
        joined = [torch.cat(own) for own in zip(*(run.params for run in parts), strict=True)]
        assert far(joined, alone.params) <= 8  # units of float32; sums are taken in other orders
        for run in parts:
            assert far([run.step], [alone.step]) == 0
            if name == "novograd":
                assert far([run.norms], [alone.norms]) <= 8
            for p, published in zip(run.params, run.lows or [], strict=low is not None):
                assert published is not None and torch.equal(published, p.to(published.dtype))


def test_without_the_others_the_trust_ratio_is_another() -> None:
    """What the test above would not see, were the numbers of parts not put together."""
    torch.manual_seed(2)
    params = [torch.randn(size) for size in SIZES]
    options = {**LAMB, "max_grad_norm": None, "shard_sum": lambda numbers, most: numbers}
    part, alone = Run("lamb", options, cut(params)[0]), Run("lamb", {**options, "shard_sum": None}, params)
    grads = [torch.randn(size) for size in SIZES]
    part.take(cut(grads)[0])
    alone.take(grads)
    assert far(part.params[:1], [alone.params[0][: CUTS[0][0]]]) > 1000


def test_a_limit_needs_the_norm_of_everything() -> None:
    p = [torch.ones(3)]
    with pytest.raises(ValueError, match="need grad_norm"):
        fused.lamb_(p, p, p, p, None, torch.zeros(()), **{**LAMB, "shard_sum": lambda numbers, most: numbers})
    assert torch.equal(p[0], torch.ones(3))
