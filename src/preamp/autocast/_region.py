"""`preamp.autocast`: a region of mixed precision, accepted wherever torch's is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..compiling import traced_by_callers, uncompiled
from ..errors import PolicyError, kind_of
from ..rules import OpRules
from ._nodes import NODES
from ._products import COMPILED, MARKER
from ._registry import MARKER_DTYPES, REGISTRY

F = TypeVar("F", bound=Callable[..., Any])


class autocast(torch.autocast):
    """`torch.autocast` with rules that are the same on every device; see `preamp rules` for the table.

    Use it as torch's: a context manager around the forward pass and the loss, or a decorator. Entering is safe to nest,
    also for one and the same object.

    Rules are installed for the process when the first region is entered and stay, because a checkpointed block is
    recomputed during backward. They apply inside preamp's regions and in the backward of what was computed there; plain
    `torch.autocast` keeps its own lists. `preamp.autocast.uninstall()` takes them out; a session's go with its
    `close()`.

    Args:
        device_type: "cpu", "cuda", ...
        dtype: float16 or bfloat16; None for torch's default on the device.
        enabled: False switches casting off inside an outer region.
        cache_enabled: Whether each weight's cast is kept for the length of the region.
        rules: An `OpRules` with changes of yours; None for those of the open session, else the default table.

    Raises:
        PolicyError: For other rules, and as `torch.export` enters it, which would keep torch's lists.

    >>> with preamp.autocast("cpu", dtype=torch.bfloat16):
    ...     torch.randn(4, 4).mm(torch.randn(4, 4)).softmax(-1).dtype
    torch.float32
    """

    _lingers = True
    """Whether the rules are to stay when no session holds them."""

    @traced_by_callers
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        rules: OpRules | None = None,
    ) -> None:
        if torch.compiler.is_compiling():  # torch's checks, which dynamo does not always trace, are for `_traced`
            self.device, self._enabled = device_type, enabled
            self.fast_dtype, self._cache_enabled = dtype, cache_enabled  # type: ignore[assignment]
        else:
            super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
            if not isinstance(rules, (OpRules, type(None))):
                raise PolicyError(f"rules={rules!r:.60} are no OpRules: write rules=OpRules().with_low('softmax')")
        self._rules = rules
        self._outer: list[tuple[Any, ...]] = []

    @traced_by_callers
    def __enter__(self) -> autocast:
        number = _ensure_rules(self._rules, self.device, self._lingers) if self._enabled else 0
        if torch.compiler.is_compiling():
            if self._enabled and not REGISTRY.stamp:  # reading it has dynamo guard compiled code on the rules
                raise AssertionError("the session of this region is closed: its rules are gone")
            if self._enabled and _is_exporting():
                raise PolicyError(_NOT_EXPORTED)
            traced = _traced(self.device, self.fast_dtype, self._enabled, self._cache_enabled)
            traced.__enter__()
            self._outer.append((traced,))
        else:
            self._enter(number)
        return self

    @uncompiled
    def _enter(self, number: int) -> None:
        self._outer.append((_state_of(self.device), NODES.now()))
        super().__enter__()
        torch.set_autocast_enabled(MARKER, True)
        torch.set_autocast_dtype(MARKER, MARKER_DTYPES[number % len(MARKER_DTYPES)])

    @traced_by_callers
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if torch.compiler.is_compiling():
            (traced,) = self._outer.pop()
            traced.__exit__(exc_type, exc_val, exc_tb)
        else:
            self._exit()

    @uncompiled
    def _exit(self) -> None:
        before, first_node = self._outer[-1]
        super().__exit__(None, None, None)
        _restore(self.device, before)
        NODES.add(first_node)
        self._outer.pop()  # last: an interrupt may come at any line

    def _unwind(self) -> None:
        """Undo all that this thread has entered since it entered this region, if it has."""
        if self._outer:
            _restore(self.device, self._outer[0][0])

    def __call__(self, func: F) -> F:
        """`func` run inside such a region; each call enters a region of its own, so recursion and threads are safe."""
        settings = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        return decorated(func, functools.partial(autocast, *settings, rules=self._rules))

    @staticmethod
    def uninstall() -> None:
        """Take preamp's rules out of torch's dispatcher now; `PolicyError` while a session is open."""
        REGISTRY.uninstall()


def _state_of(device_type: str) -> tuple[Any, ...]:
    """What regions are open in this thread, as far as torch knows."""
    torchs = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    ours = torch.is_autocast_enabled(MARKER), torch.get_autocast_dtype(MARKER)
    _, depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    return depth, torch.is_autocast_cache_enabled(), torchs, ours


def _restore(device_type: str, before: tuple[Any, ...]) -> None:
    """Undo all that was entered since `_state_of`, also what an interrupt has left open."""
    depth, cached, *dtypes = before
    for _ in range(torch.autocast_increment_nesting() - depth):
        torch.autocast_decrement_nesting()
    if depth <= 0:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    for kind, (enabled, dtype) in zip((device_type, MARKER), dtypes, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def decorated(func: F, region: Callable[[], Any]) -> F:
    """`func`, each call of which runs in a new `region()`."""
    if not callable(func):
        raise TypeError(f"autocast decorates a function, and this is {kind_of(func)}: {func!r}")

    @functools.wraps(func)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        with region():
            return func(*args, **kwargs)

    return in_region  # type: ignore[return-value]


@uncompiled
def _is_exporting() -> bool:
    """Run for real, too: while it traces, dynamo takes `is_exporting` for true before torch 2.9."""
    asked = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # before torch 2.7
    traces = sys.modules.get("torch._dynamo.symbolic_convert")
    tracing: Any = getattr(getattr(traces, "tls", None), "current_tx", None)
    return asked() or bool(getattr(tracing, "export", False))  # torch 2.7 tells of strict exports nowhere else


_NOT_EXPORTED = (
    "torch.export keeps the dtype of a region and not preamp's rules for operators, so that the exported program would "
    "compute otherwise than the model: export a copy without a region (copy.deepcopy(model) inside "
    "session.full_precision()), or enter torch.autocast in it, whose own lists an exported program follows"
)


@contextmanager
def _traced(device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None) -> Iterator[None]:
    """A region, marked, in regions that every dynamo knows; `REGISTRY.stamp`, which has been read, names the rules."""
    with torch.autocast(MARKER, dtype=COMPILED), torch.autocast(device_type, dtype, enabled, cache_enabled):
        yield


@uncompiled
def _ensure_rules(rules: OpRules | None, device_type: str, lingering: bool) -> int:
    """Rules in the dispatcher, and their number; run for real while dynamo traces, which then sees a constant."""
    return REGISTRY.enter(rules, device_type, lingering)


# What torch.compiler.assume_constant_result does, without importing the compiler for those who do not compile.
_constant: Any
for _constant in (_ensure_rules, _is_exporting):
    _constant._dynamo_marked_constant = True
