"""How magnitudes are spread over the powers of two, as values: what telemetry records and reports read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..formats import Format

KINDS = ("activation", "activation gradient", "weight", "gradient")
"""What is counted. Gradients are as they are stored, times the loss scale."""


@dataclass(frozen=True, slots=True)
class Exponents:
    """The spread of magnitudes: how many values lie in [2^e, 2^(e+1)), for e from `first` on."""

    first: int
    counts: tuple[int, ...]
    zeros: int = 0
    infinite: int = 0
    """Infinite or NaN."""
    largest: float = 0.0
    """Largest finite magnitude."""

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Exponents:
        """From what `to_dict` gave."""
        return cls(**{**kept, "counts": tuple(kept["counts"])})

    def to_dict(self) -> dict[str, Any]:
        """For a record. `dataclasses.asdict` copies each count by itself, and takes as long as counting."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __add__(self, other: Exponents) -> Exponents:
        """Both together."""
        if not self.counts or not other.counts:
            first, counts = (self.first, self.counts) if self.counts else (other.first, other.counts)
        else:
            first = min(self.first, other.first)
            end = max(self.first + len(self.counts), other.first + len(other.counts))
            counts = tuple(self._at(e) + other._at(e) for e in range(first, end))
        infinite, largest = self.infinite + other.infinite, max(self.largest, other.largest)
        return Exponents(first, counts, self.zeros + other.zeros, infinite, largest)

    def _at(self, exponent: int) -> int:
        index = exponent - self.first
        return self.counts[index] if 0 <= index < len(self.counts) else 0

    @property
    def some(self) -> int:
        """How many are finite and not zero."""
        return sum(self.counts)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.some + self.zeros + self.infinite

    def flushed(self, held: Format) -> float:
        """Share of the finite values that are not zero and would round to zero in a format; 0 without any."""
        return self.below(held.flush_threshold)

    def times(self, factor: float) -> Exponents:
        """What they are times a power of two; another factor is rounded to one."""
        return replace(self, first=self.first + round(math.log2(factor)), largest=self.largest * factor)

    def headroom(self, held: Format) -> float | None:
        """Powers of two between the largest finite magnitude and the largest of a format; None without any."""
        return None if not self.largest else math.log2(held.max) - math.log2(self.largest)

    def below(self, limit: float) -> float:
        """Share of the finite values that are not zero and below a limit, to the power of two at or under it."""
        if not self.some:
            return 0.0
        end = math.floor(math.log2(limit)) - self.first
        return sum(self.counts[: max(end, 0)]) / self.some


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one kind in one module at one step."""

    module: str
    kind: str
    dtype: str
    stored: Exponents
    """As they were stored."""
    scale: float
    """How many times too large they were."""
    in_use: float
    """The loss scale of the step."""

    @property
    def true(self) -> Exponents:
        """Without the loss scale."""
        return self.stored.times(1 / self.scale)

    @property
    def in_backward(self) -> Exponents:
        """As they were in the backward pass: gradients with the loss scale on them."""
        return self.stored.times(self.in_use / self.scale) if self.kind.endswith("gradient") else self.stored

    def to_dict(self) -> dict[str, Any]:
        """For `report.json`, without the loss scale."""
        true = self.true
        facts = {name: getattr(self, name) for name in ("module", "kind", "dtype")}
        facts |= {"values": true.total, "zeros": true.zeros, "infinite": true.infinite, "largest": true.largest}
        return {**facts, "exponents": {"first": true.first, "counts": list(true.counts)}}


def rows_of(sample: Mapping[str, Any]) -> list[Row]:
    """The rows of one "telemetry" record."""
    found = []
    for kept in sample["rows"]:
        counted = dict(kept)
        module, kind, dtype = (counted.pop(name) for name in ("module", "kind", "dtype"))
        scale = {"activation gradient": sample["backward_scale"], "gradient": sample["scale"]}.get(kind, 1.0)
        found.append(Row(module, kind, dtype, Exponents.from_dict(counted), scale, sample["backward_scale"]))
    return found
