"""Programs that `torch.export` makes of a model in full precision: the tensors they share are 16-bit afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram


def give_programs_own_values(models: Iterable[nn.Module]) -> None:
    """Have every exported program that holds tensors of these models keep copies of the values they have now.

    torch keeps no list of programs: they are looked for among all objects, once this process has exported anything.
    """
    if "torch.export._trace" not in sys.modules:  # torch imports it with the first export
        return
    shared = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
    copies: dict[int, Tensor] = {}
    for table in _tables():
        for name, tensor in table.items():
            if id(tensor) in shared:
                table[name] = copies.setdefault(id(tensor), _copy(tensor))


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
