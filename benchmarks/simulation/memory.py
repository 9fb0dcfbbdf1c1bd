"""The memory that a simulated block of threads sees, and which of it moved between device memory and the processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sass import NotUnderstood

SECTOR = 32
"""Bytes of device memory that are moved as one."""
LINE = 128
"""Bytes that the L1 cache and shared memory deliver in a cycle."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class Memory:
    """Stretches of device memory by name, each with its first address, and which sectors were touched."""

    stretches: dict[str, tuple[int, Array]] = field(default_factory=dict)
    touched: set[tuple[bool, int]] = field(default_factory=set)
    shared: Array = field(default_factory=lambda: np.zeros(2**16, np.uint8))

    def add(self, name: str, values: Array) -> int:
        """Put a copy of an array there, and return its address."""
        place = 2**32 * (len(self.stretches) + 1)
        self.stretches[name] = place, np.frombuffer(bytearray(values.tobytes()), np.uint8)
        return place

    def values(self, name: str, dtype: Any) -> Array:
        """What lies there now."""
        return self.stretches[name][1].view(dtype)

    def at(self, addresses: Array, width: int) -> tuple[str, Array, Array]:
        """The stretch in which all `addresses` lie, its bytes, and the places (lanes, width) of theirs."""
        for name, (start, stored) in self.stretches.items():
            if start <= addresses[0] < start + 2**32:
                places = (addresses - np.uint64(start)).astype(np.int64)[:, None] + np.arange(width)
                if places.min() < 0 or places.max() >= len(stored):
                    raise NotUnderstood(f"an address lies outside of {name!r}, which has {len(stored)} bytes")
                return name, stored, places
        raise NotUnderstood(f"nothing lies at address {int(addresses[0]):#x}")

    def new_bytes(self, stores: bool, addresses: Array, width: int) -> int:
        """How many bytes lie in sectors that this block stores to, or loads from, for the first time."""
        ends = np.concatenate([addresses, addresses + np.uint64(width - 1)])
        new = {(stores, int(sector)) for sector in np.unique(ends // np.uint64(SECTOR))} - self.touched
        self.touched |= new
        return SECTOR * len(new)
