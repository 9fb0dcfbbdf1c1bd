"""Reads an optimizer's gradients once, and returns all that a step needs to know about them.

The finite flag decides whether to step, the norm is for clipping, the largest magnitude and the counts are for the loss
scale and the doctor's report, and the flags by gradient name the layer that overflowed. On CUDA one Triton kernel reads
each gradient once for all of these. Elsewhere the same numbers come from torch's own operators; those that need a pass
of their own are computed only on request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from operator import attrgetter

import torch
from torch import Tensor

from ..formats import FP16
from .edit import as_real, dense_values, grouped, in_float32
from .lists import batches, listed
from .norms import l2_norms, norm_of_norms
from .triton import triton_runs_on


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of `read`, of the gradients as they were: scaled, if there was a loss scale.

    All fields are tensors on one device; reading their values is a host sync.
    """

    found: Tensor
    """0-d float32: 1 if some entry is inf or nan, else 0."""
    norm: Tensor
    """0-d float32: L2 norm of all entries; not finite if `found`."""
    nonfinite: Tensor
    """(number of gradients,) bool: which of them have an entry that is inf or nan."""
    entries: int
    """The number of entries read."""
    amax: Tensor | None = None
    """0-d float32: the largest magnitude; inf or nan if `found`. None unless statistics were asked for."""
    subnormals: Tensor | None = None
    """0-d int64: how many entries are not 0 and below the smallest normal number of the low dtype."""
    zeros: Tensor | None = None
    """0-d int64: how many entries are 0."""

    def on(self, device: torch.device) -> Reading:
        """The same numbers on a device."""
        if self.found.device == device:
            return self
        statistics = [None if each is None else each.to(device) for each in (self.amax, self.subnormals, self.zeros)]
        found, norm, nonfinite = self.found.to(device), self.norm.to(device), self.nonfinite.to(device)
        return Reading(found, norm, nonfinite, self.entries, *statistics)

    def merged(self, other: Reading) -> Reading:
        """Both readings as one, on the device of this one."""
        other = other.on(self.found.device)

        def both(mine: Tensor | None, theirs: Tensor | None) -> list[Tensor] | None:
            return None if mine is None or theirs is None else [mine, theirs]

        amaxes, below = both(self.amax, other.amax), both(self.subnormals, other.subnormals)
        zeros = both(self.zeros, other.zeros)
        return Reading(
            torch.maximum(self.found, other.found),
            torch.hypot(self.norm, other.norm),
            torch.cat([self.nonfinite, other.nonfinite]),
            self.entries + other.entries,
            None if amaxes is None else torch.maximum(*amaxes),
            None if below is None else below[0] + below[1],
            None if zeros is None else zeros[0] + zeros[1],
        )


def read(
    gradients: Sequence[Tensor], *, statistics: bool = False, tiny: float = FP16.smallest_normal,
    device: torch.device | None = None,
) -> Reading:  # fmt: skip
    """Read gradients once: dense or coalesced sparse, of any floating or complex dtype, on one or several devices.

    `statistics`: also the largest magnitude and the counts. `tiny`: below it a non-zero entry counts as subnormal;
    by default float16's smallest normal number, 2**-14, whatever the dtype in which the gradients are stored, since
    what matters is the dtype of the backward pass that made them. `device`: of the results, by default that of the
    first gradient, or the CPU without gradients.
    """
    if not gradients:  # zeros are made on the device: copying them from the host would be a host sync
        where = device or torch.device("cpu")
        zero, nothing = (torch.zeros((), dtype=dtype, device=where) for dtype in (torch.float32, torch.int64))
        statistics_of_none = (zero, nothing, nothing) if statistics else ()
        return Reading(zero, zero, zero.new_zeros(0, dtype=torch.bool), 0, *statistics_of_none)
    if triton_runs_on(gradients[0].device):
        from .triton import read as kernels

        own = listed(gradients)
        if kernels.readable(own):
            seen = kernels.read(own, tiny if statistics else None)
            entries = sum(own.sizes)
            more = () if seen.counts is None else (seen.amax, *seen.counts.unbind())
            whole = Reading(seen.found, seen.norm, seen.nonfinite, entries, *more)
            return whole.on(device or whole.found.device)
    groups = grouped(list(gradients))
    entries = sum(sum(map(Tensor.numel, group)) for group in groups)
    devices = {group[0].device for group in groups}
    if len(devices) == 1:
        home = next(iter(devices))
        norm = None if statistics or home.type != "cpu" else _norm_if_finite(groups)
        if norm is not None:
            none = torch.zeros(len(gradients), dtype=torch.bool, device=home)
            return Reading(torch.zeros_like(norm), norm, none, entries).on(device or home)
        norms, nonfinite, *rest = _on_one_device(list(gradients), statistics, tiny)
    else:
        places: dict[torch.device, list[int]] = defaultdict(list)
        for place, gradient in enumerate(gradients):
            places[gradient.device].append(place)
        home = gradients[0].device
        own_lists = [[gradients[i] for i in own] for own in places.values()]
        parts = [_on_one_device(own, statistics, tiny) for own in own_lists]
        norms = torch.cat([part[0].to(home) for part in parts])
        # in the order of the gradients, by slices: copying an index from the host would be a host sync
        runs = [(place, len(list(run))) for place, run in groupby(map(attrgetter("device"), gradients))]
        flags = {
            place: iter(part[1].to(home).split([length for other, length in runs if other == place]))
            for place, part in zip(places, parts, strict=True)
        }
        nonfinite = torch.cat([next(flags[place]) for place, _ in runs])
        rest = [torch.stack([part[k].to(home) for part in parts]) for k in range(2, len(parts[0]))]
        rest = [rest[0].amax(), rest[1].sum(), rest[2].sum()] if rest else []
    norm = norm_of_norms(norms)
    return Reading(nonfinite.any().float(), norm, nonfinite, entries, *rest).on(device or norm.device)


def _norm_if_finite(groups: list[list[Tensor]]) -> Tensor | None:
    """The L2 norm of gradients on a CPU, 0-d float32, if that is finite, which proves that all entries are: one pass.

    None if it is not, because of a non-finite entry or because large ones overflowed the norm.
    """
    norms = [_part_norms(group) for group in groups]
    norm = norms[0] if len(norms) == 1 and norms[0].dim() == 0 else norm_of_norms(torch.hstack(norms))
    return norm if isfinite(norm.item()) else None


def _on_one_device(gradients: list[Tensor], statistics: bool, tiny: float) -> list[Tensor]:
    """[norm of each, whether each gradient is not finite], and with statistics [amax, subnormals, zeros] of all."""
    on_cpu = gradients[0].device.type == "cpu"
    floats = [in_float32(as_real(dense_values(gradient))) for gradient in gradients]
    largest = [value.abs().amax().float() if value.numel() else value.new_zeros(()) for value in floats]
    nonfinite = ~torch.stack(largest).isfinite()
    norms = torch.stack([norm.float() for norm in l2_norms(floats)])
    if on_cpu and not bool((norms.isfinite() | nonfinite).all()):  # finite entries whose squares float32 cannot hold
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=torch.float64).float() for value in floats])
    if not statistics:
        return [norms, nonfinite]
    zeros = torch.stack([(value == 0).sum() for value in floats]).sum()
    below = torch.stack([(value.abs() < tiny).sum() for value in floats]).sum()
    return [norms, nonfinite, torch.stack(largest).amax(), below - zeros, zeros]


SMALL = 4096
"""On a CPU, gradients up to this many entries are packed: the calls saved are worth more than the copy."""


def _part_norms(group: list[Tensor]) -> Tensor:
    """Norms, float32, whose norm is that of the group: of each large gradient, and of all small ones together.

    0-d if there is only one.
    """
    small, large = group, []
    if max(map(Tensor.numel, group)) > SMALL:
        small, large = [[v for v in group if (v.numel() > SMALL) is wanted] for wanted in (False, True)]
    norms = l2_norms([in_float32(value) for value in large])
    for part in batches(list(map(Tensor.numel, small))):
        flat = in_float32(torch._C._nn.flatten_dense_tensors(small[part]))
        norms += l2_norms([flat])
    return norms[0].float() if len(norms) == 1 else torch.stack(norms).float()
