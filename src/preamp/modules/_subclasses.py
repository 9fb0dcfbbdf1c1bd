"""Subclasses that are made on the fly, so that modules of a class get another forward and stay what they are."""

from __future__ import annotations

import inspect
import weakref
from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import nn


class Subclasses:
    """The subclasses of one kind, by what they are made from; each is kept while modules of it are there.

    `mixin`: a base of all of them. `original`: the name of the attribute that holds the class one is made from.
    `methods`: what they have in its place; `forward` gets its signature, and has to call it.
    """

    def __init__(self, mixin: type[nn.Module], original: str, **methods: Any) -> None:
        self._mixin, self._original, self._methods = mixin, original, methods
        self._made: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()

    def of(self, original: type[nn.Module]) -> type[nn.Module]:
        """The subclass of a class."""
        if _is_parametrized(original):  # it was made for one module
            return self._make(original)
        made = self._made.get(original)
        if made is None:
            made = self._made[original] = self._make(original)
        return made

    def _make(self, original: type[nn.Module]) -> type[nn.Module]:
        """A subclass; of a class that torch.nn.utils.parametrize has made for one module, one like it over a subclass,
        since to remove the parametrization is to go back to its base.
        """
        body: dict[str, Any] = {self._original: original}
        if _is_parametrized(original):
            own = {name: value for name, value in vars(original).items() if name not in ("__dict__", "__weakref__")}
            return type(original.__name__, (self.of(original.__bases__[0]),), {**own, **body})
        ours = self._methods["forward"]
        forward = FunctionType(ours.__code__, ours.__globals__, "forward", None, ours.__closure__)
        forward.__doc__, forward.__module__ = original.forward.__doc__, original.__module__
        forward.__qualname__ = getattr(original.forward, "__qualname__", "forward")
        with suppress(TypeError, ValueError):  # of a forward that is no Python function
            forward.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
        body |= {**self._methods, "forward": forward}
        body |= {"__module__": original.__module__, "__doc__": original.__doc__}
        bases = (self._mixin,) if issubclass(self._mixin, original) else (original, self._mixin)  # of a bare nn.Module
        return type(original.__name__, bases, body)

    def leave(self, module: nn.Module) -> None:
        """Give a module the class that it would have else, whatever was made of its class meanwhile."""
        kind: Any = type(module)
        if self._original in vars(kind):
            module.__class__ = vars(kind)[self._original]
        else:  # other code has made a subclass for it: torch.nn.utils.parametrize
            kind.__bases__ = tuple(vars(base).get(self._original, base) for base in kind.__bases__)


def _is_parametrized(kind: type[nn.Module]) -> bool:
    base = kind.__bases__[0]
    return kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__ == f"Parametrized{base.__name__}"
