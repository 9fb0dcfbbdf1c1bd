"""Functions of torch that cast their arguments: what a call casts, and putting such functions in the place of torch's.

A wrapper is called for every use of the function in the process, so each does as little as it can: it asks whether
casts are on, looks at dtypes, and calls. `functools.wraps` keeps the function's name, so that what was pickled by name
or is documented stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._builtins import _get_builtin_table
from torch.nn import Parameter
from torch.utils.data._utils import worker

from ....autocast import PRODUCTS
from ....formats import LOW_DTYPES

_NAMES = {
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
}  # fmt: skip
"""What Apex called dtypes, in what it printed."""


Caster = Callable[[Tensor], Tensor]


class Casts:
    """The casts of one call of `init`. They are patched into torch as long as it lives: until `_deactivate()`.

    `half_type`: float16, or bfloat16 at O4. `takes_cpu`: whether tensors on the CPU are cast too. They are where
    models are on the CPU; beside models on an accelerator, CPU tensors are data and keep their dtype.
    """

    def __init__(
        self, enable_caching: bool = True, verbose: bool = False, half_type: torch.dtype = torch.float16,
        takes_cpu: bool = True,
    ) -> None:  # fmt: skip
        self.has_cache = enable_caching
        self.verbose = verbose
        self.cache: dict[Tensor, tuple[tuple[int, int], Tensor]] = {}
        """By parameter, its version and address, and the cast that was made of it then."""
        self._is_active = True
        self._saved: list[tuple[Any, str, bool, Any]] = []
        self.half_type = half_type
        self.takes_cpu = takes_cpu
        self._products = PRODUCTS.hold_while(self, everywhere=True) if takes_cpu else None
        """Ends the hold on products of the CPU: functions of torch are patched for all code, so it is for all, too."""

    def is_active(self) -> bool:
        """Whether functions cast now."""
        return self._is_active

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            yield
        finally:
            self._is_active = before

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is on a device where casts happen; in a DataLoader's workers all on the CPU is data."""
        return x.device.type != "cpu" or (self.takes_cpu and worker._worker_info is None)

    def caster(self, dtype: torch.dtype, name: str = "") -> Caster:
        """A function that casts floating tensors to `dtype`. `name`: the function they go to, for verbose output.

        The 16-bit copy of a float32 parameter is kept until the parameter is written or stepped, or a backward pass
        ends, after which loops write to `.data` without changing its version. Without gradients none is kept: the next
        training pass would find it, and get no gradient; and weights are swapped for evaluation by `.data`.
        """
        keeps = self.has_cache and dtype is self.half_type

        def cast(x: Tensor) -> Tensor:
            if x.dtype is dtype or not self.takes(x):
                return x
            kept = keeps and isinstance(x, Parameter) and x.dtype is torch.float32 and x.requires_grad
            kept = kept and torch.is_grad_enabled() and not (torch.compiler.is_compiling() or torch._C._is_tracing())
            if kept:
                stamp = x._version, x.data_ptr()
                before, result = self.cache.get(x, (None, x))  # one look, as other threads may clear it meanwhile
                if before == stamp:
                    return result
            result = x.to(dtype)
            if self.verbose and name:
                print(f"{_NAMES.get(x.dtype, x.dtype)}->{_NAMES.get(dtype, dtype)} ({name})")
            if kept:
                self.cache[x] = stamp, result
            return result

        return cast

    def _clear_cache(self) -> None:
        self.cache.clear()

    def _replace(self, module: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Put a wrapper in the place of a function until `_deactivate`; it gets the function's name and documentation.

        A name that `module` only inherits is taken away again.
        """
        own, function, builtins = name in vars(module), getattr(module, name), _get_builtin_table()
        self._saved.append((module, name, own, vars(module)[name] if own else None))
        put = functools.wraps(function)(wrapper)  # torch.jit.script looks for operators of this table
        if id(function) in builtins:
            builtins[id(put)] = builtins[id(function)]
        setattr(module, name, put)

    def _deactivate(self) -> None:
        """Put everything back under the names in torch where it was found. A second call does nothing."""
        for module, name, own, function in reversed(self._saved):
            _get_builtin_table().pop(id(getattr(module, name)), None)
            setattr(module, name, function) if own else delattr(module, name)
        self._saved.clear()
        if self._products is not None:
            self._products()
        self._clear_cache()
        self._is_active = False


# -- floating tensors among the arguments of a call, in lists and tuples as well


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


# -- wrappers

_RANK = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}

Prepare = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
"""From the positional and keyword arguments of a call to those that the function gets; or an error."""


def patch(module: Any, name: str, prepare: Prepare, handle: Casts) -> None:
    """Have `module.name` be called with prepared arguments while `handle` is active; nothing if there is none."""
    function = getattr(module, name, None)
    if function is None:
        return

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active:
            return function(*args, **kwargs)
        args, new = prepare(args, kwargs)
        result = function(*args, **new)
        if kwargs and isinstance(out := kwargs.get("out"), Tensor) and result is not out:  # what was written is a cast
            return out.resize_(result.shape).copy_(result)
        return result

    handle._replace(module, name, wrapper)


def clear_after_backward(handle: Casts) -> None:
    """Have all backward passes, of `torch.autograd.grad` too, end with an empty cache."""
    name = "_engine_run_backward"
    function = getattr(torch.autograd, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            handle._clear_cache()

    handle._replace(torch.autograd, name, wrapper)


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
            elif not isinstance(left, (list, tuple)) and not isinstance(right, (list, tuple)):
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


# -- recurrent layers and cells

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]
CELL_NAMES = [name + "_cell" for name in RNN_NAMES]


def whitelist_rnn_cells(handle: Casts) -> None:
    """Have all recurrent layers and cells compute in 16 bits, until `handle._deactivate()`."""
    for name in (*RNN_NAMES, *CELL_NAMES):
        handle._replace(torch._VF, name, _in_low(name, handle))
    handle._replace(nn.RNNBase, "check_input", _without_dtype(nn.RNNBase.check_input, handle))


def _in_low(name: str, handle: Casts) -> Any:
    function, cast = getattr(torch._VF, name), handle.caster(handle.half_type, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active or not handle.takes(args[0]):
            return function(*args, **kwargs)
        if args[0].is_cuda and name in RNN_NAMES:
            # cuDNN wants the weights of a layer in one piece of memory. torch's own autocast lays out such a piece in
            # 16 bits, differentiably; the rest is cast here so that the result is in 16 bits for sure.
            weights = [isinstance(x, (list, tuple)) and bool(x) and isinstance(x[0], Parameter) for x in args]
            inputs = [x if own else mapped(cast, x) for x, own in zip(args, weights, strict=True)]
            with torch.autocast("cuda", dtype=handle.half_type):
                return function(*inputs, **kwargs)
        return function(*[mapped(cast, x) for x in args], **kwargs)

    return wrapper


def _without_dtype(check: Any, handle: Casts) -> Any:
    """Torch refuses inputs of another dtype than the weights', which the functions above bring together."""

    def wrapper(self: Any, input: Tensor, batch_sizes: Tensor | None) -> None:
        if handle._is_active and input.is_floating_point():
            input = torch.empty(input.shape, dtype=self._flat_weights[0].dtype, device="meta")
        check(self, input, batch_sizes)

    return wrapper
