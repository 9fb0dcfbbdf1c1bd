"""The shadows of a step: for each storage of floating numbers a float32 one, with what float32 would have made."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ..measure import key_of, spread_of, values_here
from ..names import Names
from ..records import NOWHERE, Line
from .facts import GradientSpread

WIDE = torch.float32
"""The dtype of shadows. Whether float32 decides what it shows, `Shadowed` asks for each operator that is off."""
SHADOWED = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Dtypes that have shadows. A float64 tensor is its own."""
_HELD = 1e-12, 1e15
"""Sizes whose squares float32 holds, also of a part of them."""
_SMALL = 16
"""Gradients of fewer values are not judged."""


def has_shadow(value: Any) -> bool:
    """Whether a value is a tensor that can have a shadow: floating, with a storage of numbers of its own."""
    return (
        type(value) in (Tensor, Parameter)
        and value.dtype in SHADOWED
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_neg()
    )


class Shadows:
    """Shadows by storage: views of one storage have views of one shadow. Those of freed storages go.

    `limit`: bytes that all shadows may take; None for half of what the device has left when the first one is made.
    Beyond it they are let go where another module begins: then errors are followed through a module at a time.
    `casts`: tensors that have no shadow yet, each with its version, what it was cast from, and where.
    """

    def __init__(self, limit: float | None, casts: Mapping[Tensor, tuple[int, Tensor, Line]]) -> None:
        self._limit, self._casts = limit, casts
        self._of: dict[int, tuple[torch.dtype, Tensor, StorageWeakRef]] = {}
        self.cast_at: dict[int, Line] = {}
        """By storage, where what has a shadow since it was read was cast."""
        self._bytes = 0
        self._sweep_at = 256
        self.whole = True
        """Whether all shadows of the step are kept."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage has a shadow."""
        return has_shadow(tensor) and key_of(tensor) in self._of

    def find(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor, of its shape; None where it has none yet: then it is as exact as it can be known."""
        kept = self._of.get(key_of(tensor))
        if kept is None:
            return None
        dtype, flat, storage = kept
        if storage.expired() or dtype is not tensor.dtype or flat.numel() != _size(tensor):
            self._drop(key_of(tensor))
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def of(self, tensor: Tensor) -> Tensor:
        """The shadow of a tensor, of its shape. A new one begins with its own values, or what it was cast from."""
        found = self.find(tensor)
        if found is not None:
            return found
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat = flat.set_(tensor.untyped_storage(), 0, (_size(tensor),), (1,)).to(WIDE, copy=True)
        self._keep(tensor, flat)
        whole = next((one for one in self._casts if key_of(one) == key_of(tensor)), tensor)  # this may be a view of it
        version, exact, line = self._casts.get(whole, (None, tensor, NOWHERE))
        if version is not None and version == whole._version:
            self.cast_at[key_of(tensor)] = line
            flat.as_strided(whole.shape, whole.stride(), whole.storage_offset()).copy_(exact)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _keep(self, tensor: Tensor, flat: Tensor) -> None:
        if self._limit is None:
            self._limit = free_bytes(tensor.device) / 2
        self._of[key_of(tensor)] = tensor.dtype, flat, StorageWeakRef(tensor.untyped_storage())
        self._bytes += flat.nbytes
        if len(self._of) >= self._sweep_at or self._bytes > self._limit:
            self._sweep(self._limit)

    def give(self, tensor: Tensor, exact: Tensor, *, own: bool) -> None:
        """What a tensor's shadow is from now on. `own`: nobody else has its storage, so that it need not be copied."""
        found, storage = self.find(tensor), exact.untyped_storage()
        size = _size(tensor)
        alike = tensor.stride() == exact.stride() and tensor.storage_offset() == exact.storage_offset()
        if found is not None or not own or not alike or storage.nbytes() != size * exact.element_size():
            (self.of(tensor) if found is None else found).copy_(exact)
            return
        self._keep(tensor, torch.empty(0, dtype=WIDE, device=exact.device).set_(storage, 0, (size,), (1,)))

    def forget(self, tensor: Tensor) -> None:
        """What a tensor holds is not known to be wrong: its shadow begins anew."""
        self._drop(key_of(tensor))

    def module_changed(self) -> None:
        """Another module runs from here on: where not all shadows fit, those so far are let go."""
        if not self.whole:
            self._of.clear()
            self._bytes = 0

    def _sweep(self, limit: float) -> None:
        for key in [key for key, (_, _, storage) in self._of.items() if storage.expired()]:
            self._drop(key)
        self._sweep_at = 2 * len(self._of) + 256
        if self._bytes > limit:
            self.whole = False

    def _drop(self, key: int) -> None:
        kept = self._of.pop(key, None)
        if kept is not None:
            self._bytes -= kept[1].nbytes


def free_bytes(device: torch.device) -> float:
    """Memory that a device has left; infinite where it does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # Windows, macOS
        return math.inf


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def relative_error(value: Tensor, shadow: Tensor) -> float:
    """||value - shadow|| / ||shadow||, L2; infinite where the value is not finite and the shadow is.

    Entries whose shadow is not finite, as those of a mask of -inf, say nothing. 0 for what has no others.
    """
    if not value.numel():
        return 0.0
    value, size = value.detach(), float(torch.linalg.vector_norm(shadow))
    if _HELD[0] < size < _HELD[1] and math.isfinite(off := float(torch.linalg.vector_norm(value - shadow))):
        return off / size
    size = float(torch.linalg.vector_norm(shadow, dtype=torch.float64))
    if not math.isfinite(size):
        there = shadow.isfinite()
        return relative_error(value[there], shadow[there])
    off = float(torch.linalg.vector_norm(value.double() - shadow))
    if math.isnan(off):
        return math.inf
    return off / size if size else (0.0 if off == 0 else math.inf)


def share_differing(value: Tensor, shadow: Tensor) -> float:
    """Share of the entries that differ, of one shape."""
    return float((value != shadow).double().mean()) if value.numel() else 0.0


def share_lost(value: Tensor, shadow: Tensor) -> float:
    """Share of the shadow's entries that are not zero whose value is."""
    there = shadow != 0
    return float(((value == 0) & there).sum()) / max(int(there.sum()), 1)


def gradients_beside(
    given: Iterable[tuple[Tensor, Tensor | None]], shadows: Shadows, names: Names, scale: float, excused: Container[int]
) -> dict[int, GradientSpread]:
    """Each parameter's gradient against what float32 gives, by the parameter's id; `scale`: on all of them.

    What is zero in float16 may have been zero before; only its shadow shows that. One that was computed while nothing
    was followed has none, and is left out. `excused`: storages whose error has another cause.
    """
    found = {}
    for parameter, grad in given:
        if grad is None or grad.layout is not torch.strided or grad.numel() < _SMALL:
            continue
        came = values_here(grad.detach())
        exact = shadows.find(came)
        if exact is None or not bool(exact.isfinite().all()) or not bool(exact.any()):
            continue
        spread, vector = spread_of(exact / scale), grad.dim() < 2
        lost, off = share_lost(came, exact), relative_error(came, exact)
        if key_of(came) in excused:
            lost = off = 0.0
        found[id(parameter)] = GradientSpread(*names.parameter(parameter), spread, vector, lost, off)
    return found
