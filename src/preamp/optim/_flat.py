"""Flat storage: many small parameters in one tensor, so that a step on a CPU is one call on long rows.

A step of a thousand small tensors is mostly calls, each of which wakes the threads. Laid side by side they are one.
States lie there for good; gradients are copied together at each step, and so are parameters, in and out, unless they
are laid there for good as well. These stay the objects they were. What lies there has a storage of its own that ends
where it ends: a file format or a shared-memory check sees nothing of the others.

To lay a parameter somewhere takes it away from whatever else refers to its memory: views made before, arrays of NumPy,
other processes. So that is done unasked only where there is nothing of the kind, which storages count. Whether it is
done makes no difference to any bit. Torch's fused kernels round what follows the last full vector register otherwise
than the rest, so that the long rows end in zeros that fill it. And matrices stay aligned as torch allocates them, since
MKL's products may depend on it: those that do not fill whole cache lines are laid with gaps between, like ones at equal
distances, and are copied in and out, or added to, as rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import OptimizerError
from ..multi_tensor import Shown, count_writes, stretches, turnable
from ..sharding import is_sharded

SMALL = 16384
"""Entries up to which a tensor is stepped beside others: beyond, copying its gradient costs more than a call."""
TINY = 2048
"""Entries up to which that pays even if every parameter has to be copied in and out."""

PIECE = 2**20
"""Entries that are copied in, stepped and copied out at a time."""

CACHED = 2**18
"""Entries that are laid before they are looked at: a processor's own cache holds them, and threads are woken once."""

LINE = 16
"""float32 entries of 64 bytes: the largest vector register, a cache line, and to what torch aligns its memory."""

_DTYPE = attrgetter("dtype")

Look = Callable[[list[Tensor]], None]

_MISMATCH = (
    "parameters and gradients differ in shape from those of the step before: were some resized where they lie, after "
    "the backward pass? Step again after the next one"
)

Lying = Literal["laid", "spaced", "copied", "apart"]
"""Side by side for good, the same with gaps between, side by side for the length of a step, each by itself."""


def lying_of(param: Parameter, flat: bool | None, *, movable: bool, lent: bool) -> Lying:
    """How a parameter is stepped; only small ones lie among others: float32, contiguous, on the CPU.

    `flat`: the optimizer's argument. Where it leaves it open: `movable`, whether parameters may be moved, and `lent`,
    whether a session puts the float32 tensor in their place for some steps, so that they can never be.
    """
    size = param.numel()
    small = flat is not False and 0 < size <= (TINY if lent and not flat else SMALL) and param.dim() > 0
    plain = small and param.dtype is torch.float32 and param.device.type == "cpu" and not is_sharded(param)
    if not plain or not param.is_contiguous():
        return "apart"
    if flat or (movable and not lent and _is_alone(param)):
        return "spaced" if param.dim() > 1 and size % LINE else "laid"
    return "copied"


_moved: Any = WeakTensorKeyDictionary()
"""Where parameters were moved to: the address, for as long as they lie there."""


def _is_alone(param: Tensor) -> bool:
    """Whether nothing but this tensor refers to its memory, so that it can be moved without anyone's notice.

    Memory that torch did not allocate, which has no other size either, may be an array's.
    """
    if type(param) not in (Parameter, Tensor):
        return False
    storage = param.untyped_storage()
    own = storage.resizable() or _moved.get(param) == param.data_ptr()
    alone = storage.nbytes() == param.nbytes and not storage.is_shared()
    return own and alone and _users(storage) == _users_of_one()


def _users(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return -1 if count is None else int(count(storage._cdata))


@cache
def _users_of_one() -> int:
    """What is counted for a storage that one tensor uses; 0, which nothing has, where torch does not count."""
    one = torch.empty(1, device="cpu")
    return max(_users(one.untyped_storage()), 0)


def padded(entries: int) -> int:
    """How long a row is that ends in full vector registers."""
    return -(-entries // LINE) * LINE


def order(tensor: Tensor) -> tuple[bool, tuple[int, ...], int]:
    """What tensors are sorted by that are to lie side by side: first those after which a cache line begins, and among
    them such with like rows, which can be laid one behind the other by one call.
    """
    return tensor.numel() % LINE != 0, tuple(tensor.shape[1:]), tensor.shape[0]


class ShapeMismatch(OptimizerError):
    """Gradients, or parameters, that are not as long as those which were laid side by side."""


class Flat:
    """The one tensor of some parameters, and one for each of their states.

    `params`: in `order`. `lying`: how they lie from now on. `owner`: that of `Shown`. `scratch`: where parameters are
    copied to, for several of these in turn, unless they are laid.
    """

    def __init__(
        self, params: Sequence[Parameter], states: Sequence[dict[str, Any]], names: Sequence[str], lying: Lying,
        owner: Any, scratch: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._params, self.lying = list(params), lying
        self._entries = sum(param.numel() for param in params)
        if lying == "laid":
            self.param = self._together([param.data for param in params])
            _move(params, self.param, [param.nbytes for param in params])
        else:
            whole = padded(self._entries)
            self.param = (params[0].detach().new_zeros(whole) if scratch is None else scratch)[:whole]
        self._views = list(_views(self.param, params)) if lying == "copied" else []
        self._spaced = list(_spaced(params)) if lying == "spaced" else []
        self.states: dict[str, list[Tensor]] = {}
        self._parts: dict[int, list[Tensor]] = {}
        for name in names:
            own = self._together([state[name] for state in states])
            self._parts[id(own)] = list(_pieces(own, params, [param.nbytes for param in params]))
            for state, piece in zip(states, self._parts[id(own)], strict=True):
                state[name] = piece
            self.states[name] = [own]
        self._gradient = torch.zeros_like(self.param)
        self._rest = self._gradient[self._entries :]
        self._parts[id(self._gradient)] = list(_views(self._gradient, params))
        rows = [self.param, self._gradient, *(state for states in self.states.values() for state in states)]
        self._dense = {id(tensor): self._as_spaced(tensor) for tensor in rows}
        self._runs = list(_runs(params))
        self._param_rows, self._gradient_rows = self._by_rows(self.param), self._by_rows(self._gradient)
        self._shown = [piece for (own,) in self.states.values() for piece in self._parts[id(own)]]
        self._lie = Shown(self._shown, owner, others=3)
        self._turnable = list(filter(turnable, params))
        self._addresses = self._now()

    def holds(self) -> bool:
        """Whether every parameter and state still lies where it was put: `model.to()` and the like move them."""
        if not all(map(Tensor.is_contiguous, self._turnable)) or not self._lie.are_where_they_were(self._shown):
            return False
        if self.lying == "copied":
            return set(map(_DTYPE, self._params)) == {torch.float32}
        return self._addresses == self._now()

    def take_in(self) -> None:
        """Copy the parameters in, if they lie elsewhere."""
        if self.lying == "copied":
            self._lay(self._params, self._param_rows)
        for rows, own in zip(self._spaced, self._dense[id(self.param)], strict=True):
            own.copy_(rows)

    def give_out(self) -> None:
        """Copy the parameters back."""
        if self.lying == "copied":
            torch._foreach_copy_(list[Tensor](self._params), self._views)
            return
        for rows, own in zip(self._spaced, self._dense[id(self.param)], strict=True):
            rows.copy_(own)
        count_writes(self._params)

    def add(self, update: Tensor, factor: float) -> None:
        """Add `factor * update` to the parameters where they lie. `update`: a state of this, or the gradient."""
        if self.lying == "copied":
            torch._foreach_add_(list[Tensor](self._params), self._parts[id(update)], alpha=factor)
            return
        if self.lying == "laid":
            self.param.add_(update, alpha=factor)
        for rows, own in zip(self._spaced, self._dense[id(update)], strict=True):
            rows.add_(own, alpha=factor)
        count_writes(self._params)

    def _as_spaced(self, together: Tensor) -> list[Tensor]:
        """The parts of a tensor without gaps that belong to those which have them."""
        parts = together[: self._entries].split([rows.numel() for rows in self._spaced]) if self._spaced else ()
        return [part.view(rows.shape) for part, rows in zip(parts, self._spaced, strict=True)]

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._params))

    def gathered(self, gradients: list[Tensor], look: Look | None) -> Tensor:
        """Gradients in one tensor, in the order of the parameters: always the same one, written anew.

        `look`: gets all of it, in one or more parts, each while the cache still holds it.
        """
        at_once = self._entries <= CACHED or look is None
        self._lay(gradients, self._gradient_rows, None if at_once else look)
        self._rest.zero_()  # a factor that is not finite makes NaN of zeros too
        if at_once and look is not None:
            look([self._gradient])
        return self._gradient

    def _by_rows(self, together: Tensor) -> list[Tensor]:
        """The part of each run in `together`, with the run's rows."""
        sizes = [sum(p.numel() for p in self._params[begin:end]) for begin, end in self._runs]
        parts = together[: self._entries].split(sizes)
        return [
            part.view(-1, *self._params[begin].shape[1:]) for part, (begin, _) in zip(parts, self._runs, strict=True)
        ]

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        """A tensor of all values, and zeros behind them."""
        together = values[0].new_zeros(padded(self._entries))
        torch._foreach_copy_(list(_views(together, values)), list(values))
        return together

    def _lay(self, tensors: Sequence[Tensor], rows: Sequence[Tensor], look: Look | None = None) -> None:
        """Copy tensors one behind the other: concatenating takes half the time of as many copies."""
        with torch.no_grad():
            for (begin, end), part in zip(self._runs, rows, strict=True):
                shape = part.shape
                try:
                    torch.cat(tensors[begin:end], out=part)  # type: ignore[arg-type]
                except (RuntimeError, UserWarning) as error:  # torch warns of what it makes room for
                    raise ShapeMismatch(f"{_MISMATCH} ({error})") from error
                if part.shape != shape:  # torch makes room for more
                    raise ShapeMismatch(_MISMATCH)
                if look is not None:
                    look([part])


def _runs(params: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Where stretches of parameters that are laid by one call begin and end: with like rows, and of like sizes or few
    entries.
    """
    begin = 0
    for _, run in groupby(params, lambda param: (param.shape[1:], param.numel() > TINY and param.shape[0])):
        sizes = list(map(Tensor.numel, run))
        for part in stretches(sizes):
            yield begin + part.start, begin + part.stop
        begin += len(sizes)


def _spaced(params: Sequence[Parameter]) -> Iterator[Tensor]:
    """Let parameters of like shapes be rows at equal distances, each at the beginning of a cache line."""
    for _, run in groupby(params, attrgetter("shape")):
        alike = list(run)
        size = alike[0].numel()
        wide = alike[0].detach().new_zeros(len(alike), padded(size))
        rows = wide[:, :size]
        torch._foreach_copy_(list(rows.unbind()), [param.data.view(-1) for param in alike])
        _move(alike, wide, [wide[0].nbytes] * len(alike))
        yield rows


def _move(params: Sequence[Parameter], together: Tensor, distances: Sequence[int]) -> None:
    """Let parameters be parts of a tensor that holds their values. `distances`: as in `_pieces`."""
    for param, piece in zip(params, _pieces(together, params, distances), strict=True):
        param.data = piece
        _moved[param] = piece.data_ptr()


def _pieces(together: Tensor, like: Sequence[Tensor], distances: Sequence[int]) -> Iterator[Tensor]:
    """Parts of a tensor with the shapes of others, each with a storage that begins and ends where it does.

    `distances`: from the beginning of each to that of the next, in bytes.
    """
    memory, begin = together.untyped_storage(), 0
    for other, distance in zip(like, distances, strict=True):
        yield together.new_empty(0).set_(memory[begin : begin + other.nbytes], 0, other.shape, other.stride())
        begin += distance


def _views(together: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(together, list(like))
    return views
