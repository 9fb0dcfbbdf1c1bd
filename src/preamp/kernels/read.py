"""Reads an optimizer's gradients once, and returns all that a step needs to know about them.

The finite flag decides whether to step, the norm is for clipping, and the flags by gradient name the layer that
overflowed. On CUDA one Triton kernel reads each gradient once for all of these. Elsewhere the same numbers come from
torch's own operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import isfinite
from operator import attrgetter

import torch
from torch import Tensor

from .edit import as_real, dense_values, grouped, in_float32
from .lists import TensorList, batches, listed
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

    def on(self, device: torch.device) -> Reading:
        """The same numbers on a device."""
        if self.found.device == device:
            return self
        return Reading(self.found.to(device), self.norm.to(device), self.nonfinite.to(device))

    def merged(self, other: Reading) -> Reading:
        """Both readings as one, on the device of this one."""
        other = other.on(self.found.device)
        return Reading(
            torch.maximum(self.found, other.found),
            torch.hypot(self.norm, other.norm),
            torch.cat([self.nonfinite, other.nonfinite]),
        )


def read(gradients: Sequence[Tensor], *, device: torch.device | None = None) -> Reading:
    """Read gradients once: dense or coalesced sparse, of any floating or complex dtype, on one or several devices.

    `device`: of the results, by default that of the first gradient, or the CPU without gradients.
    """
    if not gradients:  # zeros are made on the device: copying them from the host would be a host sync
        zero = torch.zeros((), dtype=torch.float32, device=device or torch.device("cpu"))
        return Reading(zero, zero, zero.new_zeros(0, dtype=torch.bool))
    own, home = listed(gradients), gradients[0].device
    if triton_runs_on(home):
        from .triton import read as kernels

        if kernels.readable(own):
            return Reading(*kernels.read(own)).on(device or home)
    groups = grouped(own)
    if len(groups) == 1 or len({group[0].device for group in groups}) == 1:
        norm = None if home.type != "cpu" else _norm_if_finite(groups)
        if norm is not None:
            return Reading(torch.zeros_like(norm), norm, _none(len(own))).on(device or home)
        norms, nonfinite = _on_one_device(own)
    else:
        places: dict[torch.device, list[int]] = defaultdict(list)
        for place, gradient in enumerate(gradients):
            places[gradient.device].append(place)
        own_lists = [[gradients[i] for i in own] for own in places.values()]
        parts = [_on_one_device(own) for own in own_lists]
        norms = torch.cat([part[0].to(home) for part in parts])
        # in the order of the gradients, by slices: copying an index from the host would be a host sync
        runs = [(place, len(list(run))) for place, run in groupby(map(attrgetter("device"), gradients))]
        flags = {
            place: iter(part[1].to(home).split([length for other, length in runs if other == place]))
            for place, part in zip(places, parts, strict=True)
        }
        nonfinite = torch.cat([next(flags[place]) for place, _ in runs])
    norm = norm_of_norms(norms)
    return Reading(nonfinite.any().float(), norm, nonfinite).on(device or norm.device)


@lru_cache(maxsize=16)
def _none(count: int) -> Tensor:
    """The flags of so many gradients that are finite, to be read only."""
    return torch.zeros(count, dtype=torch.bool, device="cpu")


def _norm_if_finite(groups: list[list[Tensor]]) -> Tensor | None:
    """The L2 norm of gradients on a CPU, 0-d float32, if that is finite, which proves that all entries are: one pass.

    None if it is not, because of a non-finite entry or because large ones overflowed the norm.
    """
    norms = [_part_norms(group) for group in groups]
    norm = norms[0] if len(norms) == 1 and norms[0].dim() == 0 else norm_of_norms(torch.hstack(norms))
    return norm if isfinite(norm.item()) else None


def _on_one_device(gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The norm of each gradient, and whether each has an entry that is not finite."""
    on_cpu = gradients[0].device.type == "cpu"
    floats = [in_float32(as_real(dense_values(gradient))) for gradient in gradients]
    largest = [value.abs().amax().float() if value.numel() else value.new_zeros(()) for value in floats]
    nonfinite = ~torch.stack(largest).isfinite()
    norms = torch.stack([norm.float() for norm in l2_norms(floats)])
    if on_cpu and not bool((norms.isfinite() | nonfinite).all()):  # finite entries whose squares float32 cannot hold
        norms = torch.stack([torch.linalg.vector_norm(value, dtype=torch.float64).float() for value in floats])
    return norms, nonfinite


SMALL = 4096
"""On a CPU, gradients up to this many entries are packed: the calls saved are worth more than the copy."""


def _part_norms(group: list[Tensor]) -> Tensor:
    """Norms, float32, whose norm is that of the group: of each large gradient, and of all small ones together.

    0-d if there is only one.
    """
    small, large = listed(group), TensorList()
    if max(small.sizes) > SMALL:
        small, large = (TensorList(v for v in group if (v.numel() > SMALL) is wanted) for wanted in (False, True))
    norms = l2_norms(list(map(in_float32, large))) if large else []
    for part in batches(small.sizes):
        flat = in_float32(torch._C._nn.flatten_dense_tensors(small[part]))
        norms += l2_norms([flat])
    return norms[0].float() if len(norms) == 1 else torch.stack(norms).float()
