"""The magnitudes of one step, by module: activations and their gradients, weights and theirs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...formats import name_of
from ...tree import tensors
from ..exponents import Exponents
from ..hooks import Clock, is_traced
from ..measure import spread_of, values_here
from ..names import Names


class Telemetry:
    """The counts of one step. Nothing is installed before `open` and after `close`."""

    def __init__(self, names: Names, step: int, clock: Clock) -> None:
        self.step = step
        self.scale = 1.0
        """On the weights' gradients when they were counted."""
        self.backward_scale = 1.0
        """On the loss, and so on the activations' gradients."""
        self._names, self._clock = names, clock
        self._counts: dict[tuple[str, str, str], Exponents] = {}
        self._hook: Any = None
        self._outputs: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        self._hooked: set[str] = set()
        self.has_weights = False
        """Whether the weights of this step have been counted."""
        self.in_backward = False
        """Whether what runs forward now is recomputed for the backward pass."""

    def open(self) -> None:
        """Count what modules return from here on."""
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_hook(self._left)

    def close(self) -> None:
        """Count no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._outputs.clear()

    def _left(self, module: nn.Module, args: Any, out: Any) -> None:
        if is_traced() or torch._C._functorch.maybe_current_level() is not None:
            return  # inside vmap and the like tensors are not tensors: what is counted would be batched, too
        path = self._names.get(module)
        if path is None:
            return
        with self._clock:
            for tensor in tensors(out):
                if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_inference():
                    self._gave(path, tensor)

    def _gave(self, path: str, tensor: Tensor) -> None:
        seen = id(tensor), tensor._version  # what works in place gives the same tensor with other numbers
        before = self._outputs.get(seen)
        if before is not None and before() is tensor:
            return  # a container hands on what its last part gave; that is the part's
        if not self.in_backward:
            self._outputs[seen] = weakref.ref(tensor)
            self._count(path, "activation", tensor)
        if tensor.requires_grad and not (self.in_backward and path in self._hooked):
            self._hooked.add(path)
            tensor.register_hook(functools.partial(self._came, path))

    def _came(self, path: str, grad: Tensor) -> None:
        if grad.layout is torch.strided:
            with self._clock:
                self._count(path, "activation gradient", grad)

    def _count(self, path: str, kind: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        key = path, kind, name_of(tensor.dtype)
        with _disable_current_modes(), torch.no_grad():
            self._counts[key] = self._counts.get(key, Exponents(0, ())) + spread_of(values_here(tensor.detach()))

    def weights(self, parameters: Iterable[Tensor], scale: float) -> None:
        """Count weights and their gradients, just before a step."""
        self.scale, self.has_weights = scale, True
        for parameter in parameters:
            path = self._names.owners.get(id(parameter))
            grad = parameter.grad
            if path is not None and grad is not None and grad.layout is torch.strided:
                self._count(path, "weight", parameter)
                self._count(path, "gradient", grad)

    def facts(self) -> dict[str, Any]:
        """Step, scales and `rows` of {module, kind, dtype} with what `Exponents.to_dict` gives."""
        self.close()
        rows = [
            {"module": module, "kind": kind, "dtype": dtype, **counts.to_dict()}
            for (module, kind, dtype), counts in self._counts.items()
            if counts.total
        ]
        return {"step": self.step, "scale": self.scale, "backward_scale": self.backward_scale, "rows": rows}
