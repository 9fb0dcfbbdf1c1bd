"""Adam with moments in 8 bits on a CUDA device: the kernel beside the reference, no waiting, in graphs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from preamp.optim import AdamW
from tests.kernels.eight_bits import KINDS, OPTIONS, SETTINGS, Run, check_kernels
from tests.kernels.steps import CANCELLED, awkward, by_operators, check_found_writes_nothing, gradients

from .training import captured, no_waiting

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


def number(value: float) -> Tensor:
    return torch.tensor(value, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", SETTINGS, ids=["adam", "uphill", "adamw"])
def test_the_kernel_does_what_operators_do(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check_kernels(kind, options, dtype, awkward("cuda", 500)[:7], but=CANCELLED)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_found_writes_nothing_and_nothing_waits(kind: str, kernels: bool) -> None:
    with contextlib.nullcontext() if kernels else by_operators():
        check_found_writes_nothing(Run(kind, OPTIONS, awkward("cuda")[:7]), no_waiting)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_the_step(kind: str) -> None:
    run = Run(kind, {**OPTIONS, "lr": number(1e-2)}, awkward("cuda", 50)[1:7])
    twin = run.twin()

    def warm() -> None:
        for each in (run, twin):
            each.take(gradients(run.params, torch.bfloat16, 0))

    replay = captured(run.take, run.params, torch.bfloat16, warm)
    for i in range(5):
        values = gradients(run.params, torch.bfloat16, 10 + i)
        replay(values)
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
