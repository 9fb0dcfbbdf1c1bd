"""Float32 masters in the place of an optimizer's 16-bit parameters, and gradients on their way to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from ....formats import LOW_DTYPES
from ._shown import Shown, multiply
from .scaler import LossScaler

MASTER_OF: Any = WeakTensorKeyDictionary()
"""The master of every 16-bit parameter that has one, for hooks of models, which know of no optimizer."""


class MastersOfOptimizer:
    """The masters of one optimizer. They are made when first needed, and then stand in its param_groups.

    Lists named `..._groups` have a list for each group; `all_...` are flat, and pair up by position. Frozen parameters
    are in none of them and stay as they are.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.lazy_init_called = False
        self.fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp32_groups: list[list[Parameter]] = []
        self.all_fp16_params: list[Parameter] = []
        self.all_fp32_from_fp16_params: list[Parameter] = []
        self.all_fp32_from_fp32_params: list[Parameter] = []
        self.all_fp32_params = self.all_fp32_from_fp32_params
        self.all_fp32_from_fp32_grad_stash: list[Tensor | None] = []
        self.shown = Shown()

    def lazy_init(self) -> None:
        """Make the masters, once."""
        if self.lazy_init_called:
            return
        self.lazy_init_called = True
        for group in self._optimizer.param_groups:
            self.make_masters(group)

    @torch.no_grad()
    def make_masters(self, group: dict[str, Any]) -> None:
        """Put masters in the place of a group's 16-bit parameters; state that exists moves to them, in float32."""
        low: list[Parameter] = []
        masters: list[Parameter] = []
        full: list[Parameter] = []
        state = self._optimizer.state
        for i, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter.dtype not in LOW_DTYPES:
                full.append(parameter)
                continue
            master = Parameter(parameter.detach().clone().float())
            master.__dict__.update(parameter.__dict__)  # marks such as "no weight decay" that optimizers look for
            group["params"][i] = master
            if parameter in state:
                state[master] = {key: _full(value) for key, value in state.pop(parameter).items()}
            MASTER_OF[parameter] = master
            low.append(parameter)
            masters.append(master)
        self.fp16_groups.append(low)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(full)
        self.all_fp16_params += low
        self.all_fp32_from_fp16_params += masters
        self.all_fp32_from_fp32_params += full
        self.all_fp32_from_fp32_grad_stash += [None] * len(full)

    def prepare_backward(self) -> None:
        """Put gradients aside: backward then writes new ones instead of adding to them."""
        self.prepare_low()
        put_aside(self.all_fp32_from_fp32_params, self.all_fp32_from_fp32_grad_stash)

    def prepare_low(self) -> None:
        """Clear the model's 16-bit gradients, which the masters have."""
        self.lazy_init()
        for parameter in self.all_fp16_params:
            parameter.grad = None
        self.shown.forget()

    def post_backward(self, scaler: LossScaler) -> None:
        """Unscale the model's gradients into the masters', added to what those hold; the model's stay scaled."""
        self.lazy_init()
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            given: Tensor | None = parameter.grad
            if given is None:
                continue
            given = given.coalesce().to_dense() if given.layout is torch.sparse_coo else given
            if master.grad is None:
                master.grad = torch.empty_like(master)
                fresh.append((given, master.grad))
            else:
                added.append((given, master.grad))
        scaler.unscale([g for g, _ in fresh], [m for _, m in fresh])
        totals = [m for _, m in added]
        scaler.unscale_with_stashed([g for g, _ in added], totals, totals)
        unscale_and_add(self.all_fp32_from_fp32_params, self.all_fp32_from_fp32_grad_stash, scaler)
        self.shown.show(self.all_fp16_params)

    def follow_gradients(self, stepping: bool = False) -> None:
        """Follow those who clear the model's gradients; RuntimeError for such as no master has learnt of."""
        self.lazy_init()
        self.shown.follow(self.all_fp16_params, self.all_fp32_from_fp16_params, stepping)

    def bring_under(self, scale: float) -> None:
        """Before a pass whose gradients rest scaled: true gradients are scaled too, or in the masters already."""
        self.prepare_low()
        multiply(self.all_fp32_from_fp32_params, scale)

    def rescale(self, factor: float) -> None:
        """Multiply gradients that rest scaled."""
        multiply([*self.all_fp16_params, *self.all_fp32_from_fp32_params], factor)

    def abandon_backward(self) -> None:
        """The backward pass failed: its gradients are dropped, and those from before it are back."""
        for parameter in self.all_fp16_params:
            parameter.grad = None
        self.shown.forget()
        put_back(self.all_fp32_from_fp32_params, self.all_fp32_from_fp32_grad_stash)

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """Round the masters into the model."""
        if self.all_fp16_params:
            torch._foreach_copy_(list[Tensor](self.all_fp16_params), list[Tensor](self.all_fp32_from_fp16_params))

    def _numbers(self) -> dict[int, Parameter]:
        """Masters by the number that torch's state_dict gives to their parameter."""
        masters = set(map(id, self.all_fp32_from_fp16_params))
        everything = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {i: p for i, p in enumerate(everything) if id(p) in masters}

    def numbered_masters(self) -> dict[int, Tensor]:
        """Copies of the masters by parameter number; empty before there are any."""
        return {i: master.detach().clone() for i, master in self._numbers().items()}

    def check_masters(self, saved: dict[int, Tensor] | None) -> None:
        """ValueError if saved masters are not those of this optimizer's parameters."""
        if saved is None:
            return
        own = {i: tuple(master.shape) for i, master in self._numbers().items()}
        given = {i: tuple(master.shape) for i, master in saved.items()}
        if own != given:
            odd = sorted(i for i in own.keys() | given.keys() if own.get(i) != given.get(i))
            raise ValueError(
                f"the saved master weights do not fit this optimizer: parameter {odd[0]} has shape "
                f"{given.get(odd[0])} in the checkpoint and {own.get(odd[0])} here. Build model and optimizer as they "
                "were when it was saved, at the same opt_level."
            )

    @torch.no_grad()
    def load_masters(self, saved: dict[int, Tensor] | None) -> None:
        """Take saved masters, and round them into the model."""
        if saved is not None:
            for i, master in self._numbers().items():
                master.copy_(saved[i])
            self.masters_to_model()


@torch.no_grad()
def follow(parameter: Tensor, written: Tensor) -> None:
    """A 16-bit parameter is about to be given new values: its master takes those that it does not round to already."""
    master = MASTER_OF.get(parameter)
    if master is not None and master.shape == written.shape:
        new = written.to(master.device, torch.float32)
        master.copy_(torch.where(new.to(parameter.dtype) == master.to(parameter.dtype), master, new))


class PlainParameters:
    """The same where the optimizer steps the model's own parameters."""

    def __init__(self, stash: Any) -> None:
        self._stash = stash

    def _parameters(self) -> list[Parameter]:
        stash = self._stash
        found = [p for group in stash._optimizer.param_groups for p in group["params"]]
        if len(found) != len(stash.all_fp32_from_fp32_grad_stash):
            stash.all_fp32_from_fp32_grad_stash[:] = [None] * len(found)
        stash.lazy_init_called = True
        stash.all_fp16_params[:] = [p for p in found if p.dtype in LOW_DTYPES]
        stash.all_fp32_from_fp32_params[:] = [p for p in found if p.dtype not in LOW_DTYPES]
        return found

    def lazy_init(self) -> None:
        """Look at the optimizer's parameters."""
        self._parameters()

    def prepare_backward(self) -> None:
        """Put gradients aside."""
        self._current = self._parameters()
        put_aside(self._current, self._stash.all_fp32_from_fp32_grad_stash)

    def post_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients, and add those from before."""
        unscale_and_add(self._parameters(), self._stash.all_fp32_from_fp32_grad_stash, scaler)

    def bring_under(self, scale: float) -> None:
        """Before a pass whose gradients rest scaled: those that are there are scaled, too."""
        multiply(self._parameters(), scale)

    rescale = bring_under

    def abandon_backward(self) -> None:
        """Bring back the gradients from before."""
        put_back(self._current, self._stash.all_fp32_from_fp32_grad_stash)


def put_aside(parameters: Sequence[Parameter], stash: list[Tensor | None]) -> None:
    """Move gradients into `stash`."""
    for i, parameter in enumerate(parameters):
        stash[i], parameter.grad = parameter.grad, None


def put_back(parameters: Sequence[Parameter], stash: list[Tensor | None]) -> None:
    """Move gradients back from `stash`, over whatever came since."""
    for i, parameter in enumerate(parameters):
        parameter.grad, stash[i] = stash[i], None


def unscale_and_add(parameters: Sequence[Parameter], stash: list[Tensor | None], scaler: LossScaler) -> None:
    """Unscale gradients in place, and add what was put aside; only the new ones are judged."""
    fresh: list[Tensor] = []
    added: list[tuple[Tensor, Tensor]] = []
    for i, parameter in enumerate(parameters):
        new, kept = parameter.grad, stash[i]
        stash[i] = None
        if new is None:
            parameter.grad = kept
        elif kept is None:
            parameter.grad = new if new.layout is torch.strided else new.coalesce()
            fresh.append(_values(parameter.grad))
        elif new.layout is torch.strided and kept.layout is torch.strided:
            added.append((new, kept))
        else:
            parameter.grad = new = new if new.layout is torch.strided else new.coalesce()
            scaler.unscale([_values(new)], [_values(new)], models_are_masters=True)
            parameter.grad = _sum(new, kept)
    scaler.unscale(fresh, fresh, models_are_masters=True)
    new_ones = [new for new, _ in added]
    scaler.unscale_with_stashed(new_ones, [kept for _, kept in added], new_ones)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Of two gradients, one of them sparse at least; in float32, since torch adds no sparse tensors of 16 bits."""
    a, b = (x.float() if x.dtype in LOW_DTYPES else x for x in (one, other))
    total = (a + b).coalesce() if a.layout is b.layout else a.to_dense() + b.to_dense()
    return total.to(one.dtype)


def _values(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient._values()


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value
