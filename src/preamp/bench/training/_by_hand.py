"""Master weights written by hand with torch's parts, as O2 was for Apex: the best one can do without a library."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm


class ByHand:
    """A model in float16 with its batch norms in float32, and float32 masters that the optimizer steps.

    `make` makes the optimizer of the masters. Gradients and weights travel by one foreach copy each.
    """

    def __init__(self, model: nn.Module, make: Callable[[Iterable[Parameter]], torch.optim.Optimizer]) -> None:
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    if tensor.is_floating_point():
                        tensor.data = tensor.data.half()
        self._low = [p for p in model.parameters() if p.requires_grad]
        self._masters = [Parameter(p.detach().float()) for p in self._low]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self.optimizer = make(self._masters)

    def unpack(self) -> None:
        """Give the masters the gradients of the model, and the model none."""
        torch._foreach_copy_([m.grad for m in self._masters if m.grad is not None], [_grad(p) for p in self._low])
        for param in self._low:
            param.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' values, which after a skipped step are what it has."""
        torch._foreach_copy_(list[Tensor](self._low), list[Tensor](self._masters))

    @property
    def masters(self) -> list[Parameter]:
        """What the optimizer steps."""
        return self._masters


def _grad(param: Parameter) -> Tensor:
    assert param.grad is not None, "every parameter of these networks has a gradient"
    return param.grad
