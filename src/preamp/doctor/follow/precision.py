"""What precision a script requests, and where: autocast regions, casts by hand, and compilation."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...autocast import autocast
from ...formats import LOW_DTYPES
from ...frameworks import WRAPPERS
from ..findings.events import ModuleCast, RegionMade, WeightsChanged
from ..names import unwrapped
from ..places import users_line
from ..shadow.remedies import casts_low
from ..shadow.values import WIDE, has_shadow
from .run import Run

_PARALLEL = WRAPPERS - {"OptimizedModule", "_LightningModuleWrapperBase", "_FabricModule"}
TABLE = 1 << 14
"""Numbers of a tensor up to which it is a table."""
TABLES = 4096
"""So many are remembered at a time: a script may keep every small tensor that it casts."""


class Precision:
    """Follows autocast, casts and the compiler; `called`: takes the place of calls of a module that was compiled."""

    def __init__(self, run: Run, called: Callable[..., Any]) -> None:
        self._run, self._called = run, called
        self.compiled: str | None = None
        """"module" or "function" once torch.compile was called on one."""
        self.on_first_cast: Callable[[], None] | None = None
        """Follows what the script computes from here on: the mode for that slows every operator down."""
        self._depth_of_thread: Counter[int] = Counter()
        self._versions: dict[int, int] = {}

    def start(self) -> None:
        """From here on."""
        wrap = self._run.patches.wrap
        wrap(torch.autocast, "__init__", self._made)
        wrap(torch.autocast, "__enter__", self._enter)
        wrap(torch.autocast, "__exit__", self._exit)
        wrap(torch, "set_default_dtype", self._default)
        for name in ("half", "bfloat16", "to"):
            wrap(nn.Module, name, self._cast)
        for name in ("to", "type", "half", "bfloat16"):
            wrap(Tensor, name, self._cast_tensor)
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "new_tensor")):
            wrap(owner, name, self._make_tensor)
        wrap(torch, "compile", self._compile)
        wrap(nn.Module, "compile", self._compile)
        for module in self._run.names.given:
            self.called(module)
            if module._compiled_call_impl is not None:
                self.compiled = "module"
                self._follow_compiled(module)

    def called(self, module: nn.Module) -> None:
        """A module is called, or will be: one that was compiled before the watching began is known by its class."""
        if self.compiled is None and type(module).__name__ == "OptimizedModule":
            self.compiled = "module"

    @property
    def _depth(self) -> int:
        return self._depth_of_thread[threading.get_ident()]

    @property
    def keeps_casts(self) -> bool:
        """Whether a cast of a weight that is made now is used again until the region ends."""
        return self._depth > 0 and torch.is_autocast_cache_enabled()

    def model_called(self) -> None:
        """A model is about to run: its weights may have been changed since it ran before in the same region."""
        if not self.keeps_casts or not regions_entered():
            return
        versions = {id(p): p._version for p in self._run.names.parameters()}
        changes = sum(version - self._versions.get(key, version) for key, version in versions.items())
        if changes:
            self._run.emit(WeightsChanged(changes, self._run.stepped_at))
        self._versions = versions

    def _made(self, original: Any, region: Any, device_type: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        if "device_type" in kwargs:
            device_type = kwargs.pop("device_type")
        original(region, device_type, *args, **kwargs)
        requested = bool(kwargs.get("enabled", args[1] if len(args) > 1 else True))
        dtype = getattr(region, "fast_dtype", None)
        enabled = bool(getattr(region, "_enabled", requested))
        is_preamps = isinstance(region, autocast)
        self._run.emit(RegionMade(str(device_type), dtype, requested, enabled, is_preamps, users_line()))

    def _enter(self, original: Any, region: Any) -> Any:
        if self._depth == 0:
            self._versions = {}
        self._depth_of_thread[threading.get_ident()] += 1
        return self._changed(original(region))

    def _exit(self, original: Any, region: Any, *error: Any) -> Any:
        self._depth_of_thread[threading.get_ident()] -= 1
        return self._changed(original(region, *error))

    def _changed(self, out: Any) -> Any:
        self._run.tape.in_region = bool(regions_entered())
        return out

    def _cast(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if name != "to" or any(dtype in LOW_DTYPES for dtype in dtypes):
            kind, in_region = type(module).__name__, self._depth > 0 and bool(regions_entered())
            if in_region or kind in _PARALLEL:
                path = self._run.names.get(unwrapped(module))
                self._run.emit(ModuleCast(kind, path, name, in_region, kind in _PARALLEL, users_line()))
        with self._run.stream.paused():  # what it casts is noted tensor by tensor
            return original(module, *args, **kwargs)

    def _begin(self) -> None:
        begin, self.on_first_cast = self.on_first_cast, None
        if begin is not None and not self._run.step:
            begin()

    def _default(self, original: Any, dtype: Any) -> None:
        original(dtype)
        if dtype in LOW_DTYPES:
            self._begin()

    def _cast_tensor(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Remember what the script cast outside of models, where it is small: a table, a batch of indices."""
        if not self._run.stream.is_paused and casts_low(original.__name__, (tensor, *args), kwargs):  # no module's cast
            self._begin()
        out = original(tensor, *args, **kwargs)
        low = isinstance(out, Tensor) and out.dtype in LOW_DTYPES and not tensor.is_complex()
        new = low and out is not tensor and not out.is_inference() and has_shadow(out)
        casts = self._run.tape.readings.casts
        if new and out.numel() <= TABLE and len(casts) < TABLES and not self._run.is_ours:
            with self._run.clock, torch.no_grad(), _disable_current_modes():
                casts[out] = out._version, tensor.detach().to(WIDE), users_line()
                if not self._run.stream.is_paused:  # the line that casts a module is none to write otherwise
                    self._run.tape.readings.note(users_line())
        return out

    def _make_tensor(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Numbers of Python's that become a small 16-bit tensor: the same bits, by the cast that it is."""
        out, numbers = original(*args, **kwargs), bool(args) and isinstance(args[-1], (float, int, list, tuple))
        if not numbers or kwargs.keys() - {"dtype", "device"} or out.dtype not in LOW_DTYPES or out.numel() > TABLE:
            return out
        cast = original(*args, **{**kwargs, "dtype": WIDE}).to(out.dtype)
        return cast if torch.equal(cast, out) else out  # not where float32 has rounded, or is no number

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        module = args[0] if args and isinstance(args[0], nn.Module) else None
        # After, as Module.compile() comes down to compiling a function.
        self.compiled = "function" if module is None else "module"
        self._run.stop_waiting()  # compiled code would run as written where a mode is on, and for good
        if original.__name__ == "compile" and out is None and module is not None:
            self._follow_compiled(module)
        return out

    def _follow_compiled(self, module: nn.Module) -> None:
        """After `module.compile()`: a call of it goes past torch's hooks, so it says so by itself."""
        compiled, called = module._compiled_call_impl, self._called
        held = weakref.ref(module)  # it is the script's to let go of

        def call(*args: Any, **kwargs: Any) -> Any:
            return called(module, compiled, args, kwargs)

        call.of = compiled  # type: ignore[attr-defined]
        module._compiled_call_impl = call

        def undo() -> None:
            there: Any = held()
            if there is not None and hasattr(there._compiled_call_impl, "of"):
                there._compiled_call_impl = there._compiled_call_impl.of

        self._run.patches.on_close(undo)


def regions_entered() -> tuple[str, ...]:
    """Device types for which autocast is on in this thread."""
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
