"""A CUDA graph of a step by torch's means alone: for contenders that have no session to capture it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Graphed:
    """A function of tensors that is replayed: `warm_up` calls run as written, the next one is captured.

    A replay copies its arguments to where those of the capture lay, and gives the capture's own result. On a device
    without CUDA graphs every call runs as written.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, warm_up: int = 3) -> None:
        self._function, self._left = function, warm_up
        self._device = device
        self._graph: Any = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Any = None
        self._stream: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """One call, with tensors like those of the calls before."""
        if self._device.type != "cuda":
            return self._function(*inputs)
        if self._left > 0:
            self._left -= 1
            return self._aside(*inputs)
        if self._graph is None:
            self._capture(*inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._result

    def _aside(self, *inputs: Tensor) -> Any:
        # not on the default stream, which cannot be captured; on one for all calls, since streams share no free memory
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = self._function(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def _capture(self, *inputs: Tensor) -> None:
        self._inputs = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # casts of weights must be made by the graph, not found
        with torch.cuda.graph(graph):
            self._result = self._function(*self._inputs)
        self._graph = graph
