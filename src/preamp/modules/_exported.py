"""Programs that `torch.export` makes of a model in full precision: the tensors they share are 16-bit afterwards."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.export import ExportedProgram

_TRACE = "torch.export._trace"


class Exports:
    """Notices programs that are exported while a model has its float32 weights, until `end`.

    torch keeps no list of programs. To look for them among all objects takes half a second in a large process, so that
    it is only done where one was made.
    """

    _open: ClassVar[set[Exports]] = set()

    def __init__(self) -> None:
        self._made = _TRACE not in sys.modules  # torch imports it with the first export
        self._open.add(self)
        ExportedProgram.__init__ = _counted  # type: ignore[assignment, method-assign]

    def end(self, models: Iterable[nn.Module]) -> None:
        """Have programs that hold tensors of these models keep copies of the values they have now."""
        self._open.discard(self)
        if not self._open:
            ExportedProgram.__init__ = _init  # type: ignore[method-assign]
        if not self._made or _TRACE not in sys.modules:
            return
        shared = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
        copies: dict[int, Tensor] = {}
        for table in _tables():
            for name, tensor in table.items():
                if id(tensor) in shared:
                    table[name] = copies.setdefault(id(tensor), _copy(tensor))


_init = ExportedProgram.__init__


@functools.wraps(_init)
def _counted(program: Any, *args: Any, **kwargs: Any) -> None:
    for each in Exports._open:
        each._made = True
    _init(program, *args, **kwargs)


def _tables() -> Iterator[dict[str, Any]]:
    """Where programs, and the modules made of them, keep parameters and buffers by name.

    Other modules with a graph, which `torch.fx` traced, are the model itself or have its layers in them.
    """
    from torch.export._unlift import _StatefulGraphModule  # what ExportedProgram.module() makes

    for found in gc.get_objects():
        if issubclass(type(found), ExportedProgram):
            yield found.state_dict
        elif issubclass(type(found), _StatefulGraphModule):
            for part in found.modules():
                yield from (part._parameters, part._buffers)


def _copy(tensor: Tensor) -> Tensor:
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
