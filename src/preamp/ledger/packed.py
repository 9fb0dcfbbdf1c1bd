"""Packed storage: many small float32 parameters in one tensor, so that a step on a CPU is one call on long rows.

A step of a thousand small tensors is mostly call overhead, since each call wakes the threads. Packed they need one
call. States are packed permanently; parameters and gradients are packed for each step. A packed state has a storage of
its own that ends where it ends: a file format or a shared-memory check sees nothing of the others.

torch's fused kernels round the elements after the last full vector register differently, so long rows are padded with
zeros to fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import batches
from ..sharding import is_sharded
from .leaves import Shown, turnable

SMALL = 2048
"""Tensors with up to this many entries are packed; copying longer ones takes longer than a call."""

PIECE = 2**20
"""Entries that are copied in, stepped and copied out at a time, so that they stay in the cache."""

LINE = 16
"""float32 entries in 64 bytes: the largest vector register, a cache line, and torch's alignment of memory."""

_DTYPE = attrgetter("dtype")

_MISMATCH = (
    "parameters and gradients differ in shape from those of the step before: were some resized where they lie, after "
    "the backward pass? Step again after the next one"
)


class ShapeMismatch(OptimizerError):
    """Gradients or parameters have other lengths than those that were packed."""


def is_packable(param: Parameter) -> bool:
    """Whether a parameter may be packed: small, float32, contiguous, on the CPU."""
    small = 0 < param.numel() <= SMALL and param.dim() > 0
    plain = small and param.dtype is torch.float32 and param.device.type == "cpu" and not is_sharded(param)
    return plain and param.is_contiguous()


def padded(entries: int) -> int:
    """The length of a row, padded to full vector registers."""
    return -(-entries // LINE) * LINE


def order(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """The sort key of packed tensors: neighbours with equal rows can be copied by one call."""
    return tuple(tensor.shape[1:]), tensor.shape[0]


class Packed:
    """One tensor for some parameters, and one for each of their states.

    `params`: in `order`. `owner`: that of `Shown`. `scratch`: the memory that parameters are copied to, shared by
    several of these in turn.
    """

    def __init__(
        self, params: Sequence[Parameter], rows: Sequence[dict[str, Any]], names: Sequence[str], owner: Any,
        scratch: Tensor,
    ) -> None:  # fmt: skip
        self._params = list[Tensor](params)
        self._entries = sum(param.numel() for param in params)
        self.param = scratch[: padded(self._entries)]
        self._views = torch._C._nn.unflatten_dense_tensors(self.param, self._params)
        self.states: dict[str, list[Tensor]] = {}
        self._pieces: list[Tensor] = []
        for name in names:
            own = self._packed([row[name] for row in rows])
            pieces = list(_pieces(own, params))
            for row, piece in zip(rows, pieces, strict=True):
                row[name] = piece
            self.states[name] = [own]
            self._pieces += pieces
        self._gradient = torch.zeros_like(self.param)
        self._padding = self._gradient[self._entries :]
        self._runs = list(_runs(params))
        self._param_rows, self._gradient_rows = self._by_rows(self.param), self._by_rows(self._gradient)
        self._shown = Shown(self._pieces, owner, others=2)
        self._turnable = list(filter(turnable, params))

    def holds(self) -> bool:
        """Whether parameters may still be packed, and no state has moved."""
        if not all(map(Tensor.is_contiguous, self._turnable)) or set(map(_DTYPE, self._params)) != {torch.float32}:
            return False
        return self._shown.are_where_they_were(self._pieces)

    def take_in(self) -> None:
        """Copy the parameters in."""
        self._copy(self._params, self._param_rows)

    def give_out(self) -> None:
        """Copy the parameters back."""
        torch._foreach_copy_(self._params, self._views)

    def gathered(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients packed into one tensor, in the order of the parameters; it is reused at every step."""
        self._copy(gradients, self._gradient_rows)
        self._padding.zero_()  # a factor that is not finite turns zeros into NaN
        return self._gradient

    def _by_rows(self, together: Tensor) -> list[Tensor]:
        """The part of each run in `together`, with the run's rows."""
        sizes = [sum(p.numel() for p in self._params[begin:end]) for begin, end in self._runs]
        parts = together[: self._entries].split(sizes)
        return [
            part.view(-1, *self._params[begin].shape[1:]) for part, (begin, _) in zip(parts, self._runs, strict=True)
        ]

    def _packed(self, values: Sequence[Tensor]) -> Tensor:
        """A tensor of all values, and zeros behind them."""
        together = values[0].new_zeros(padded(self._entries))
        views = torch._C._nn.unflatten_dense_tensors(together, list(values))
        torch._foreach_copy_(list(views), list(values))
        return together

    def _copy(self, tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Pack tensors: concatenating takes half the time of as many copies."""
        with torch.no_grad():
            for (begin, end), part in zip(self._runs, rows, strict=True):
                shape = part.shape
                try:
                    torch.cat(tensors[begin:end], out=part)  # type: ignore[arg-type]
                except (RuntimeError, UserWarning) as error:  # torch warns of what it makes room for
                    raise ShapeMismatch(f"{_MISMATCH} ({error})") from error
                if part.shape != shape:  # torch makes room for more
                    raise ShapeMismatch(_MISMATCH)


def _runs(params: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Where stretches of parameters begin and end that one call copies: with like rows, of one size or few entries."""
    begin = 0
    for _, run in groupby(params, lambda param: param.shape[1:]):
        sizes = list(map(Tensor.numel, run))
        for part in batches(sizes):
            yield begin + part.start, begin + part.stop
        begin += len(sizes)


def _pieces(together: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Parts of a tensor with the shapes of others, each with a storage that begins and ends where it does."""
    memory, begin = together.untyped_storage(), 0
    for other in like:
        yield together.new_empty(0).set_(memory[begin : begin + other.nbytes], 0, other.shape, other.stride())
        begin += other.nbytes
