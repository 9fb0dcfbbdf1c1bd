"""Whether, where and how torch's functions cast: what every wrapper that amp puts on them asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....autocast import PRODUCTS
from .utils import Caster

_NAMES = {
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
}  # fmt: skip
"""What Apex called dtypes, in what it printed."""


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
        self.cache: dict[Tensor, Tensor] = {}
        """Parameters and their casts."""
        self._stamps: dict[Tensor, tuple[int, int]] = {}
        self._is_active = True
        self._saved: list[tuple[Any, str, bool, Any]] = []
        self.half_type = half_type
        self.takes_cpu = takes_cpu
        self._products = PRODUCTS.hold_while(self, everywhere=True) if takes_cpu else None
        """Ends the hold on products of the CPU: functions of torch are patched for all code, so it is for all, too."""

    def dtype_of(self, kind: str) -> torch.dtype:
        """The dtype that a user calls "half", "bfloat16" or "float"."""
        return {"half": self.half_type, "bfloat16": torch.bfloat16, "float": torch.float32}[kind]

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
        """Whether a tensor is on a device where casts happen."""
        return self.takes_cpu or x.device.type != "cpu"

    def caster(self, dtype: torch.dtype, name: str = "") -> Caster:
        """A cast of a floating tensor to `dtype`, if casts are for it. `name`: the function that they are told of with.

        That of a float32 parameter to 16 bits is made once until it is written, stepped, or `scale_loss` ends. Not kept
        where no gradient is recorded: such a copy would be found by the next training pass, without its gradient; and
        weights that are swapped for evaluation are written in ways that leave no trace.
        """
        keeps = self.has_cache and dtype is self.half_type

        def cast(x: Tensor) -> Tensor:
            if x.dtype is dtype or not self.takes(x):
                return x
            kept = keeps and isinstance(x, Parameter) and x.dtype is torch.float32 and x.requires_grad
            kept = kept and torch.is_grad_enabled() and not torch.compiler.is_compiling()
            stamp = (x._version, x.data_ptr()) if kept else None
            if kept and self._stamps.get(x) == stamp:
                return self.cache[x]
            result = x.to(dtype)
            if self.verbose and name:
                print(f"{_NAMES.get(x.dtype, x.dtype)}->{_NAMES.get(dtype, dtype)} ({name})")
            if stamp is not None:
                self.cache[x], self._stamps[x] = result, stamp
            return result

        return cast

    def _clear_cache(self) -> None:
        self.cache.clear()
        self._stamps.clear()

    def _save_func(self, module: Any, name: str, function: Any = None) -> None:
        """Remember what is under a name; a name that `module` only inherits is taken away again."""
        own = name in vars(module)
        self._saved.append((module, name, own, vars(module)[name] if own else None))

    def _deactivate(self) -> None:
        """Put everything back under the names in torch where it was found. A second call does nothing."""
        for module, name, own, function in reversed(self._saved):
            setattr(module, name, function) if own else delattr(module, name)
        self._saved.clear()
        if self._products is not None:
            self._products()
        self._clear_cache()
        self._is_active = False

    def remove_cache(self, param: Tensor) -> None:
        """Forget the cast of one parameter."""
        self.cache.pop(param, None)
        self._stamps.pop(param, None)
