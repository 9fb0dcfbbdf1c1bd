"""The process group, and many tensors in one collective: laid end to end in a flat buffer, sent, and copied back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....formats import LOW_DTYPES

Group = Any  # dist.ProcessGroup; None stands for the default group. Absent where torch has no distributed


def has_group() -> bool:
    """Whether this process belongs to an initialised default process group."""
    return dist.is_available() and dist.is_initialized()


def require_group(what: str) -> None:
    """RuntimeError unless the default process group is initialised; `what` needs it."""
    if not dist.is_available():
        raise RuntimeError(
            f"{what} needs torch.distributed, which this build of torch lacks. Without it there is one process and "
            "nothing to average: train the module itself."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{what} was built before the process group was there, so it does not know the other ranks. Call "
            'torch.distributed.init_process_group("nccl"), or "gloo" on CPU, first; for a single process use the '
            "module itself."
        )


def check_same_model(parameters: Sequence[tuple[str, Tensor]], group: Group) -> None:
    """ValueError, on every rank alike, unless the ranks' parameters agree in name, shape, dtype and requires_grad.

    Without this a broadcast of buffers of different sizes hangs, or fills one rank's weights with another's bytes.
    """
    own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
    rows: list[Any] = [None] * dist.get_world_size(group)
    with torch.cuda.device_of(parameters[0][1]) if parameters else nullcontext():  # where nccl puts what it sends
        dist.all_gather_object(rows, own, group=group)
    for rank, row in enumerate(rows):
        if row != rows[0]:
            first, other = next((a, b) for a, b in zip_longest(rows[0], row) if a != b)
            raise ValueError(
                f"the ranks hold different models: rank 0 has {len(rows[0])} parameters, rank {rank} has {len(row)}. "
                f"The first to differ are {first} and {other} (name, shape, dtype, requires_grad). Their gradients "
                "cannot be added. Build the same model, and freeze the same layers, on every rank before wrapping it."
            )


def broadcast_parameters(parameters: Sequence[Tensor], group: Group = None) -> None:
    """Overwrite the parameters of all ranks by those of rank 0, in place; one message per dtype."""
    flat_dist_call([p.detach() for p in parameters], lambda flat: dist.broadcast(flat, 0, group=group))


@torch.no_grad()
def reduce_gradients(
    parameters: Sequence[Tensor], fresh: Sequence[bool], group: Group = None, average: bool = True,
    predivide: float = 1.0, always_fp32: bool = False, retain: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Reduce `.grad` of the parameters for which any rank says `fresh`, one message per dtype and device.

    Every rank has to call this with the same parameters. One that has no gradient sends zeros and receives the result;
    a parameter that is fresh nowhere keeps its `.grad`, None included. Gradients are divided by `predivide` before the
    sum and multiplied by `predivide / world size` after it, the latter only when `average`. `always_fp32`: 16-bit
    gradients are summed in float32. `retain`: `.grad` becomes a view of the reduced buffer where the dtypes allow.
    Returns the reduced flat buffers. The ranks first tell each other what is fresh, for which the host waits.
    """
    if not parameters:
        return []
    votes = torch.tensor(list(fresh), dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(votes, group=group)
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter, vote in zip(parameters, votes.tolist(), strict=True):
        if vote:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buffers = []
    for (own, _), members in alike.items():
        dtype = torch.float32 if always_fp32 and own in LOW_DTYPES else own
        buffer = flatten([(torch.zeros_like(p) if p.grad is None else p.grad).to(dtype) for p in members])
        buffer.mul_(1.0 / predivide)
        dist.all_reduce(buffer, group=group)
        if average:
            buffer.mul_(predivide / dist.get_world_size(group))
        pieces = unflatten(buffer, members)
        for parameter, piece in zip(members, pieces, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            if retain and dtype == own and parameter.is_contiguous():
                parameter.grad.data = piece  # the same gradient object, as whoever holds it expects
        torch._foreach_copy_([p.grad for p in members if p.grad is not None], pieces)
        buffers.append(buffer)
    return buffers


Collective = Callable[..., Any]


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """One contiguous 1-d tensor with the elements of all tensors of `bucket`, of one dtype and device, in order."""
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat tensor `coalesced` in the shapes of `bucket`: what `flatten` did, undone."""
    pieces = coalesced.split([tensor.numel() for tensor in bucket]) if bucket else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, bucket, strict=True)]


def apply_flat_dist_call(bucket: Sequence[Tensor], call: Collective, extra_args: Iterable[Any] | None = None) -> None:
    """Run the collective `call(flat, *extra_args)` on the tensors of `bucket` together, in place.

    `bucket`: tensors of one dtype and device. `call`: a function of torch.distributed that works in place;
    `dist.all_reduce` sums, and its result is divided by the world size, so that it averages.
    """
    with torch.no_grad():
        coalesced = flatten(bucket)
        call(coalesced, *(extra_args or ()))
        if call is dist.all_reduce:
            coalesced /= dist.get_world_size()
        for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
            tensor.detach().copy_(synced)


def flat_dist_call(tensors: Sequence[Tensor], call: Collective, extra_args: Iterable[Any] | None = None) -> None:
    """`apply_flat_dist_call` once for every dtype and kind of device found in `tensors`, in order of appearance."""
    extra = None if extra_args is None else tuple(extra_args)
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The tensors by their `tensor.type()`, such as "torch.FloatTensor", in order of appearance."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets
