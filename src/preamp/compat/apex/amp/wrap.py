"""Wrappers that prepare the arguments of functions, and putting them in the functions' place.

A wrapper is called for every use of the function in the process, so each does as little as it can: it asks whether
casts are on, looks at dtypes, and calls. `functools.wraps` keeps the function's name, so that what was pickled by name
or is documented stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from . import utils
from ._casts import Casts
from .utils import Caster, casted_args, collect_fp_tensor_types

_RANK = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}

Function = Callable[..., Any]
Prepare = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""From the positional and keyword arguments of a call to those that the function gets; or an error."""


def _prepared(function: Function, prepare: Prepare) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepare(args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _prepared_while_active(function: Function, prepare: Prepare, handle: Casts) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle._is_active:
            args, kwargs = prepare(args, kwargs)
        return function(*args, **kwargs)

    return wrapper


def _patch(module: Any, name: str, prepare: Prepare, handle: Casts) -> None:
    if hasattr(module, name):
        utils.set_func_save(handle, module, name, _prepared_while_active(getattr(module, name), prepare, handle))


def make_cast_wrapper(function: Function, cast: Caster, handle: Casts) -> Function:
    """`function`, called with all floating arguments cast while `handle` is active."""
    return _prepared_while_active(function, functools.partial(casted_args, cast), handle)


def make_promote_wrapper(function: Function, handle: Casts) -> Function:
    """`function`, called with all floating arguments in the widest of their dtypes while `handle` is active."""
    return _prepared_while_active(function, functools.partial(_widened, handle), handle)


def _widened(handle: Casts, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if not kwargs and len(args) == 2:  # nearly always, and nearly always there is nothing to do
        left, right = args
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.dtype is right.dtype:
                return args, kwargs
        elif not isinstance(right, (list, tuple)):  # einsum takes its operands as one
            return args, kwargs
    dtype = widest(_dtypes(handle, (*args, *kwargs.values())))
    return (args, kwargs) if dtype is None else casted_args(handle.caster(dtype), args, kwargs)


def _dtypes(handle: Casts, values: Iterable[Any]) -> set[torch.dtype]:
    found = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in _RANK and handle.takes(value):
                found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found |= _dtypes(handle, value)
    return found


def widest(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """The dtype that loses nothing of any; None where they are one, or none."""
    if len(dtypes) < 2:
        return None
    best = max(dtypes, key=_RANK.__getitem__)
    return torch.float32 if best in LOW_DTYPES else best  # of two 16-bit formats, neither holds the other


def cached_cast(
    module: Any, name: str, cast: Caster, handle: Casts, try_caching: bool = False, verbose: bool = False
) -> None:
    """Have `module.name` cast its arguments; with `try_caching`, each parameter once between two updates."""
    told = utils.verbosify(cast, name, verbose)
    if try_caching and handle.has_cache:
        told = handle.cached(told)
    _patch(module, name, functools.partial(casted_args, handle.only(told)), handle)


def promote(module: Any, name: str, handle: Casts) -> None:
    """Have `module.name` compute at the widest type of its arguments, given singly or in a sequence."""
    _patch(module, name, functools.partial(_widened, handle), handle)


def promote_match_arg0(module: Any, name: str, handle: Casts) -> None:
    """Have a function that works in place cast its other arguments to the dtype of what it writes."""

    def matched(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        written, *others = args
        if not isinstance(written, Tensor) or written.dtype not in _RANK:
            return args, kwargs
        others, kwargs = casted_args(handle.caster(written.dtype), others, kwargs)
        return (written, *others), kwargs

    _patch(module, name, matched, handle)


def err_if_any_half(module: Any, name: str, handle: Casts, custom_err_msg: str | None = None) -> None:
    """Have `module.name` refuse 16-bit arguments."""

    def refused(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        types = collect_fp_tensor_types(args, kwargs)
        if "HalfTensor" in types or "BFloat16Tensor" in types:
            raise NotImplementedError(
                custom_err_msg
                or f"Cannot call in-place function {name} with fp16 arguments. Write {name.rstrip('_')}, which "
                "computes in float32 and returns a new tensor."
            )
        return args, kwargs

    _patch(module, name, refused, handle)


def err_if_arg0_half(module: Any, name: str, handle: Casts) -> None:
    """Have a method that works in place refuse a 16-bit tensor, which could not hold its float32 result."""

    def refused(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        written, *others = args
        if not isinstance(written, Tensor):
            return args, kwargs
        if written.dtype in LOW_DTYPES:
            raise NotImplementedError(
                f"Cannot call in-place method {name} on fp16 Tensors. Write x = x.{name.rstrip('_')}(...), which "
                "computes in float32, or x.float() before it."
            )
        others, kwargs = casted_args(handle.caster(torch.float32), others, kwargs)
        return (written, *others), kwargs

    _patch(module, name, refused, handle)


def decorated_cast(function: Function, kind: str, current: Callable[[], Any]) -> Any:
    """The wrapper of `half_function` and `float_function`: it asks for the handle when called."""

    def cast_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        handle = current()
        if handle is None or not handle.is_active():
            return args, kwargs
        dtype = handle.dtype_of(kind)
        cast = utils.verbosify(handle.caster(dtype), getattr(function, "__name__", str(function)), handle.verbose)
        if dtype in LOW_DTYPES and handle.has_cache:
            cast = handle.cached(cast)
        return casted_args(cast, args, kwargs)

    return _prepared(function, cast_arguments)


def decorated_promote(function: Function, current: Callable[[], Any]) -> Any:
    """The wrapper of `promote_function`. It widens 16 bits to 32, and does not choose between other mixtures."""

    def widened(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        handle = current()
        types = collect_fp_tensor_types(args, kwargs) if handle is not None and handle.is_active() else ()
        if len(types) <= 1:
            return args, kwargs
        if set(types) - {"HalfTensor", "BFloat16Tensor", "FloatTensor"}:
            raise NotImplementedError(
                f"Do not know how to handle these types to promote: {types}. Cast the arguments of "
                f"{getattr(function, '__name__', function)} to one dtype before the call."
            )
        return casted_args(handle.caster(torch.float32), args, kwargs)

    return _prepared(function, widened)
