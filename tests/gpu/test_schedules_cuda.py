"""Schedules of the loss scale on a GPU: nothing waits, a CUDA graph holds a whole update, and figures are the CPU's."""

from __future__ import annotations

import pytest
import torch

from preamp.scaling import DynamicScale, HysteresisScale, LossScale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FOUND = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0] * 3


@pytest.mark.parametrize("kind", [DynamicScale, HysteresisScale], ids=lambda k: k.kind)
def test_an_update_in_a_cuda_graph_is_that_of_the_cpu(kind: type[LossScale]) -> None:
    on_cpu, on_gpu = kind(), kind()
    found = torch.zeros((), device="cuda")
    stream = torch.cuda.Stream()
    start = on_gpu.state_dict()
    with torch.cuda.stream(stream):
        on_gpu.after_step(found)  # warm up, then back to the start: tensors stay where they are
    torch.cuda.synchronize()
    on_gpu.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        on_gpu.after_step(found)
    on_gpu.load_state_dict(start)
    for now in FOUND:
        found.fill_(now)
        graph.replay()
        on_cpu.after_step(torch.tensor(now))
        assert float(on_gpu.current(torch.device("cuda", 0))) == float(on_cpu.current(torch.device("cpu")))
