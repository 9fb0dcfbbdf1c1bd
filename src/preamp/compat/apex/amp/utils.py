"""Floating tensors among the arguments of a call, in lists and tuples as well: finding them, casting them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

Caster = Callable[[Tensor], Tensor]


def is_fp_tensor(x: Any) -> bool:
    """Whether `x` is a floating tensor, or a list or tuple of nothing but such."""
    if isinstance(x, (list, tuple)):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def floating(values: Iterable[Any]) -> Iterator[Tensor]:
    """The floating tensors among values."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from floating(value)


def mapped(cast: Caster, x: Any) -> Any:
    """`x` with its floating tensors cast; inside lists and tuples (of any kind) too, everything else as it is."""
    if isinstance(x, Tensor):
        return cast(x) if x.is_floating_point() else x
    if isinstance(x, (list, tuple)):
        items = [mapped(cast, item) for item in x]
        kind: Any = type(x)
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return x


def casted_args(cast: Caster, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with their floating tensors cast; `kwargs` is a new dict."""
    new = [mapped(cast, x) for x in args]
    return new, {key: mapped(cast, value) for key, value in kwargs.items()} if kwargs else kwargs
