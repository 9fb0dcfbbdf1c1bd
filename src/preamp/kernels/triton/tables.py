"""Chunks and tables of addresses, on the device.

A table is never changed: a CUDA graph that was captured with it reads it at every replay, and running kernels may read
it. New addresses get a new table. Tables made during a capture, and the pinned memory from which the graph copies them,
live as long as the process. Copies from pinned memory are no host sync.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from ..lists import listed

ALIGNMENT = 16
"""Bytes that one thread reads at once, if addresses are a multiple of it."""

_SPARES = 16
_KEPT = 32  # tables: a training loop uses one or two for each list, a second model a few more
_tables: dict[tuple[object, ...], _Made] = {}
_uses = count()
_chunks: OrderedDict[tuple[object, ...], Chunks] = OrderedDict()
_captured: list[object] = []
_spares: dict[tuple[int, torch.dtype], list[Tensor]] = {}
_uploads: Counter[tuple[int, torch.dtype]] = Counter()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False, slots=True)
class Chunks:
    """How a list of tensors is cut into chunks of `chunk` elements; the last of a tensor may be shorter."""

    chunk: int
    tensors: int
    count: int
    tensor_of: Tensor
    """(count,) int32: the tensor that a chunk belongs to."""
    block_of: Tensor
    """(count,) int32: the index of a chunk within its tensor."""
    sizes: Tensor
    """(tensors,) int64: elements of each tensor."""
    first: Tensor
    """(tensors + 1,) int32: the first chunk of each tensor, and their number."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Tensors that one launch works on: all with aligned addresses, or those without."""

    chunks: Chunks
    table: Tensor
    """(lists + 1, tensors) int64: addresses, one row for each list, then the positions in the caller's lists."""
    aligned: bool
    """Whether every address is a multiple of `ALIGNMENT`."""


def parts_of(lists: Sequence[Sequence[Tensor]], chunk: int, positions: Sequence[int] | None = None) -> tuple[Part, ...]:
    """Chunks and address tables for kernels over `lists`: parameters, gradients, states, ... of equal lengths.

    All tensors are on one device and walkable in the same order (`lists.walk_of`). `positions`: the numbers in the
    last row of the table, by default 0, 1, 2, ... Tensors without elements are in no chunk.
    """
    device = lists[0][0].device
    rows = list(map(listed, lists))
    sizes = next((row for row in rows[:2] if "sizes" in vars(row)), rows[0]).sizes
    addresses = tuple([row.addresses for row in rows])
    spots = tuple(positions) if positions is not None else None
    key = (device, chunk, sizes, spots, addresses)
    inside = capturing(device)
    with _lock:
        found = _tables.get(key)
        if found is not None:
            found.used = next(_uses)
            if inside:
                _captured.append(found.parts)
            return found.parts
    numbers = np.array((*addresses, range(len(sizes)) if spots is None else spots), dtype=np.int64)
    aligned = (numbers[:-1] % ALIGNMENT == 0).all(0)
    parts = []
    for wanted in (True, False):
        chosen = np.flatnonzero((aligned == wanted) & (np.array(sizes, dtype=np.int64) > 0))
        if len(chosen):
            cut = chunks_of(sizes if len(chosen) == len(sizes) else tuple([sizes[i] for i in chosen]), chunk, device)
            parts.append(Part(cut, upload(torch.from_numpy(numbers[:, chosen]), device), wanted))
    made = tuple(parts)
    with _lock:
        if inside:
            _captured.append(made)  # filled only when the graph runs, so no other launch may use it
        else:
            _tables[key] = _Made(made, next(_uses))
            while len(_tables) > _KEPT:
                del _tables[min(_tables, key=lambda each: _tables[each].used)]
    return made


@dataclass(slots=True)
class _Made:
    """Parts, and when they were last used: moving their key to the end would hash thousands of addresses again."""

    parts: tuple[Part, ...]
    used: int


def chunks_of(sizes: tuple[int, ...], chunk: int, device: torch.device) -> Chunks:
    """The chunks of tensors of `sizes` elements, kept for the next call."""
    key = (sizes, chunk, device)
    with _lock:
        found = _chunks.get(key)
        if found is not None:
            _chunks.move_to_end(key)
            return found
    counts = torch.tensor([-(-size // chunk) for size in sizes], dtype=torch.int64, device="cpu")
    ends = counts.cumsum(0)
    count = int(ends[-1]) if sizes else 0
    tensor_of = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    block_of = torch.arange(count, device="cpu") - (ends - counts)[tensor_of]
    first = torch.cat([ends.new_zeros(1), ends])
    made = Chunks(
        chunk=chunk,
        tensors=len(sizes),
        count=count,
        tensor_of=upload(tensor_of.to(torch.int32), device),
        block_of=upload(block_of.to(torch.int32), device),
        sizes=upload(torch.tensor(sizes, dtype=torch.int64, device="cpu"), device),
        first=upload(first.to(torch.int32), device),
    )
    if not capturing(device):
        with _lock:
            _chunks[key] = made
            while len(_chunks) > _KEPT:
                _chunks.popitem(last=False)
    return made


def capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(length: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(length, dtype=dtype, device="cpu", pin_memory=True)


def ready_for_capture() -> None:
    """Reserve pinned memory for the uploads of a capture, in place of what an earlier capture used."""
    with _lock:
        for kind in _uploads:
            _lay_aside(kind)


def _lay_aside(kind: tuple[int, torch.dtype]) -> None:
    """Reserve as many as there were uploads of a kind: a captured step makes the same tables as the one before it."""
    spares = _spares.setdefault(kind, [])
    spares += [_pinned(*kind) for _ in range(min(_uploads[kind], _SPARES) - len(spares))]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a CPU tensor, without a host sync.

    During a capture the copy becomes part of the graph. Its pinned source was reserved before, since not every version
    of CUDA can allocate pinned memory during a capture.
    """
    if device.type != "cuda":
        return values.to(device)
    kind, inside = (values.numel(), values.dtype), capturing(device)
    with _lock:
        if not inside:
            _uploads[kind] += 1
            _lay_aside(kind)
        spare = _spares[kind].pop() if inside and _spares.get(kind) else None
    staging = _pinned(*kind) if spare is None else spare
    staging.copy_(values.reshape(-1))
    copied = staging.to(device, non_blocking=True).view(values.shape)
    if inside:
        with _lock:
            _captured.append((staging, copied))
    return copied
