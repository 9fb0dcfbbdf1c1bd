"""Adam with moments in 8 bits on a CUDA device: the kernel beside the reference, no waiting, in graphs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from preamp.optim import AdamW
from tests.kernels.eight_bits import KINDS, OPTIONS, SETTINGS, Run
from tests.kernels.steps import CANCELLED, awkward, by_operators, check_found_writes_nothing, far, gradients

from .training import no_waiting

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


def number(value: float) -> Tensor:
    return torch.tensor(value, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", SETTINGS, ids=["adam", "uphill", "adamw"])
def test_the_kernel_does_what_operators_do(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """One step from equal states: codes differ by one, where a last bit of float32 decides, once in thousands."""
    run = Run(kind, options, awkward("cuda", 500)[:7])
    twin = run.twin()
    for i in range(4):
        grads = gradients(run.params, dtype, i, same_layout=i != 1)
        with by_operators():
            twin.take([g.clone() for g in grads], number(0.3), number(0.0))
        run.take(grads, number(0.3), number(0.0) if i else None)
        if kind in ("float32", "published", "split"):
            assert far(run.masters(), twin.masters(), but=CANCELLED) <= 8
        for mine, theirs in zip(run.moments, twin.moments, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                if a.dtype is torch.float32:
                    assert torch.allclose(a, b, rtol=1e-5, atol=0)
                elif a.numel():
                    apart = (a.int() - b.int()).abs()
                    assert int((apart > 1).sum()) <= CANCELLED * a.numel()
                    assert int((apart > 0).sum()) <= 1 + 1e-3 * a.numel()
        for a, b in zip(twin.everything(), run.everything(), strict=True):
            a.copy_(b)  # the next step from one state
    assert float(run.step) == 4


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_found_writes_nothing_and_nothing_waits(kind: str, kernels: bool) -> None:
    with contextlib.nullcontext() if kernels else by_operators():
        check_found_writes_nothing(Run(kind, OPTIONS, awkward("cuda")[:7]), no_waiting)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_the_step(kind: str) -> None:
    run = Run(kind, {**OPTIONS, "lr": number(1e-2)}, awkward("cuda", 50)[1:7])
    twin = run.twin()
    source = [torch.zeros_like(p, dtype=torch.bfloat16) for p in run.params]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for each in (run, twin):
            each.take(gradients(run.params, torch.bfloat16, 0))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.take([s * 1 for s in source])
    for i in range(5):
        values = gradients(run.params, torch.bfloat16, 10 + i)
        for s, value in zip(source, values, strict=True):
            s.copy_(value)
        graph.replay()
        twin.take(values)
        assert all(torch.equal(a, b) for a, b in zip(run.everything(), twin.everything(), strict=True)), i


def test_memory_of_a_large_parameter() -> None:
    """What the allocator holds for weight, gradient and states of 64 Mi parameters, split masters: 8.03 bytes each."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    param = Parameter(torch.zeros(2**13, 2**13, device="cuda", dtype=torch.bfloat16))
    optimizer = AdamW([param], master="split", states="8bit")
    param.grad = torch.ones_like(param)
    optimizer.step()
    held = (torch.cuda.memory_allocated() - before) / param.numel()
    assert held == pytest.approx(8.03, abs=0.02)
