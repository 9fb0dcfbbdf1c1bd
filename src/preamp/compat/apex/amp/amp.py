"""Patching torch so that its functions cast (O1, O4), and telling amp about functions of one's own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ....formats import LOW_DTYPES
from . import wrap
from ._amp_state import _amp_state
from .handle import AmpHandle, NoOpHandle
from .lists import functional_overrides, tensor_overrides, torch_overrides

_WRITES = ["index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce"]
_OF_TENSORS = [*_WRITES, "masked_scatter", "lerp", "inner", "vdot", "smm", "allclose", "isclose"]
_UNMIXED: list[tuple[Any, list[str]]] = [
    (torch, [*_OF_TENSORS, "einsum", "tensordot", "chain_matmul", "spmm"]),
    (torch.linalg, ["matmul", "multi_dot", "vecdot"]),
    (torch.sparse, ["mm", "addmm"]),
    (torch.nn.functional, ["scaled_dot_product_attention", "embedding_bag"]),
    (torch.Tensor, _OF_TENSORS),
]
"""Functions in none of Apex's lists that fail where some arguments are 16-bit: they compute at the widest type."""
_DECOMPOSED = ["cholesky", "det", "inverse", "logdet", "slogdet", "pinverse", "qr", "svd", "quantile"]
_FLOAT32_ONLY: list[tuple[Any, list[str]]] = [
    (torch, [*_DECOMPOSED, "cdist", "pdist"]),
    (torch.Tensor, _DECOMPOSED),
    (torch.linalg, ["cholesky", "det", "eigh", "inv", "lstsq", "pinv", "qr", "slogdet", "solve", "svd", "svdvals"]),
    (torch.fft, [f"{kind}fft{size}" for kind in ("", "i", "r", "ir", "h", "ih") for size in ("", "2", "n")]),
    (torch.nn.functional, ["pdist"]),
]
"""Functions in none of Apex's lists that torch does not have in 16 bits, not on every device at least."""
_DECORATOR_HANDLE: AmpHandle | None = None
_USER_CAST_REGISTRY: set[tuple[Any, str, str]] = set()
"""(module, name, "half" or "float") to patch at the next `init` or `initialize`."""
_USER_PROMOTE_REGISTRY: set[tuple[Any, str]] = set()


def _casting(kind: str) -> Any:
    return lambda handle, name: wrap.casting(handle, name, handle.half_type if kind == "half" else torch.float32)


def _decorated(function: Any, way: Any) -> Any:
    """`function` with its arguments prepared in a `way` while the handle that is current at a call is active."""
    name = getattr(function, "__name__", str(function))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _DECORATOR_HANDLE
        if handle is not None and handle.is_active():
            args, kwargs = way(handle, name)(args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def half_function(fn: Any) -> Any:
    """Decorate a function to get its floating arguments, nested ones too, in float16 (bfloat16 at O4)."""
    return _decorated(fn, _casting("half"))


def float_function(fn: Any) -> Any:
    """Decorate a function to get its floating arguments, nested ones too, in float32."""
    return _decorated(fn, _casting("float"))


def promote_function(fn: Any) -> Any:
    """Decorate a function to get floating arguments of several dtypes, nested ones too, all in the widest."""
    return _decorated(fn, wrap.widening)


def _register(registry: set[Any], module: Any, name: str, *kind: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    registry.add((module, name, *kind))


def register_half_function(module: Any, name: str) -> None:
    """Have `module.name` get float16 arguments (bfloat16 at O4), from the next `initialize` on."""
    _register(_USER_CAST_REGISTRY, module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Have `module.name` get float32 arguments, from the next `initialize` on. ValueError if there is no such name."""
    _register(_USER_CAST_REGISTRY, module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Have `module.name` get arguments of one dtype, their widest, from the next `initialize` on."""
    _register(_USER_PROMOTE_REGISTRY, module, name)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
    takes_cpu: bool = True,
) -> AmpHandle:
    """Patch torch's functions, methods and recurrent layers to cast; the handle undoes it by `_deactivate()`.

    `loss_scale`: "dynamic" or a number, for `handle.scale_loss`. `enable_caching`: cast a parameter once between two
    updates. `verbose`: print every cast. `allow_banned`: compute binary_cross_entropy in float32 instead of refusing
    16-bit arguments. `patch_type`: torch.float16 or torch.bfloat16. `takes_cpu`: whether CPU tensors are cast.

    A second call takes the place of the first; torch is never patched twice over.
    """
    global _DECORATOR_HANDLE
    if not enabled:
        _DECORATOR_HANDLE = NoOpHandle()
        return _DECORATOR_HANDLE
    if patch_type not in LOW_DTYPES:
        raise ValueError(f"patch_type is the 16-bit dtype of casts, torch.float16 or torch.bfloat16, not {patch_type}")
    before = getattr(_amp_state, "handle", None)
    if before is not None:
        before._deactivate()
    handle = AmpHandle(loss_scale, enable_caching, verbose, patch_type, takes_cpu)
    try:
        _patch(handle, allow_banned)
    except BaseException:
        handle._deactivate()
        raise
    _DECORATOR_HANDLE = _amp_state.handle = handle
    return handle


def _patch(handle: AmpHandle, allow_banned: bool) -> None:
    """In the order in which wrappers must lie over one another: a user's own choice outermost.

    Names of `torch` that stand for the same function in `torch.nn.functional` are patched there, too.
    """
    functional, tensor = torch.nn.functional, tensor_overrides.MODULE
    both = {name for name in dir(functional) if getattr(functional, name) is getattr(torch, name, None)}
    low, full = handle.half_type, torch.float32
    chosen = _take_registered(handle)
    lists: tuple[Any, ...] = (functional_overrides, torch_overrides, tensor_overrides)

    def put(way: Any, module: Any, names: Iterable[str], *options: Any) -> None:
        for name in dict.fromkeys(names):
            if (module, name) not in chosen:
                wrap.patch(module, name, way(handle, name, *options), handle)

    for each in lists:
        put(wrap.casting, each.MODULE, each.FP16_FUNCS, low)
        put(wrap.casting, each.MODULE, each.FP32_FUNCS, full)
    only_torchs = both.intersection(torch_overrides.FP16_FUNCS).difference(functional_overrides.FP16_FUNCS)
    put(wrap.casting, functional, only_torchs, low)
    put(wrap.widening, functional, both.intersection(torch_overrides.CASTS))
    for module, names in _FLOAT32_ONLY:
        put(wrap.casting, module, names, full)
    for module, names in _UNMIXED:
        put(wrap.widening, module, names)
    for each in lists[1:]:
        put(wrap.widening, each.MODULE, [*each.CASTS, *each.SEQUENCE_CASTS])
    put(wrap.refusing, torch, _in_place(torch_overrides.FP32_FUNCS))
    put(wrap.writing, tensor, _in_place(tensor_overrides.FP32_FUNCS), full)
    put(wrap.writing, tensor, _in_place([*tensor_overrides.FP16_FUNCS, *tensor_overrides.CASTS, *_UNMIXED[-1][1]]))
    wrap.whitelist_rnn_cells(handle)
    wrap.clear_after_backward(handle)
    for each in lists:
        for name, message in each.BANNED_FUNCS:
            way, option = (wrap.casting, full) if allow_banned else (wrap.refusing, message)
            put(way, each.MODULE, [name], option)


def _in_place(names: Iterable[str]) -> list[str]:
    return [f"{name}_" for name in names]


def _take_registered(handle: AmpHandle) -> set[tuple[Any, str]]:
    """Patch what users registered, and forget it; returns (module, name) pairs, which the lists then leave alone."""
    ways = {(module, name): _casting(kind)(handle, name) for module, name, kind in _USER_CAST_REGISTRY}
    for module, name in _USER_PROMOTE_REGISTRY:
        ways.setdefault((module, name), wrap.widening(handle, name))
    for (module, name), prepare in ways.items():
        wrap.patch(module, name, prepare, handle)
    _USER_CAST_REGISTRY.clear()
    _USER_PROMOTE_REGISTRY.clear()
    return set(ways)
