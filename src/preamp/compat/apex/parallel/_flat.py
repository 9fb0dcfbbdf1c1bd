"""Many tensors in one collective: laid end to end in a flat buffer, sent, and copied back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[..., Any]


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """One contiguous 1-d tensor with the elements of all tensors of `bucket`, in order.

    The tensors must share one dtype and device; the result has both. An empty bucket is a ValueError.
    """
    if not bucket:
        raise ValueError("flatten() got no tensors, so the dtype and device of the flat buffer are unknown.")
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat tensor `coalesced` in the shapes of `bucket`: what `flatten` did, undone.

    ValueError unless `coalesced` has exactly as many elements as the tensors of `bucket` together.
    """
    sizes = [tensor.numel() for tensor in bucket]
    if sum(sizes) != coalesced.numel():
        raise ValueError(
            f"unflatten() got {coalesced.numel()} elements for tensors that hold {sum(sizes)}: "
            "pass the same bucket that was flattened."
        )
    pieces = coalesced.split(sizes) if sizes else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, bucket, strict=True)]


def import_flatten_impl() -> None:
    """Nothing: there is only one implementation, and it needs no extension. Kept because scripts call it."""


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


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The float16, float32, float64 and bfloat16 tensors as separate lists, in this order; empty lists are left out."""
    listed = list(tensors)
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    buckets = [[tensor for tensor in listed if tensor.dtype == dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append every tensor in a nesting of iterables to `tensor_list`, in order; what is no tensor is passed over."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, dict):
        extract_tensors(maybe_tensor.values(), tensor_list)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, (str, bytes)):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)
