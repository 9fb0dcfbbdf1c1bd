"""Tells when a script calls a model that it trains, and when that returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ._watch import Watch


class Calls:
    """Listens for the outermost call of a model; what it calls inside runs as if nobody looked."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.inside = False
        """Whether a model is running, the script's or by our doing."""
        self._hook: Any = None

    def listen(self) -> None:
        """From here on."""
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def close(self) -> None:
        """No more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Models that are called inside are called by us."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def compiled(self, module: nn.Module, compiled: Any, args: Any, kwargs: Any) -> Any:
        """A call by way of `module.compile()`: torch's hooks are part of the compiled code, and ours must not be."""
        if not self._begins(module):
            return compiled(*args, **kwargs)
        call, out = self._open(module, args, kwargs), None
        try:
            out = compiled(*args, **kwargs)
        except Exception as error:
            self._watch.errors.seen(error)
            raise
        finally:
            self._close(call, out)
        return out

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._begins(module):
            return
        call = self._open(module, args, sys._getframe(1).f_locals.get("kwargs", {}))

        def left(_: nn.Module, __: Any, out: Any) -> None:
            after.remove()
            error = sys.exc_info()[1]
            if out is None and error is not None:  # torch calls this hook while the error is on its way up
                self._watch.errors.seen(error)
            self._close(call, out)

        after = module.register_forward_hook(left, always_call=True)

    def _begins(self, module: nn.Module) -> bool:
        watch = self._watch
        if self.inside or watch.in_backward or not torch.is_grad_enabled() or not watch.recorder.is_own:
            return False
        return watch.names.wants(module)

    def _open(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.close()
        self.inside = True
        call = None
        with self._watch.clock:
            call = self._watch.model_called(module, args, kwargs)
        return call  # noqa: RET504  # an error of ours ends the region before

    def _close(self, call: Any, out: Any) -> None:
        self.inside = False
        if call is None:
            return  # looking has come to an end
        self.listen()
        if out is not None:
            self._watch.model_returned(call, out)


def telling_closure(args: Any, kwargs: Any, tell: Callable[[], None]) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's step with a closure that tells when it has made the gradients; None without."""
    closure = kwargs.get("closure") or next((one for one in args[1:] if callable(one)), None)
    if closure is None:
        return None

    def watched() -> Any:
        out = closure()
        tell()
        return out

    swap = {id(closure): watched}
    named = {name: swap.get(id(value), value) for name, value in kwargs.items()}
    return tuple(swap.get(id(value), value) for value in args), named
