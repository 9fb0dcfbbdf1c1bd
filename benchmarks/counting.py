"""Counts what a piece of work does, where timing it would only measure the machine: bytes, casts, calls, host syncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.tree import tensors


def count(work: Callable[[], Any]) -> dict[str, int]:
    """What one call of `work` does, operator by operator (those of torch; a Triton kernel is not one).

    `bytes` are read and written, each operand once; views move nothing. `casts`: tensors converted to another dtype.
    `calls`: operators that compute something, a foreach or fused one once. `waits`: values read by the host, each a
    host sync on an accelerator. Compiled code counts as what it was traced to.
    """
    mode = _Counting()
    with mode:
        work()
    return mode.counts


_WAITS = ("_local_scalar_dense", "nonzero", "equal")
_OVERWRITE = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"bytes": 0, "casts": 0, "calls": 0, "waits": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, found = str(func).split(".")[1], self.counts
        if name in _WAITS:
            found["waits"] += 1
        elif not _is_view(func) and name not in ("detach", "empty", "empty_like"):
            found["calls"] += 1
            found["bytes"] += _moved(func, name, args, kwargs, out)
            found["casts"] += _casts(name, args, out)
        return out


def _is_view(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _moved(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    moved = 0
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        size = _size(given.get(argument.name))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and given.get("grad_scale") is None:
            written = False  # torch's fused optimizers write gradients back only when they unscale them
        moved += size * (written + (not written or name not in _OVERWRITE))
    return moved + (0 if func._schema.is_mutable else _size(out))


def _casts(name: str, args: Any, out: Any) -> int:
    if name == "_foreach_copy_":
        return sum(a.dtype is not b.dtype for a, b in zip(args[0], args[1], strict=True))
    source = {"_to_copy": out, "copy_": args[1] if len(args) > 1 else out}.get(name)
    return 0 if source is None else int(source.dtype is not args[0].dtype)


def _size(nested: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(nested))


def launches(work: Callable[[], Any]) -> int | None:
    """CUDA kernels (copies and fills of memory among them) started by one call of `work`; None without a CUDA device.

    None, too, where the profiler sees nothing, as with a driver that keeps CUPTI out: two kernels of known effect run
    around `work`, and a count that does not have them is none.
    """
    if not torch.cuda.is_available():
        return None
    witness = torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        witness.add_(1)
        work()
        witness.add_(1)
        torch.cuda.synchronize()
    seen = sum(event.device_type == torch.profiler.DeviceType.CUDA for event in profile.events())
    return None if seen < 2 else seen - 2
