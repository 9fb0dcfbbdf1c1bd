"""Kernels that lie in torch's dispatcher as long as something holds them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.compiler.config


class HeldKernels:
    """Some kernels, with those who hold them; the last one to release them clears the dispatcher."""

    def __init__(self) -> None:
        self._holders: set[object] = set()
        self._libraries: dict[str, list[torch.library.Library]] = {}
        self._tag = ""
        self._lock = threading.RLock()

    def hold(self, holder: object) -> None:
        """Have the kernels in the dispatcher until `release(holder)`."""
        with self._lock:
            self._holders.add(holder)
            self.install()

    def release(self, holder: object) -> None:
        """End a `hold()`; a second call does nothing."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._clear()

    def hold_while(self, thing: object, **options: Any) -> weakref.finalize[..., object]:
        """A `hold()` that ends with `thing`, or when what is returned is called."""
        holder = object()
        self.hold(holder, **options)
        end = weakref.finalize(thing, self.release, holder)
        end.atexit = False
        return end

    def install(self) -> None:
        """Put kernels that are missing into the dispatcher, if somebody holds them."""

    def _tag_compiled(self, tag: str) -> None:
        """Tell compiled code apart by `tag`: the compiler's cache on disk knows nothing of our kernels."""
        self._tag = tag
        torch.compiler.config.cache_key_tag += tag

    def _clear(self) -> None:
        for libraries in self._libraries.values():
            for library in libraries:
                library._destroy()
        self._libraries.clear()
        torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(self._tag, "")
        self._tag = ""


def go_on(op: Any, keyset: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator at the dispatch keys that come next.

    A lost session may end at any line, by the garbage collector, and its kernels with it, of which `keyset` still has
    the keys.
    """
    try:
        return op.redispatch(keyset, *args, **kwargs)
    except RuntimeError as error:
        if "fallthrough_kernel was executed" not in str(error):
            raise
        return op(*args, **kwargs)


def overload_of(name: str) -> Any:
    """The operator overload called "mm", "mm.out" or "mylib::attention", or None where this torch does not have it."""
    namespace, _, plain = name.rpartition("::")
    packet, _, overload = plain.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet, None), overload or "default", None)


def library_of(
    kernels: Iterable[tuple[str, Any]], key: str, *, namespace: str = "aten", with_keyset: bool = True
) -> torch.library.Library:
    """Put kernels, each with the name of its operator, into the dispatcher at a key, until the library is destroyed."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        # the dispatcher says that we replace a kernel, which is what we mean
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels:
            library.impl(name, kernel, key, with_keyset=with_keyset)
    return library
