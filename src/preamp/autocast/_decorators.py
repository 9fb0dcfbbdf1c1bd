"""Rules for Python functions: `half_function`, `float_function`, `promote_function`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import torch

from ..tree import CASTABLE, cast_floating, tensors

F = TypeVar("F", bound=Callable[..., Any])


def half_function(function: F) -> F:
    """Inside a 16-bit region, `function` gets its float tensors in the region's dtype.

    Works on positional and keyword arguments, nested in lists, tuples, dicts and dataclasses. float64 and integer
    tensors are left alone. Outside a region the function is called as it is. Also a decorator.

    Args:
        function: Any callable that takes tensors.

    Returns:
        A function with the same name and signature.

    >>> square = preamp.half_function(torch.square)
    """

    def half(device_type: str, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        return function(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))

    return _ruled(function, half)


def float_function(function: F) -> F:
    """Inside a 16-bit region, `function` gets float32 tensors and everything in it runs in float32.

    For code of your own that must not round: a custom normalisation, a physical loss. Also a decorator.

    Args:
        function: Any callable that takes tensors; they may be nested, as in `half_function`.

    Returns:
        A function with the same name and signature.

    >>> norm = preamp.float_function(torch.linalg.vector_norm)
    """

    def full(device_type: str, args: Any, kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return function(*cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))

    return _ruled(function, full)


def promote_function(function: F) -> F:
    """Inside a 16-bit region, `function` gets its float tensors in the widest dtype among them. Also a decorator.

    Args:
        function: Any callable that takes tensors; they may be nested, as in `half_function`.

    Returns:
        A function with the same name and signature.

    >>> add = preamp.promote_function(torch.add)
    """

    def promote(_: str, args: Any, kwargs: Any) -> Any:
        found = {t.dtype for t in tensors((args, kwargs)) if t.dtype in CASTABLE}
        if len(found) < 2:
            return function(*args, **kwargs)
        widest = reduce(torch.promote_types, found)
        return function(*cast_floating(args, widest), **cast_floating(kwargs, widest))

    return _ruled(function, promote)


def _ruled(function: F, inside: Callable[[str, Any, Any], Any]) -> F:
    """`function`, which a call in a 16-bit region hands to `inside`, with the type of the region's device."""

    @functools.wraps(function)
    def ruled(*args: Any, **kwargs: Any) -> Any:
        for tensor in tensors((args, kwargs)):
            if torch.is_autocast_enabled(tensor.device.type):
                return inside(tensor.device.type, args, kwargs)
        return function(*args, **kwargs)

    return ruled  # type: ignore[return-value]
