"""The fused steps and the reading of gradients on a CUDA device: right, without waiting for it, and in graphs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from preamp.kernels import Reading
from preamp.kernels.triton.tables import parts_of, ready_for_capture
from tests.kernels import calls as fused
from tests.kernels import test_muon as muon
from tests.kernels import test_parts as parts
from tests.kernels import test_read_kernel as reading
from tests.kernels.steps import (
    ADAM,
    CANCELLED,
    NAMES,
    SETTINGS,
    WITH_KERNELS,
    Run,
    awkward,
    by_operators,
    check_found_writes_nothing,
    check_kernels,
    far,
    gradients,
)  # fmt: skip

from .training import captured, no_waiting

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

LOWS = [None, torch.float16, torch.bfloat16]


def number(value: float) -> Tensor:
    return torch.tensor(value, device="cuda")


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize(("name", "options"), WITH_KERNELS, ids=NAMES[: len(WITH_KERNELS)])
def test_kernels_do_what_operators_do(name: str, options: dict[str, Any], low: torch.dtype | None) -> None:
    check_kernels(name, options, low, awkward("cuda", 500), ulp=8, but=CANCELLED)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), parts.LAYERWISE, ids=range(len(parts.LAYERWISE)))
def test_parts_are_stepped_as_the_whole(name: str, options: dict[str, Any], low: torch.dtype | None) -> None:
    parts.compare(name, options, low, "cuda")


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=NAMES)
def test_found_writes_nothing_and_nothing_waits(name: str, options: dict[str, Any], kernels: bool) -> None:
    params = awkward("cuda")
    with contextlib.nullcontext() if kernels else by_operators():
        check_found_writes_nothing(Run(name, options, params, [p.to(torch.bfloat16) for p in params]), no_waiting)


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=NAMES)
def test_a_captured_step_is_the_step(name: str, options: dict[str, Any]) -> None:
    """The gradients of a capture have addresses of their own, and later steps outside it must not disturb it."""
    params = awkward("cuda", 50)[1:8]
    options = {**options, "lr": number(float(options["lr"]))}
    run = Run(name, options, params, [p.to(torch.float16) for p in params])
    factor, found = number(0.5), number(0.0)
    other = run.twin()
    run.first = False  # the first step of gradient descent with momentum is another kernel
    twin = run.twin()

    def warm() -> None:
        for i in range(3):
            other.take(gradients(params, torch.float16, i), factor, found)

    replay = captured(lambda grads: run.take(grads, factor, found), params, torch.float16, warm)
    for i in range(6):
        values = gradients(params, torch.float16, 10 + i)
        found.fill_(float(i == 3))
        options["lr"].mul_(0.9)
        replay(values)
        twin.take(values, factor, found)
        other.take(values, factor, found)
        assert all(torch.equal(a, b) for a, b in zip(run.everything(), twin.everything(), strict=True)), i


@pytest.mark.parametrize("kind", ["split", "stochastic"])
def test_weights_without_masters(kind: str) -> None:
    masters = [torch.randn(n, device="cuda") for n in (1, 1000, 100_003)]

    def run() -> list[Tensor]:
        lows, bits = (list(half) for half in zip(*map(fused.split, masters), strict=True))
        states = [[torch.zeros_like(p) for p in masters] for _ in range(2)]
        step = number(0.0)
        for i in range(20):
            grads = gradients(masters, torch.bfloat16, i)
            options = {**ADAM, "factor": number(0.5), "found": number(float(i == 5))}
            if kind == "split":
                fused.adam_split_(lows, bits, grads, *states, [], step, **options)
            else:
                fused.adam_stochastic_(lows, grads, *states, [], step, seed=2**40 + 3, **options)
        assert float(step) == 19
        return [fused.join(w, b) for w, b in zip(lows, bits, strict=True)] if kind == "split" else lows

    ours = run()
    with by_operators():
        theirs = run()
    if kind == "split":
        assert far(ours, theirs) <= 8
    else:  # a last bit of float32 decides about rounding up once in thousands of times
        for a, b in zip(ours, theirs, strict=True):
            assert float((a != b).float().mean()) <= 1e-2
            assert torch.allclose(a.float(), b.float(), rtol=2.0**-6, atol=1e-3)


def test_split_steps_are_those_of_masters_bit_for_bit() -> None:
    masters = [torch.randn(n, device="cuda") for n in (1, 1000, 100_003)]
    lows, bits = (list(half) for half in zip(*map(fused.split, masters), strict=True))
    ours, theirs = ([[torch.zeros_like(p) for p in masters] for _ in range(2)] for _ in range(2))
    step, step_ = number(0.0), number(0.0)
    for i in range(200):
        grads = gradients(masters, torch.bfloat16, i)
        fused.adam_(masters, grads, *theirs, [], None, step_, **ADAM)
        fused.adam_split_(lows, bits, grads, *ours, [], step, **ADAM)
    assert all(torch.equal(fused.join(w, b), p) for w, b, p in zip(lows, bits, masters, strict=True))


READ: list[Callable[[], list[Tensor]]] = [
    lambda: [torch.randn(n, device="cuda").half() for n in (0, 1, 1000, 3_000_001)],
    lambda: [torch.randn(n, device="cuda") * 1e-5 for n in (5, 20_000_000)],
    lambda: [torch.full((20_000_001,), 1e-8, device="cuda").half(), torch.zeros(50_000_000, device="cuda").half()],
    lambda: [torch.full((3,), 1e30, device="cuda"), torch.randn(70_000, device="cuda").bfloat16()],
    lambda: [torch.full((300_000,), 1e-30, device="cuda")],
    lambda: [torch.randn(64, 64, 3, 3, device="cuda").to(memory_format=torch.channels_last),
             torch.randn(300, 300, device="cuda")[:, ::3]],
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(READ)))
def test_reading(case: int) -> None:
    from preamp.kernels.triton.read import read

    grads = READ[case]()
    reading.check(grads)
    with no_waiting():
        got = Reading(*read(grads))
    assert torch.equal(Reading(*read(grads)).norm, got.norm)
    first = next(grad for grad in grads if grad.numel())
    first[(0,) * first.dim()] = torch.nan
    reading.check(grads)


def test_reading_in_a_graph() -> None:
    from preamp.kernels.triton.read import read

    source = [torch.zeros(n, device="cuda", dtype=torch.float16) for n in (5, 100_000)]
    read([s * 1 for s in source])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = Reading(*read([s * 1 for s in source]))
    for value in (1.0, 0.5, math.inf):
        source[1].fill_(value)
        graph.replay()
        assert float(got.norm) == pytest.approx(value * math.sqrt(100_000))
        assert float(got.found) == float(value == math.inf)
        assert got.nonfinite.tolist() == [False, value == math.inf]


def test_captures_find_pinned_memory() -> None:
    """None can be had while a graph is captured, and each capture keeps what it has used."""
    kept = [torch.zeros(1000, device="cuda")]
    parts_of([kept], 256)
    for number in range(1, 5):
        ready_for_capture()
        kept.append(torch.zeros(1000, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (part,) = parts_of([kept[number:]], 256)
        graph.replay()
        assert part.table.tolist() == [[kept[number].data_ptr()], [0]]


def test_a_captured_step_of_muon_is_the_step_and_nothing_waits() -> None:
    params = [torch.randn(shape, device="cuda") for shape in ((64, 96), (96, 64), (64, 96))]
    runs = [([p.clone() for p in params], [torch.zeros_like(p) for p in params]) for _ in range(2)]
    options = {**muon.MUON, "lr": number(0.02), "factor": number(0.5), "found": number(0.0)}

    def take(run: Any, grads: Any) -> None:
        fused.muon_(run[0], grads, run[1], None, None, **options)

    def warm() -> None:
        other = [p.clone() for p in params], [torch.zeros_like(p) for p in params]
        zeros = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
        take(other, zeros), take(other, zeros)
        with no_waiting():
            take(other, zeros)

    replay = captured(lambda grads: take(runs[0], grads), params, torch.bfloat16, warm)
    for i in range(4):
        values = gradients(params, torch.bfloat16, i)
        options["found"].fill_(float(i == 2))
        replay(values)
        take(runs[1], values)
        for a, b in zip((*runs[0][0], *runs[0][1]), (*runs[1][0], *runs[1][1]), strict=True):
            assert torch.equal(a, b), i
