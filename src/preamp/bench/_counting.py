"""Counts what a piece of work does, where timing it would only measure the machine: bytes, casts, calls, host syncs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import PreampError
from ..tree import tensors


@dataclass(slots=True)
class Counts:
    """What one call of a piece of work did, operator by operator (those of torch; a Triton kernel is not one)."""

    bytes: int = 0
    """Read and written by operators, each operand once; views move nothing."""
    casts: int = 0
    """Tensors converted to another dtype."""
    calls: int = 0
    """Operators that compute something. A foreach or fused one is one call."""
    waits: int = 0
    """Values read by the host; on an accelerator each is a host sync."""

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


def count(work: Callable[[], Any]) -> Counts:
    """Run `work` once and count. It runs under a dispatch mode, so compiled code counts as what it was traced to."""
    mode = _Counting()
    with mode:
        work()
    return mode.counts


_WAITS = ("_local_scalar_dense", "nonzero", "equal")
_OVERWRITE = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, found = str(func).split(".")[1], self.counts
        if name in _WAITS:
            found.waits += 1
        elif not _is_view(func) and name not in ("detach", "empty", "empty_like"):
            found.calls += 1
            found.bytes += _moved(func, name, args, kwargs, out)
            found.casts += _casts(name, args, out)
        return out


def _is_view(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _moved(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    moved, fresh = 0, not func._schema.is_mutable
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        size = sum(_size(tensor) for tensor in tensors(given.get(argument.name)))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and given.get("grad_scale") is None:
            written = False  # torch's fused optimizers write gradients back only when they unscale them
        moved += size * (written + (not written or name not in _OVERWRITE))
    return moved + (sum(_size(tensor) for tensor in tensors(out)) if fresh else 0)


def _casts(name: str, args: Any, out: Any) -> int:
    if name == "_to_copy":
        return int(out.dtype is not args[0].dtype)
    if name == "copy_":
        return int(args[0].dtype is not args[1].dtype)
    if name == "_foreach_copy_":
        return sum(a.dtype is not b.dtype for a, b in zip(args[0], args[1], strict=True))
    return 0


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class SilentProfiler(PreampError):
    """torch's profiler saw none of the kernels that were started for it to see."""


def launches(work: Callable[[], Any]) -> int | None:
    """CUDA kernels (copies and fills of memory among them) started by one call of `work`; None without a CUDA device.

    Raises `SilentProfiler` where the profiler sees nothing, as with a driver that keeps CUPTI out: two kernels of known
    effect run around `work`, and a count that does not have them is none.
    """
    if not torch.cuda.is_available():
        return None
    witness = torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        witness.add_(1)
        work()
        witness.add_(1)
        torch.cuda.synchronize()
    seen = sum(event.device_type is torch.profiler.DeviceType.CUDA for event in profile.events())
    if seen < 2:
        raise SilentProfiler(
            f"torch's profiler saw {seen} kernels where two additions alone are two: CUPTI is not heard, so kernels "
            "cannot be counted in this process (is another profiler attached, or profiling forbidden by the driver?)"
        )
    return seen - 2


def counted_launches(work: Callable[[], Any]) -> dict[str, int | str | None]:
    """`launches` of `work`, or why they could not be counted, which is no reason to measure nothing."""
    try:
        return {"launches": launches(work)}
    except SilentProfiler as error:
        return {"launches": None, "not counted": str(error)}
