"""What a training run holds from step to step, in bytes, counted on its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..formats import name_of
from ..ledger import Masters, parameters_in
from ..modules import Conversion
from ..sharding import held_here

if TYPE_CHECKING:
    from ..report import Cell, Table

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The bytes of one kind and dtype."""

    kind: str
    """"parameters", "gradients", "masters", "states", "buffers" or "gradient buckets"."""
    dtype: torch.dtype
    """Of these tensors."""
    bytes: int
    """What they hold together."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of one process, by kind and dtype."""

    parameters: int
    """How many there are, of those that this process holds."""
    rows: tuple[MemoryRow, ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(row.bytes for row in self.rows)

    def bytes_of(self, kind: str) -> int:
        """The bytes of one kind; 0 where there are none.

        Args:
            kind: As `MemoryRow.kind` has it: "states".
        """
        return sum(row.bytes for row in self.rows if row.kind == kind)

    def to_table(self, title: str = "") -> Table:
        """The rows, and their sum."""
        from ..report import Column, Table  # not needed to train

        numbers = Column("bytes", align="right"), Column("size", "GiB", 3), Column("bytes a parameter", "", 2)
        cells = [self.cells(row.kind, name_of(row.dtype), row.bytes) for row in self.rows]
        return Table(title, ("kind", "dtype", *numbers), [*cells, self.cells("all", "", self.total)])

    def cells(self, kind: str, dtype: str, size: int) -> tuple[Cell, ...]:
        """A row of the table."""
        return kind, dtype, f"{size:,}", size / _GIB, size / max(self.parameters, 1)

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that strict JSON takes."""
        rows = [{"kind": row.kind, "dtype": name_of(row.dtype), "bytes": row.bytes} for row in self.rows]
        return {"parameters": self.parameters, "rows": rows, "total": self.total}


def memory_of(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer], masters: Masters, conversions: Iterable[Conversion],
    *, replicated: bool = False,
) -> Memory:  # fmt: skip
    """Count what models, their gradients, masters and optimizers hold in this process.

    Of a DTensor its shard counts. DistributedDataParallel keeps a second copy of the gradients, unless they are views
    of it; that is counted for wrappers among the models, and for all models if they are `replicated`.
    """
    models = list(models)
    parameters = list(dict.fromkeys(p for model in models for p in parameters_in(model)))
    sizes: dict[tuple[str, torch.dtype], int] = defaultdict(int)
    for kind, tensor in (
        *(held for parameter in parameters for held in masters.held(parameter)),
        *(("states", state) for optimizer in optimizers for state in _states(optimizer)),
        *(("buffers", buffer) for model in models for buffer in model.buffers()),
        *(("buffers", buffer) for conversion in conversions for buffer in conversion.kept_buffers()),
        *(("gradient buckets", gradient) for model in models for gradient in _bucketed(model, replicated)),
    ):
        here = held_here(tensor)
        sizes[kind, here.dtype] += here.numel() * here.element_size()
    rows = tuple(MemoryRow(kind, dtype, size) for (kind, dtype), size in sizes.items() if size)
    return Memory(sum(held_here(parameter).numel() for parameter in parameters), rows)


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        every = state.values() if isinstance(state, dict) else (state,)  # which some keep for all, under a name
        yield from (value for value in every if isinstance(value, Tensor))


def _bucketed(model: nn.Module, replicated: bool) -> Iterator[Tensor]:
    if replicated or (isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view):
        yield from (p.grad for p in model.parameters() if p.grad is not None)
