"""Schedules of the loss scale on a GPU: nothing waits, a CUDA graph holds a whole update, and figures are the CPU's."""

from __future__ import annotations

import math

import pytest
import torch

from preamp.kernels import Reading
from preamp.scaling import DynamicScale, HysteresisScale, LossScale, WindowScale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

AMAX = [3.0, math.inf, math.inf, 60000.0, 2.0**-9, 0.0, 17.0, 900.0, math.inf, 1.0] * 3


def reading(amax: float, device: str) -> Reading:
    found = torch.tensor(float(not math.isfinite(amax)), device=device)
    figures = [torch.tensor(value, device=device) for value in (amax, 7.0, 100.0)]
    return Reading(found, found, found.bool().reshape(1), 1000, *figures)


@pytest.mark.parametrize("kind", [DynamicScale, HysteresisScale, WindowScale], ids=lambda k: k.kind)
def test_an_update_in_a_cuda_graph_is_that_of_the_cpu(kind: type[LossScale]) -> None:
    on_cpu, on_gpu = kind(), kind()
    told = reading(1.0, "cuda")
    assert told.amax is not None
    stream = torch.cuda.Stream()
    start = on_gpu.state_dict()
    with torch.cuda.stream(stream):
        on_gpu.after_step(told.found, told)  # warm up, then back to the start: tensors stay where they are
    torch.cuda.synchronize()
    on_gpu.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        on_gpu.after_step(told.found, told)
    on_gpu.load_state_dict(start)
    for amax in AMAX:
        now = reading(amax, "cpu")
        told.found.copy_(now.found)
        told.amax.copy_(now.amax)
        graph.replay()
        on_cpu.after_step(now.found, now)
        assert float(on_gpu.current(torch.device("cuda", 0))) == float(on_cpu.current(torch.device("cpu")))


@pytest.mark.parametrize("kind", [DynamicScale, HysteresisScale, WindowScale], ids=lambda k: k.kind)
def test_nothing_waits(kind: type[LossScale]) -> None:
    scale, told = kind(), reading(2.0, "cuda")
    scale.after_step(told.found, told)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            scale.after_step(told.found, told)
            scale.after_step(told.found)
            scale.inverse(told.found.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
