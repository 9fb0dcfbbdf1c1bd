"""Casts of single values and of nested arguments, and replacing a function under its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Caster = Callable[[Tensor], Tensor]

_TYPE_NAMES = {
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
}


def get_cuda_version() -> tuple[int, ...]:
    """The version of CUDA that torch was built with; () without CUDA."""
    return tuple(int(part) for part in torch.version.cuda.split(".")) if torch.version.cuda else ()


def is_cuda_enabled() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def is_fp_tensor(x: Any) -> bool:
    """Whether `x` is a floating tensor, or a list or tuple of nothing but such."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def is_nested(x: Any) -> bool:
    """Whether `x` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def should_cache(x: Any) -> bool:
    """Whether a cast of `x` is worth keeping: a float32 parameter, or a list or tuple of nothing but such."""
    if is_nested(x):
        return all(should_cache(item) for item in x)
    return isinstance(x, Parameter) and x.dtype is torch.float32


def type_string(x: Tensor) -> str:
    """The name of a tensor's type without its device: "HalfTensor", "FloatTensor", ..."""
    return _TYPE_NAMES.get(x.dtype) or x.type().rpartition(".")[2]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """The type strings of all floating tensors among (nested) arguments."""
    found: set[str] = set()

    def note(x: Any) -> None:
        if is_nested(x):
            for item in x:
                note(item)
        elif is_fp_tensor(x):
            found.add(type_string(x))

    for x in (*args, *kwargs.values()):
        note(x)
    return found


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
    new = [
        (cast(x) if x.is_floating_point() else x)
        if isinstance(x, Tensor)
        else (mapped(cast, x) if isinstance(x, (list, tuple)) else x)
        for x in args
    ]
    return new, {key: mapped(cast, value) for key, value in kwargs.items()} if kwargs else kwargs


def caster_to(dtype: torch.dtype) -> Caster:
    """A cast of one floating tensor, from any floating dtype."""

    def cast(x: Tensor) -> Tensor:
        return x if x.dtype is dtype else x.to(dtype)

    return cast


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """`x`, or each tensor nested in it, as float16."""
    return mapped(verbosify(caster_to(torch.float16), name, verbose), x)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """`x`, or each tensor nested in it, as float32."""
    return mapped(verbosify(caster_to(torch.float32), name, verbose), x)


def cached_cast(cast: Caster, x: Any, cache: dict[Tensor, Tensor]) -> Any:
    """`x`, or each tensor nested in it, cast once for one `cache`; again where a kept cast would take no gradient."""

    def kept(tensor: Tensor) -> Tensor:
        found = cache.get(tensor)
        if found is None or (torch.is_grad_enabled() and tensor.requires_grad and not found.requires_grad):
            found = cache[tensor] = cast(tensor)
        return found

    return mapped(kept, x)


def verbosify(cast: Caster, name: str, verbose: bool) -> Caster:
    """A cast that prints what it does, such as "Float->Half (conv2d)", if it is to be verbose."""
    if not verbose:
        return cast

    def told(x: Tensor) -> Tensor:
        result = cast(x)
        if result.dtype is not x.dtype:
            print(f"{type_string(x).removesuffix('Tensor')}->{type_string(result).removesuffix('Tensor')} ({name})")
        return result

    return told


def as_inplace(names: Iterable[str]) -> Iterator[str]:
    """The names of the forms that work in place."""
    for name in names:
        yield name + "_"


def has_func(module: Any, name: str) -> bool:
    """Whether `module` has a function of that name."""
    return hasattr(module, name)


def get_func(module: Any, name: str) -> Any:
    """The function of that name."""
    return getattr(module, name)


def set_func(module: Any, name: str, function: Any) -> None:
    """Put `function` under that name."""
    setattr(module, name, function)


def set_func_save(handle: Any, module: Any, name: str, function: Any) -> None:
    """Put `function` under that name, and have `handle._deactivate()` bring back what was there."""
    handle._save_func(module, name)
    setattr(module, name, function)
