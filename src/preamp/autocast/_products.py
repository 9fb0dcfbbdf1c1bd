"""Products of 16-bit tensors through float32, on CPUs without arithmetic for them, or where torch does not use it.

There torch multiplies float16 and bfloat16 by scalar loops, 25 to 100 times slower than float32. So the factors are
widened, multiplied in float32, and the result is rounded once. That is what a tensor core means by a product: 16-bit
factors, float32 sums, one rounding.

The kernels lie in the dispatcher below autograd, so that nothing else notices them: autograd records the 16-bit
operator and keeps its 16-bit tensors, and dispatch modes see it as it was called. The products of its backward are
operators of the same table, and come by here again.

Kernels are process-wide, and a product is widened for preamp's code alone: inside of its regions, in the forward pass
of its 16-bit models (`widened`), and in the backward of what was computed there (`RegionNodes`). What `torch.compile`
traces never comes down to a kernel that low. So the same kernels also lie one key higher, where only tracing uses them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compiling import traced_by_callers, uncompiled
from ..formats import LOW_DTYPES, cpu_multiplies, name_of
from ._held import HeldKernels, go_on, library_of, overload_of
from ._nodes import NODES, RegionNodes

MARKER = "ipu"
"""A device type that nothing else uses. Its autocast state marks what is preamp's, since the compiler knows of it."""

COMPILED = torch.bfloat16
"""The marker's dtype in regions of compiled code, which torch enters and leaves by itself."""

_NO_MARKER = torch.float16
"""The marker's dtype outside of all regions, which is torch's default."""

_WIDENED, _WIDENED_COMPILED = torch.float32, torch.float16
"""The marker's dtypes where products are widened, and no rules hold: in a 16-bit model that runs outside of regions."""

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

_OPS = {
    "mm": 1, "bmm": 1, "mv": 1, "dot": 1, "vdot": 1, "addmm": 1, "addmv": 1, "addr": 1, "addbmm": 1, "baddbmm": 1,
    "_addmm_activation": 1, "convolution": 1, "_convolution": 1, "convolution_backward": 3, "conv_tbc": 1,
    "conv_tbc_backward": 3, _ATTENTION: 1, f"{_ATTENTION}_backward": 3, "mkldnn_rnn_layer": 3,
    "mkldnn_rnn_layer_backward": 7, "avg_pool3d": 1, "avg_pool3d_backward": 1,
}  # fmt: skip
"""Operators that go through float32, below autograd, and how many of their results, from the first, are rounded.

They multiply; average pooling of volumes is here because it has no 16-bit kernel.
"""

_WRITING = (
    "addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_", "mm.out", "bmm.out", "mv.out", "addmm.out", "addmv.out",
    "addbmm.out", "baddbmm.out",
)  # fmt: skip
"""Those that write into a tensor they are given. Torch's own fast paths use them; traced ones write nothing."""

_WITH_FLOAT32 = frozenset({_ATTENTION, f"{_ATTENTION}_backward"})
"""Operators that take float32 beside 16-bit factors: a mask, logarithms of sums. For others that is torch's error."""

_ON_NO_CPU = {
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), frozenset({torch.float16})),
    **dict.fromkeys(("convolution", "_convolution", "convolution_backward"), frozenset({torch.float16})),
    **dict.fromkeys((_ATTENTION, f"{_ATTENTION}_backward"), frozenset({torch.float16})),
    **dict.fromkeys(("avg_pool3d", "avg_pool3d_backward"), LOW_DTYPES),
}
"""16-bit dtypes for which torch has no kernel, or none that is fast, whatever the CPU.

On one with AVX512-FP16 the backward of a float16 convolution takes 20 to 200 times as long as float32's.
"""

_UP_TO = {f"{_ATTENTION}_backward": 2**22}
"""Operators that go through float32 on every CPU up to a size, in multiplications of one head and product.

Torch's 16-bit backward of attention takes 0.2 ms a head, however short the sequence; float32's takes 0.01 ms for 64
positions of 16 numbers. They meet at 256 positions of 64.
"""

_EAGER, _TRACED = "BackendSelect", "ADInplaceOrView"

WIDENED_NODES = RegionNodes()
"""Nodes whose products were widened, outside of regions or in a backward that is differentiated again."""


class Products(HeldKernels):
    """The kernels that are in the dispatcher now. There is one (`PRODUCTS`), because there is one dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere: set[object] = set()
        """Those who have products widened in all code."""

    def hold(self, holder: object, *, everywhere: bool = False) -> None:
        """Have products widened in what is preamp's until `release(holder)`; or in all code."""
        if everywhere:
            self.everywhere.add(holder)
        super().hold(holder)

    def release(self, holder: object) -> None:
        """End a `hold()`; a second call does nothing."""
        self.everywhere.discard(holder)
        super().release(holder)

    def install(self) -> None:
        """Put kernels that are missing into the dispatcher: those for tracing once the compiler has been imported."""
        traces = "torch._dynamo" in sys.modules
        if len(self._libraries) > traces or not self._holders:
            return
        with self._lock:
            dtypes = frozenset(dtype for dtype in LOW_DTYPES if not cpu_multiplies(dtype))
            if not self._tag:
                self._tag_compiled(f"preamp-products:{'+'.join(sorted(map(name_of, dtypes)))}")
            for key in (_EAGER, _TRACED) if traces else (_EAGER,):
                if key not in self._libraries:
                    self._libraries[key] = [library_of(_kernels(key, dtypes), key)]

    def forget_nodes(self) -> None:
        """No rules are held any more: nodes of the past are not preamp's, unless a session widens products still."""
        NODES.clear()
        if not self._holders:
            WIDENED_NODES.clear()


PRODUCTS = Products()


class _Widened:
    """A stretch of a thread in which products are widened, and no rules hold. Not for compiled code."""

    def __enter__(self) -> None:
        self._outer = (torch.is_autocast_enabled(MARKER), torch.get_autocast_dtype(MARKER))
        self._first_node = WIDENED_NODES.now()
        if not self._outer[0]:
            torch.set_autocast_dtype(MARKER, _WIDENED)
            torch.set_autocast_enabled(MARKER, True)

    def __exit__(self, *_: object) -> None:
        enabled, dtype = self._outer
        torch.set_autocast_enabled(MARKER, enabled)
        torch.set_autocast_dtype(MARKER, dtype)
        if not enabled:
            WIDENED_NODES.add(self._first_node)


@traced_by_callers
def widened(model: object = None) -> Any:
    """A context for the call of a 16-bit model: its products go through float32, if kernels are held.

    If nobody holds them (any more), as where a whole model was loaded in another process, that `model` does.
    """
    if not torch.compiler.is_compiling():
        if model is not None and not PRODUCTS._holders:
            PRODUCTS.hold_while(model)
        return _Widened()
    _install_for_tracing()
    return nullcontext() if torch.is_autocast_enabled(MARKER) else torch.autocast(MARKER, dtype=_WIDENED_COMPILED)


@uncompiled
def _install_for_tracing() -> None:
    """Run for real while dynamo traces, which then sees a constant."""
    PRODUCTS.install()


_install_for_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def ruled(dtype: torch.dtype) -> bool:
    """Whether a marker of this dtype says that rules hold, and not only that products are widened."""
    return dtype is not _WIDENED and dtype is not _WIDENED_COMPILED


def _kernels(key: str, dtypes: frozenset[torch.dtype]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in (*_OPS, *_WRITING) if key == _EAGER else _OPS:
        its = dtypes | _ON_NO_CPU.get(name, frozenset())
        op = overload_of(name)
        if (its or name in _UP_TO) and op is not None:  # of every release of torch
            yield name, _kernel(name, op, key, its)


@functools.cache
def _kernel(name: str, op: Any, key: str, dtypes: frozenset[torch.dtype]) -> Callable[..., Any]:
    """The kernel of an operator at a dispatch key; kept for the sessions that follow."""
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    traces, narrowed = key == _TRACED, _OPS.get(name, 1)
    with_float32, writes, most = name in _WITH_FLOAT32, name in _WRITING, _UP_TO.get(name, 0)
    known = dtypes | LOW_DTYPES if most else dtypes
    compute = overload_of(name.removesuffix("_").removesuffix(".out")).redispatch

    def low_dtype(values: Any) -> torch.dtype | None:
        """The one 16-bit dtype of the factors; None where they are to be left as they are."""
        found = None
        for value in values:
            if not isinstance(value, Tensor):
                continue
            dtype = value.dtype
            if dtype in known:
                if (found is not None and found is not dtype) or value.device.type != "cpu":
                    return None
                if value.layout is not torch.strided or (traces and not _is_traced(value)):
                    return None
                found = dtype
            elif not with_float32 and dtype.is_floating_point:
                return None
        return found if found in dtypes or (most and _size_of_attention(*values) <= most) else None

    @uncompiled
    def product(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", args[0]) if writes else None
        dtype = low_dtype(args if out is None else (out, *args))
        if dtype is None or not (_applies_traced() if traces else _applies()):
            return go_on(op, keyset & below, args, kwargs)

        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value

        if kwargs:
            kwargs = {name: wide(value) for name, value in kwargs.items() if name != "out"}
        result = compute(keyset & below, *map(wide, args), **kwargs)
        if out is not None:
            return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(
            each.to(dtype) if i < narrowed and isinstance(each, Tensor) else each for i, each in enumerate(result)
        )

    return product


def _size_of_attention(_: Any, query: Tensor, key: Tensor, *rest: Any) -> int:
    """Multiplications of one product of a head in the backward of attention."""
    return query.shape[-2] * key.shape[-2] * key.shape[-1]


def _applies() -> bool:
    """Whether a product of 16-bit tensors is preamp's."""
    # torch hides from a dispatch mode that autocast is on, and not its dtype
    marked = torch.is_autocast_enabled(MARKER) or torch.get_autocast_dtype(MARKER) is not _NO_MARKER
    if marked or PRODUCTS.everywhere:
        applies = True
    elif torch._C._current_graph_task_id() == -1:
        return False
    else:
        applies = NODES.is_running() or WIDENED_NODES.is_running()
    if applies and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        WIDENED_NODES.add(WIDENED_NODES.now() - 1)  # of this operator, in a backward that is differentiated again
    return applies


def _applies_traced() -> bool:
    """The same for one that is traced. Its node is noted now, since compiled code will not come by here."""
    if torch._C._current_graph_task_id() == -1:
        marker = torch.get_autocast_dtype(MARKER) if torch.is_autocast_enabled(MARKER) else None
        NODES.note(compiled=marker is COMPILED)
        WIDENED_NODES.note(compiled=marker is _WIDENED_COMPILED)
    return _applies()


def _is_traced(value: Tensor) -> bool:
    return isinstance(value, sys.modules["torch._subclasses.functional_tensor"].FunctionalTensor)
