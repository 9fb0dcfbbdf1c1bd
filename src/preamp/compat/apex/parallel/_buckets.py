"""Gradients in buckets: which parameters are reduced together, and the all-reduce of one bucket.

Behind its gradients a bucket carries one flag per parameter, 1 where this rank has a gradient to give. Summed over
ranks the flags tell, without a message of their own, which parameters were used anywhere: a rank that did not use a
parameter sends zeros (or what `.grad` holds already) and receives the average, and a parameter that no rank used
keeps its `.grad`, None included, untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ....formats import LOW_DTYPES
from ._collectives import Group


@dataclass(frozen=True)
class ReductionOptions:
    """The arithmetic of a reduction over `world` ranks.

    Gradients are divided by `predivide` before the sum and multiplied by `predivide / world` after it, the latter
    only when `average`. `always_fp32`: float16 and bfloat16 gradients are summed in float32. `retain`: `.grad`
    becomes a view of the reduced buffer where the dtypes allow, and the buffer is kept.
    """

    average: bool = True
    predivide: float = 1.0
    always_fp32: bool = False
    retain: bool = False


class Bucket:
    """Parameters of one dtype and device, reduced together; `members` are their numbers in the model."""

    def __init__(self, members: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.members = list(members)
        self.parameters = list(parameters)
        self.sizes = [p.numel() for p in parameters]
        self.numel = sum(self.sizes)


def plan_buckets(
    order: Iterable[int], parameters: Sequence[Tensor], message_size: float, triggers: Collection[int] = ()
) -> list[Bucket]:
    """The buckets for the parameters numbered in `order`, in which their gradients are expected.

    A bucket is full once it holds `message_size` elements or, when there are `triggers` (numbers of parameters),
    once it received one of them. Buckets are listed in the order in which they fill up; the rest comes last.
    """
    full: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}

    def close(members: list[int]) -> None:
        full.append(Bucket(members, [parameters[i] for i in members]))

    for number in order:
        kind = (parameters[number].dtype, parameters[number].device)
        members = filling.setdefault(kind, [])
        members.append(number)
        if triggers:
            done = number in triggers
        else:
            done = sum(parameters[i].numel() for i in members) >= message_size
        if done:
            close(filling.pop(kind))
    for members in filling.values():
        close(members)
    return full


class Reduction:
    """The all-reduce of one bucket: begun by the constructor, and ended by `finish`.

    `used`: for each parameter, whether this rank contributes a gradient that the others have not seen.
    """

    def __init__(self, bucket: Bucket, used: Sequence[bool], options: ReductionOptions, group: Group) -> None:
        self.bucket, self._used, self._options = bucket, list(used), options
        self._world = dist.get_world_size(group)
        first = bucket.parameters[0]
        dtype = torch.float32 if options.always_fp32 and first.dtype in LOW_DTYPES else first.dtype
        with torch.no_grad():
            pieces = [_gradient(p) for p in bucket.parameters]
            if all(self._used):
                flags = torch.ones(len(pieces), dtype=first.dtype, device=first.device)
            else:
                flags = torch.tensor(self._used, dtype=first.dtype, device=first.device)
            self._flat = torch.cat([*pieces, flags]).to(dtype)
            if options.predivide != 1.0:
                self.body.mul_(1.0 / options.predivide)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    @property
    def body(self) -> Tensor:
        """The gradients alone: 1-d, in the order of the bucket's parameters, in the dtype of the reduction."""
        return self._flat[: self.bucket.numel]

    def finish(self, keep: bool = True) -> None:
        """Wait, and with `keep` write the reduced gradients into `.grad` of every parameter that some rank used."""
        if self._work is not None:
            self._work.wait()
        if not keep:
            return
        bucket, options = self.bucket, self._options
        with torch.no_grad():
            if options.average and options.predivide != self._world:
                self.body.mul_(options.predivide / self._world)
            if all(self._used):
                wanted = self._used
            else:  # the host has to look at the flags: whether .grad stays None depends on them
                wanted = [flag != 0 for flag in self._flat[bucket.numel :].tolist()]
            targets, sources = [], []
            for parameter, piece, want in zip(bucket.parameters, self.body.split(bucket.sizes), wanted, strict=True):
                if not want:
                    continue
                reduced = piece.view(parameter.shape)
                if options.retain and _set_view(parameter, reduced):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                targets.append(parameter.grad.detach())
                sources.append(reduced)
            if targets:
                torch._foreach_copy_(targets, sources)


def _gradient(parameter: Tensor) -> Tensor:
    """What this rank has to give: `.grad` as a 1-d tensor of the parameter's dtype, or zeros."""
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return parameter.grad.detach().reshape(-1).to(parameter.dtype)


def _set_view(parameter: Tensor, reduced: Tensor) -> bool:
    """Let `.grad` lie in the reduced buffer; False where dtype or memory layout forbid it."""
    if reduced.dtype != parameter.dtype or not parameter.is_contiguous():
        return False
    if parameter.grad is None:
        parameter.grad = reduced
    else:
        parameter.grad.data = reduced  # the same gradient object, as whoever holds it expects
    return True


def refuse_sparse(parameter: Tensor, name: str) -> None:
    """ValueError for a gradient that cannot be laid into a flat buffer."""
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {parameter.grad.layout}: flat buffers hold dense gradients only, and ranks "
            "have different rows. Build the embedding with sparse=False, or wrap the model in "
            "torch.nn.parallel.DistributedDataParallel."
        )


def reduce_now(parameters: Sequence[tuple[str, Tensor]], options: ReductionOptions, group: Group) -> None:
    """Reduce `.grad` of all parameters at once, one message per dtype and device; some may be None on some ranks."""
    for name, parameter in parameters:
        refuse_sparse(parameter, name)
    tensors = [p for _, p in parameters]
    for bucket in plan_buckets(range(len(tensors)), tensors, float("inf")):
        Reduction(bucket, [p.grad is not None for p in bucket.parameters], options, group).finish()
