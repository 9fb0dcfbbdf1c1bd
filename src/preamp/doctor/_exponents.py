"""How the magnitudes of a tensor are spread over the powers of two: counted on its device, read on the host."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..formats import Format

BINS = 256
"""One for each exponent field of float32: zero and its subnormals, 2^-126 to 2^127, infinity and NaN."""
WIDTH = BINS + 2
_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_WHOLE = 1 << 16
"""Numbers up to which all of a tensor are counted."""
_TOGETHER = 32
"""Tensors that are counted together: their samples take 8 MB at most."""
_STEPS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 61, 127, 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521)
"""Primes: a step that divides no dimension but the first comes by every column and every channel."""
_READ = frozenset({torch.float32, torch.float16, torch.bfloat16})


def count_exponents(tensor: Tensor) -> Tensor:
    """int64 of `WIDTH` on the tensor's device: counts by exponent field, the zeros, and the bits of the largest.

    `tensor`: any shape, floating; read as float32, which holds every float16, bfloat16 and float8 as it is (a float64
    beyond it counts as infinite or zero). Of more than 2^16 numbers one in k is counted, k times; how many are
    infinite or NaN, and the largest, are of them all. Nothing waits for a device other than the CPU.
    """
    flat = _flat(tensor)
    if not flat.numel():
        return torch.zeros(WIDTH, dtype=torch.int64, device=flat.device)
    every = sampling_step(tensor.shape)
    bits = flat[::every].float().contiguous().view(torch.int32).bitwise_and(_MAGNITUDE)
    return (_on_cpu if flat.device.type == "cpu" else _on_device)(flat, bits, every)


def count_each(many: Sequence[Tensor]) -> list[Tensor]:
    """`count_exponents` of each; those on a CPU with a few operators for many of them."""
    found: dict[int, Tensor] = {}
    group: list[int] = []
    for index, tensor in enumerate(many):
        if tensor.device.type != "cpu" or not tensor.numel():
            found[index] = count_exponents(tensor)
        else:
            group.append(index)
        if len(group) == _TOGETHER:
            found.update(zip(group, _together_on_cpu([many[i] for i in group]), strict=True))
            group = []
    found.update(zip(group, _together_on_cpu([many[i] for i in group]), strict=True))
    return [found[index] for index in range(len(many))]


def _together_on_cpu(many: Sequence[Tensor]) -> Sequence[Tensor]:
    """One histogram with bins of their own for each."""
    if len(many) < 2:
        return [count_exponents(tensor) for tensor in many]
    flats = [_flat(tensor) for tensor in many]
    steps = [sampling_step(tensor.shape) for tensor in many]
    sampled = [flat[::step].float() for flat, step in zip(flats, steps, strict=True)]
    bits = torch.cat(sampled).view(torch.int32).bitwise_and_(_MAGNITUDE)
    sizes = [one.numel() for one in sampled]
    first = bits.new_tensor(range(0, BINS * len(many), BINS))
    fields = (bits >> 23).add_(first.repeat_interleave(torch.tensor(sizes, device="cpu"), output_size=bits.numel()))
    out = torch.zeros(len(many), WIDTH, dtype=torch.int64, device="cpu")
    out[:, :BINS] = torch.bincount(fields, minlength=BINS * len(many)).view(-1, BINS)
    out[:, :BINS] *= torch.tensor(steps, device="cpu").unsqueeze(1)
    tails = []
    for flat, part, step, small in zip(flats, bits.split(sizes), steps, out[:, 0].tolist(), strict=True):
        largest, infinite = _extremes(flat)
        tails.append([infinite, step * (part.numel() - int(part.count_nonzero())) if small else 0, _bits_of(largest)])
    out[:, BINS - 1 :] = torch.tensor(tails, device="cpu")
    return out.unbind()


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype in _READ else flat.float()


def _on_cpu(flat: Tensor, bits: Tensor, every: int) -> Tensor:
    """Where reading a number costs nothing: passes that are slow are for those that need them."""
    counts = torch.bincount(bits >> 23, minlength=BINS)
    zeros = bits.numel() - int(bits.count_nonzero()) if int(counts[0]) else 0
    largest, infinite = _extremes(flat)
    tail = [infinite, every * zeros, _bits_of(largest)]
    return torch.cat([counts[:-1] * every if every > 1 else counts[:-1], counts.new_tensor(tail)])


def _on_device(flat: Tensor, bits: Tensor, every: int) -> Tensor:
    """Where it would wait for all that was asked for before."""
    fields = bits.bitwise_right_shift(23).long()
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)  # bincount would wait to learn how many bins
    counts.scatter_add_(0, fields, torch.ones_like(fields))
    zeros = every * (bits.numel() - bits.count_nonzero())
    finite = flat.isfinite()
    top = flat.float().abs().masked_fill_(~finite, 0).amax().reshape(1).view(torch.int32).long()
    return torch.cat([counts[:-1] * every, (~finite).sum().reshape(1), zeros.reshape(1), top])


def sampling_step(shape: Sequence[int]) -> int:
    """How many numbers of a tensor one that is counted stands for."""
    count = math.prod(shape)
    if count <= _WHOLE:
        return 1
    fit = [step for step in _STEPS if all(size % step for size in shape[1:])]
    return next((step for step in fit if count <= step * _WHOLE), fit[-1] if fit else 1)


def _extremes(flat: Tensor) -> tuple[float, int]:
    """The largest finite magnitude, and how many numbers are infinite or NaN, on the CPU."""
    low, high = flat.aminmax()
    largest = max(abs(float(low)), abs(float(high)))
    if math.isfinite(largest):  # aminmax hands NaN on
        return largest, 0
    finite = flat[flat.isfinite()]
    return (float(finite.abs().amax()) if finite.numel() else 0.0), flat.numel() - finite.numel()


def _bits_of(number: float) -> int:
    """Of a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


@dataclass(frozen=True, slots=True)
class Exponents:
    """The spread of magnitudes: how many values lie in [2^e, 2^(e+1)), for e from `first` on."""

    first: int
    counts: tuple[int, ...]
    zeros: int = 0
    tiny: int = 0
    """Not zero and below 2^-126."""
    infinite: int = 0
    """Infinite or NaN."""
    largest: float = 0.0
    """Largest finite magnitude."""

    @classmethod
    def of(cls, counted: Tensor | list[int]) -> Exponents:
        """From what `count_exponents` gave."""
        fields: list[int] = counted if isinstance(counted, list) else counted.tolist()
        zeros, bits = fields[BINS], fields[BINS + 1]
        used = [index for index in range(1, BINS - 1) if fields[index]]
        first, last = (used[0], used[-1]) if used else (1, 0)
        largest: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
        return cls(first - _BIAS, tuple(fields[first : last + 1]), zeros, fields[0] - zeros, fields[BINS - 1], largest)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Exponents:
        """From what `to_dict` gave."""
        return cls(**{**kept, "counts": tuple(kept["counts"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "first": self.first, "counts": list(self.counts), "zeros": self.zeros, "tiny": self.tiny,
            "infinite": self.infinite, "largest": self.largest,
        }  # fmt: skip

    def __add__(self, other: Exponents) -> Exponents:
        """Both together."""
        if not self.counts or not other.counts:
            first, counts = (self.first, self.counts) if self.counts else (other.first, other.counts)
        else:
            first = min(self.first, other.first)
            end = max(self.first + len(self.counts), other.first + len(other.counts))
            counts = tuple(self._at(e) + other._at(e) for e in range(first, end))
        return Exponents(
            first, counts, self.zeros + other.zeros, self.tiny + other.tiny, self.infinite + other.infinite,
            max(self.largest, other.largest),
        )  # fmt: skip

    def _at(self, exponent: int) -> int:
        index = exponent - self.first
        return self.counts[index] if 0 <= index < len(self.counts) else 0

    @property
    def some(self) -> int:
        """How many are finite and not zero."""
        return sum(self.counts) + self.tiny

    @property
    def total(self) -> int:
        """How many there are."""
        return self.some + self.zeros + self.infinite

    def flushed(self, held: Format) -> float:
        """Share of the finite values that are not zero and would round to zero in a format; 0 without any."""
        return self._below(held.flush_threshold)

    def subnormal(self, held: Format) -> float:
        """Share of the finite non-zero values that lose bits in a format and are not flushed by it."""
        return self._below(held.smallest_normal) - self.flushed(held)

    def times(self, factor: float) -> Exponents:
        """What they are times a power of two; another factor is rounded to one."""
        return replace(self, first=self.first + round(math.log2(factor)), largest=self.largest * factor)

    def saturated(self, held: Format) -> float:
        """Share of all values that are infinite, NaN, or at or beyond the power of two after a format's largest."""
        beyond = math.floor(math.log2(held.max)) + 1 - self.first
        return (self.infinite + sum(self.counts[max(beyond, 0) :])) / max(self.total, 1)

    def headroom(self, held: Format) -> float | None:
        """Powers of two between the largest finite magnitude and the largest of a format; None without any."""
        return None if not self.largest else math.log2(held.max) - math.log2(self.largest)

    def _below(self, limit: float) -> float:
        """Share of the non-zero ones below a limit, to the power of two that it lies at or above."""
        if not self.some:
            return 0.0
        end = math.floor(math.log2(limit)) - self.first
        return (self.tiny + sum(self.counts[: max(end, 0)])) / self.some


def together(many: Iterable[Exponents]) -> Exponents:
    """All of them as one."""
    return sum(many, start=Exponents(0, ()))
