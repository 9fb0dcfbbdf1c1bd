"""What is done to the arguments of functions, and putting a function that does it in the place of torch's.

A wrapper is called for every use of the function in the process, so each does as little as it can: it asks whether
casts are on, looks at dtypes, and calls. `functools.wraps` keeps the function's name, so that what was pickled by name
or is documented stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from ._casts import Casts
from .utils import casted_args, floating

_RANK = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}

Function = Callable[..., Any]
Prepare = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""From the positional and keyword arguments of a call to those that the function gets; or an error."""


def patch(module: Any, name: str, prepare: Prepare, handle: Casts) -> None:
    """Have `module.name` be called with prepared arguments while `handle` is active; nothing if there is none."""
    function = getattr(module, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if handle._is_active:
            args, kwargs = prepare(args, kwargs)
        return function(*args, **kwargs)

    handle._save_func(module, name)
    setattr(module, name, wrapper)


# -- ways to prepare the arguments of the function of a name


def casting(handle: Casts, name: str, dtype: torch.dtype) -> Prepare:
    """Cast floating arguments to `dtype`."""
    return functools.partial(casted_args, handle.caster(dtype, name))


def widening(handle: Casts, name: str) -> Prepare:
    """Cast floating arguments to the widest type of them, given singly or in a sequence."""

    def widened(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not kwargs and len(args) == 2:  # nearly always, and nearly always there is nothing to do
            left, right = args
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                if left.dtype is right.dtype:
                    return args, kwargs
            elif not isinstance(right, (list, tuple)):  # einsum takes its operands as one
                return args, kwargs
        given = floating((*args, *kwargs.values()))
        dtype = _widest({x.dtype for x in given if x.dtype in _RANK and handle.takes(x)})
        return (args, kwargs) if dtype is None else casted_args(handle.caster(dtype), args, kwargs)

    return widened


def _widest(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """The dtype that loses nothing of any; None where they are one, or none."""
    if len(dtypes) < 2:
        return None
    best = max(dtypes, key=_RANK.__getitem__)
    return torch.float32 if best in LOW_DTYPES else best  # of two 16-bit formats, neither holds the other


def writing(handle: Casts, name: str, dtype: torch.dtype | None = None) -> Prepare:
    """For a method that works in place: cast the other arguments to the dtype of what it writes.

    `dtype`: float32, if the method computes in that, and a 16-bit tensor, which could not hold its result, is refused.
    """

    def matched(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        written, *others = args
        if not isinstance(written, Tensor) or written.dtype not in _RANK:
            return args, kwargs
        if dtype is not None and written.dtype in LOW_DTYPES:
            raise NotImplementedError(
                f"Cannot call in-place method {name} on fp16 Tensors. Write x = x.{name.rstrip('_')}(...), which "
                "computes in float32, or x.float() before it."
            )
        others, kwargs = casted_args(handle.caster(dtype or written.dtype), others, kwargs)
        return (written, *others), kwargs

    return matched


def refusing(handle: Casts, name: str, message: str | None = None) -> Prepare:
    """Refuse 16-bit arguments."""

    def refused(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if any(x.dtype in LOW_DTYPES for x in floating((*args, *kwargs.values()))):
            raise NotImplementedError(
                message
                or f"Cannot call in-place function {name} with fp16 arguments. Write {name.rstrip('_')}, which "
                "computes in float32 and returns a new tensor."
            )
        return args, kwargs

    return refused


def promoting(handle: Casts, name: str) -> Prepare:
    """Widen 16-bit arguments among float32 ones. NotImplementedError for other mixtures, of which it chooses none."""

    def promoted(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        types = {x.dtype for x in floating((*args, *kwargs.values()))}
        if len(types) > 1 and types - {torch.float32, *LOW_DTYPES}:
            raise NotImplementedError(
                f"Do not know how to handle these types to promote: {types}. Cast the arguments of {name} to one dtype "
                "before the call."
            )
        return casted_args(handle.caster(torch.float32), args, kwargs) if len(types) > 1 else (args, kwargs)

    return promoted


def decorated(function: Function, current: Callable[[], Any], way: Callable[[Any, str], Prepare]) -> Any:
    """`function` with its arguments prepared in a `way` while the handle that is `current` at a call is active."""
    name = getattr(function, "__name__", str(function))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = current()
        if handle is not None and handle.is_active():
            args, kwargs = way(handle, name)(args, kwargs)
        return function(*args, **kwargs)

    return wrapper
