"""What contenders of torch do by hand: float32 masters as O2 had them for Apex, and a CUDA graph of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm


class ByHand:
    """A model in float16 with its batch norms in float32, and float32 masters that the optimizer steps.

    `make` makes the optimizer of the masters. Gradients and weights are copied by one foreach call each.
    """

    def __init__(self, model: nn.Module, make: Callable[[Iterable[Parameter]], torch.optim.Optimizer]) -> None:
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.half()
        self._low = [p for p in model.parameters() if p.requires_grad]
        self.masters = [Parameter(p.detach().float()) for p in self._low]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = make(self.masters)

    def unpack(self) -> None:
        """Give the masters the gradients of the model, and the model none."""
        pairs = zip(self.masters, self._low, strict=True)
        grads = [(m.grad, p.grad) for m, p in pairs if m.grad is not None and p.grad is not None]
        torch._foreach_copy_([master for master, _ in grads], [low for _, low in grads])
        for param in self._low:
            param.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' values, which after a skipped step are what it has."""
        torch._foreach_copy_(list[Tensor](self._low), list[Tensor](self.masters))


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
            return self._on_side_stream(*inputs)
        if self._graph is None:
            self._capture(*inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._result

    def _on_side_stream(self, *inputs: Tensor) -> Any:
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
