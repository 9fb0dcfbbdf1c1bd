"""Sessions without masters, and shadows: 16-bit copies of float32 parameters, with 16-bit gradients on their leaves.

With shadows a level keeps its meaning (float32 parameters, checkpoints and optimizer untouched), and a step has the
traffic of master weights: the forward pass reads the copy instead of casting the weight, backward does not cast the
16-bit gradient (`Tensor.grad_dtype`), and the optimizer's one pass reads it and writes parameter and copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import Storage, Tensors
from ..sharding import held_here
from .leaves import Leaf, Leaves
from .masters import Masters
from .swap import rebuild_reducers, set_data, swap


class NoMasters(Masters):
    """Parameters without a float32 copy; the optimizer steps them directly."""

    wanted = False

    def __init__(self) -> None:
        super().__init__()
        self._lowered: dict[Parameter, torch.dtype] = {}
        self._others: dict[Parameter, Parameter] = {}
        """The 16-bit versions of lowered parameters, while they are float32."""

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Round a float32 parameter into a low one."""
        set_data(parameter, parameter.data.to(dtype))
        self._lowered[parameter] = dtype

    def adopt(self, name: str, parameter: Parameter, master: Tensor | None = None) -> None:
        """Nothing to do for a low parameter."""

    def full(self) -> None:
        """Every lowered parameter in float32, without a gradient."""
        for parameter in self._lowered:
            if parameter not in self._others:
                self._others[parameter] = Parameter(parameter.data.float(), parameter.requires_grad)
                swap(parameter, self._others[parameter])

    def low(self) -> None:
        """Undo `full`."""
        for parameter, other in list(self._others.items()):
            if other.dtype is not torch.float32:  # not so where an interrupt came before they changed places
                other.requires_grad_(parameter.requires_grad)
                swap(parameter, other)
            with torch.no_grad():
                if not torch.equal(held_here(parameter), held_here(other.to(parameter.dtype))):
                    parameter.copy_(other)
            del self._others[parameter]

    def restore(self) -> None:
        """Every lowered parameter in float32 for good."""
        self.low()
        for parameter in self._lowered:
            set_data(parameter, parameter.data.float())
        rebuild_reducers(self._lowered)
        self._lowered.clear()


class _Through(torch.autograd.Function):
    """The copy in the forward pass; in backward its gradient, as it is, for the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shadow: Tensor) -> Tensor:
        return shadow.view_as(shadow)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shadows(NoMasters):
    """The 16-bit copies of a session's float32 weights, by parameter."""

    shadows = True

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._low = low
        self._shadow: dict[Parameter, Leaf] = {}
        self._wide: set[Parameter] = set()

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._shadow

    @property
    def _any(self) -> bool:
        return bool(self._shadow)

    @property
    def swapped_in(self) -> bool:
        """Whether some parameters have float32 gradients now."""
        return bool(self._wide)

    def shadow(self, parameter: Parameter) -> None:
        """Keep a copy of a float32 parameter, and have autograd leave its gradient in 16 bits."""
        copy = parameter.detach().to(self._low)
        self._shadow[parameter] = Leaf("", copy, copy, self._agreed.add(parameter))
        self._every = None
        parameter.grad = None
        parameter.grad_dtype = self._low

    def through(self, parameter: Any) -> Tensor:
        """What the forward pass computes with in place of a parameter."""
        leaf = self._shadow.get(parameter)
        if leaf is None:
            return super().through(parameter)
        copied: Tensor = _Through.apply(parameter, leaf.stored)
        return copied

    def leaves_of(self, parameters: Sequence[Parameter]) -> Leaves:
        """The copies of parameters that have one."""
        return Leaves(parameters, self._shadow, self._agreed)

    def refresh(self, leaves: Leaves | None = None, addresses: tuple[int, ...] | None = None) -> None:
        """Copy parameters that were written from outside. A write through `.data` leaves no trace and is not seen."""
        if leaves is None:
            leaves = self._every = self._every or self.leaves_of(list(self._shadow))
        if leaves.agree(addresses):
            return
        with torch.no_grad():
            for parameter, leaf in zip(leaves.parameters, leaves.leaves, strict=True):
                if not self._agreed.holds(leaf.number, parameter):
                    leaf.stored = leaf.stored.to(parameter.device).copy_(parameter)
                    self._agreed.note(leaf.number, parameter)
                    self._agreed.exchanges += 1

    def place(self, storage: Storage, stored: Tensors, parameters: Tensors) -> None:
        """Have the step write the copies too."""
        storage.copies = stored

    def swap_in(self, parameters: Iterable[Parameter], gradients: Mapping[Parameter, Tensor] | None = None) -> None:
        """Give parameters float32 gradients, for those who want to read or change true ones."""
        for parameter in parameters:
            if parameter in self._shadow and parameter not in self._wide:
                self._grad_dtype(parameter, torch.float32)
                parameter.grad = None if gradients is None else gradients.get(parameter)
                self._wide.add(parameter)

    def swap_out(
        self, parameters: Iterable[Parameter] | None = None, scale: Tensor | None = None, changed: bool = False,
        lazily: bool = False,
    ) -> list[tuple[Parameter, Parameter]]:  # fmt: skip
        """Turn gradients into 16 bits again: the present ones, times `scale`, and all later ones."""
        for parameter in list(self._wide if parameters is None else (p for p in parameters if p in self._wide)):
            wide = parameter.grad
            self._grad_dtype(parameter, self._low)
            if wide is not None:
                parameter.grad = (wide if scale is None else wide * scale.to(wide.device)).to(self._low)
            self._wide.discard(parameter)
        return []

    def restore(self) -> None:
        """Parameters without copies, with gradients of their own dtype."""
        for parameter in self._shadow:
            self._grad_dtype(parameter, parameter.dtype)
        self._shadow.clear()
        self._every = None
        self._wide.clear()
        super().restore()

    @staticmethod
    def _grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
        parameter.grad = None
        parameter.grad_dtype = dtype


@lru_cache
def shadows_work(device_type: str, low: torch.dtype) -> bool:
    """Whether this torch leaves 16-bit gradients on float32 leaves (`Tensor.grad_dtype`, torch 2.10); it tries."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return False
    try:
        with torch.enable_grad():
            leaf = Parameter(torch.ones(2, device=device_type))
            leaf.grad_dtype = low
            _Through.apply(leaf, leaf.detach().to(low)).sum().backward()
        return leaf.grad is not None and leaf.grad.dtype is low
    except (RuntimeError, TypeError):
        return False
