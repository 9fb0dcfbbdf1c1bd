"""One forward pass under observation: every operator, the module it ran in, and the line that asked for it.

The dispatch mode sits below autocast and autograd, so it sees operators in the dtypes in which they really run. What
it sees goes to watchers, one for each thing looked for.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..autocast import MARKER, REGISTRY, autocast
from ..errors import PolicyError, SessionError
from ..formats import LOW_DTYPES
from ..ledger import Masters, NoMasters
from ..modules import CastingModule, Conversion
from ..policy import Policy
from ..tree import map_tensors, tensors
from ._places import UNINITIALISED
from ._random import random_kept
from ._stack import Line, walk


@dataclass(slots=True)
class Call:
    """One operator call, as watchers see it; `args` may be replaced before it runs."""

    name: str
    """As the dispatcher spells it, without namespace and without an overload called default: "add.Tensor"."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str | None
    """Path of the innermost module whose forward was running; None outside of all models."""
    torchs_own: bool
    """Whether it ran inside a plain torch.autocast, which has rules of its own."""
    autocast_on: bool
    out: Any = None
    at: Line | None = None
    """File and line, where they are known already."""

    @property
    def base(self) -> str:
        """The operator without overload and in-place underscore."""
        name = self.name.partition(".")[0]
        return name if name.startswith("_") else name.rstrip("_")

    @property
    def inputs(self) -> list[Tensor]:
        """Floating tensors among the arguments."""
        return [t for t in tensors((self.args, self.kwargs)) if t.is_floating_point()]

    def place(self) -> Line:
        """File and line of the innermost frame that is neither torch's nor ours; (None, None) if there is none."""
        if self.at is not None:
            return self.at
        file, line = walk(_called.__code__).source
        return None if file is None else shown_path(file), line


class Watcher:
    """Looks at operator calls. The base class does nothing."""

    def begin(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Of the model that is about to run, with their paths."""

    def before(self, call: Call) -> None:
        """Before the operator runs; may put other values into `call.args`."""

    def after(self, call: Call) -> None:
        """After it ran; the result is in `call.out`."""

    def function(self, function: Any, args: tuple[Any, ...], module: str, place: Any) -> bool:
        """A torch function as the model calls it; True: it would be refused, run it in float32 instead."""
        return False


@dataclass
class _State:
    stack: list[str] = field(default_factory=list)
    torchs_own: bool = False
    autocast_on: bool = False
    error: BaseException | None = None
    failed: str = ""
    """The last error that left a module, and the innermost one that it left."""

    @property
    def module(self) -> str:
        return self.stack[-1] if self.stack else ""


class _Functions(TorchFunctionMode):
    """Notes the autocast state, which the dispatch mode below autocast cannot see any more."""

    def __init__(self, state: _State, watchers: Sequence[Watcher], device_type: str) -> None:
        super().__init__()
        self._state, self._watchers, self._device_type = state, watchers, device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        state = self._state
        state.autocast_on = torch.is_autocast_enabled(self._device_type)
        state.torchs_own = state.autocast_on and not torch.is_autocast_enabled(MARKER)
        place = Call("", (), {}, "", False, False).place
        if any(watcher.function(func, args, state.module, place) for watcher in self._watchers):
            with torch.autocast(self._device_type, enabled=False):
                return func(*(map_tensors(_floated, a) for a in args), **map_tensors(_floated, kwargs))
        return func(*args, **kwargs)


def _floated(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor


class _Operators(TorchDispatchMode):
    def __init__(self, state: _State, watchers: Sequence[Watcher]) -> None:
        super().__init__()
        self._state, self._watchers = state, watchers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = self._state
        name = str(func).partition(".")[2].removesuffix(".default")
        call = Call(name, tuple(args), dict(kwargs or {}), state.module, state.torchs_own, state.autocast_on)
        for watcher in self._watchers:
            watcher.before(call)
        call.out = func(*call.args, **call.kwargs)
        for watcher in self._watchers if call.base not in UNINITIALISED else ():
            watcher.after(call)
        return call.out


def shown_path(name: str) -> str:
    """A file's path as a reader wants it: relative to the working directory if it lies below."""
    relative = os.path.relpath(name)
    return name if relative.startswith("..") else relative


def observe(model: nn.Module, policy: Policy, example: Any, watchers: Sequence[Watcher]) -> Any:
    """Run `example` once through a copy of the model under the policy, and return what the model gave.

    The model is not touched: the run is on a deep copy, with cloned inputs; random generators and the rules in torch's
    dispatcher are put back. Hooks of the model run on the copy. Raises `SessionError` if the copy cannot be made or
    the example does not run.
    """
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    args, kwargs = map_tensors(_cloned, args), map_tensors(_cloned, kwargs)
    with random_kept():
        try:
            twin = copy.deepcopy(model)
        except Exception as error:
            raise SessionError(f"the model cannot be copied for a trial run; leave out example=: {error}") from error
        prepared = any(isinstance(module, CastingModule) for module in twin.modules())
        if not prepared:
            _convert(twin, policy)
        device_type = device_type_of(model, (args, kwargs))
        had_rules = bool(REGISTRY.stamp)
        state = _State(error=sys.exc_info()[1])
        hooks = list(_tracked(twin, state))
        for watcher in watchers:
            watcher.begin(twin.named_modules())
        region: Any = nullcontext()
        if policy.has_regions:
            region = autocast(device_type, dtype=policy.compute, rules=None if prepared else policy.ops)
        try:
            with region, torch.enable_grad(), _Functions(state, watchers, device_type), _Operators(state, watchers):
                return _called(twin, args, kwargs)
        except PolicyError:
            raise
        except Exception as error:
            where = f" in module {state.failed!r}" if state.error is error and state.failed else ""
            raise SessionError(
                f"the example did not run through the model under {policy.level or policy}{where}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
            if policy.has_regions and not had_rules:
                autocast.uninstall()


def _called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call itself: where the search for the user's line stops."""
    return model(*args, **kwargs)


def _convert(twin: nn.Module, policy: Policy) -> None:
    """The copy under the policy. A model that does not fit (cast by hand) runs as it is; PA111 says why."""
    try:
        Conversion(twin, policy, Masters() if policy.masters else NoMasters())
    except PolicyError:
        if not any(p.dtype in LOW_DTYPES for p in twin.parameters()):
            raise


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def device_type_of(model: nn.Module, example: Any = None) -> str:
    """Where the model is: its first parameter's or buffer's device type, else that of the example, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers(), *tensors(example)):
        return str(tensor.device.type)
    return "cpu"


def _tracked(model: nn.Module, state: _State) -> Iterator[Any]:
    """Hooks that keep the stack of running modules, also when a forward raises."""
    for path, module in model.named_modules():
        yield module.register_forward_pre_hook(_pusher(state, path), prepend=True)
        yield module.register_forward_hook(_popper(state), always_call=True)


def _pusher(state: _State, path: str) -> Callable[..., None]:
    def push(module: nn.Module, args: Any) -> None:
        state.stack.append(path)

    return push


def _popper(state: _State) -> Callable[..., None]:
    def pop(module: nn.Module, args: Any, out: Any) -> None:
        path = state.stack.pop()
        error = sys.exc_info()[1]
        if out is None and error is not None and error is not state.error:  # the innermost module is told first
            state.error, state.failed = error, path

    return pop
