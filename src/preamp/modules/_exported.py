"""Programs that `torch.export` makes of a model in full precision: the tensors they share are 16-bit afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.export import ExportedProgram

_init, _module = ExportedProgram.__init__, ExportedProgram.module


class Exports:
    """Notes programs that are exported, and modules made of them, while a model has its float32 weights, until `end`.

    torch keeps no list of programs, and to look for them among all objects takes half a second in a large process.
    """

    _open: ClassVar[set[Exports]] = set()

    def __init__(self) -> None:
        self._tables: list[dict[str, Any]] = []
        """Where programs and modules keep parameters and buffers by name."""
        self._open.add(self)
        ExportedProgram.__init__, ExportedProgram.module = _noted_init, _noted_module  # type: ignore[assignment]

    def end(self, models: Iterable[nn.Module]) -> None:
        """Have programs that hold tensors of these models keep copies of the values they have now."""
        self._open.discard(self)
        if not self._open:
            ExportedProgram.__init__, ExportedProgram.module = _init, _module  # type: ignore[method-assign]
        if not self._tables:
            return
        shared = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
        copies: dict[int, Tensor] = {}
        for table in self._tables:
            for name, tensor in table.items():
                if id(tensor) in shared:
                    table[name] = copies.setdefault(id(tensor), _copy(tensor))


@functools.wraps(_init)
def _noted_init(program: Any, *args: Any, **kwargs: Any) -> None:
    _init(program, *args, **kwargs)
    for each in Exports._open:
        each._tables.append(program.state_dict)


@functools.wraps(_module)
def _noted_module(program: Any, *args: Any, **kwargs: Any) -> Any:
    made = _module(program, *args, **kwargs)
    for each in Exports._open:
        each._tables += [table for part in made.modules() for table in (part._parameters, part._buffers)]
    return made


def _copy(tensor: Tensor) -> Tensor:
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
