"""Float32 masters in the places of an optimizer's 16-bit parameters: those of `amp` and those of `FP16_Optimizer`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import StateError
from ...formats import LOW_DTYPES
from ...tree import map_tensors
from ._notice import warn

SAVED = "amp_master_params"
"""The option of a saved group that has its masters: a list with None for parameters without. Optimizers keep options
that they do not know, so that it is there as well if the state was loaded before there were masters."""

MASTER_OF: Any = WeakTensorKeyDictionary()
"""The master of every 16-bit parameter that has one, for hooks of models, which know of no optimizer."""


class Masters:
    """The parameters of an optimizer by kind. Frozen ones are in none of the lists until they are not frozen any more.

    Lists named `..._groups` have a list for each group; `all_...` are flat. `fp16` are 16-bit parameters, and
    `fp32_from_fp16` their masters, in the same order; `fp32_from_fp32` are all others.
    """

    def __init__(self) -> None:
        self.fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp32_groups: list[list[Parameter]] = []
        self.all_fp16_params: list[Parameter] = []
        self.all_fp32_from_fp16_params: list[Parameter] = []
        self.all_fp32_from_fp32_params: list[Parameter] = []
        self._frozen: list[tuple[int, Parameter]] = []  # with the number of the group

    def make_masters(self, optimizer: Any, group: dict[str, Any]) -> None:
        """Put masters in the place of a group's 16-bit parameters; state that exists moves to them, in float32.

        Saved masters keep their bits where they round to what the parameters are now; a warning says if they do not.
        """
        parameters, number = list(group["params"]), len(self.fp16_groups)
        saved = group.pop(SAVED, None) or [None] * len(parameters)
        for lists in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            lists.append([])
        self._frozen += [(number, parameter) for parameter in parameters if not parameter.requires_grad]
        pairs = [pair for pair in zip(parameters, saved, strict=False) if pair[0].requires_grad]
        fit = [self._take(optimizer, group, number, *pair) for pair in pairs]
        if not all(fit):
            warn(
                "the optimizer's state was loaded before amp.initialize, and its float32 masters are not those of the "
                "model as it is now, so that the model's weights are taken. Write amp.initialize(...) first, then "
                "model.load_state_dict(...) and optimizer.load_state_dict(...)"
            )

    def take_unfrozen(self, optimizer: Any) -> None:
        """Take in what was frozen and is not any more, since its gradients will be scaled as all others are."""
        late = [(number, parameter) for number, parameter in self._frozen if parameter.requires_grad]
        if late:
            self._frozen = [each for each in self._frozen if not each[1].requires_grad]
        for number, parameter in late:
            self._take(optimizer, optimizer.param_groups[number], number, parameter, None)

    @torch.no_grad()
    def _take(
        self, optimizer: Any, group: dict[str, Any], number: int, parameter: Parameter, saved: Tensor | None
    ) -> bool:
        """Whether its saved master, if there is one, rounds to what the parameter is now."""
        if parameter.dtype not in LOW_DTYPES:
            self.fp32_from_fp32_groups[number].append(parameter)
            self.all_fp32_from_fp32_params.append(parameter)
            return True
        master, fits = Parameter(parameter.detach().clone().float()), True
        if saved is not None and saved.shape == master.shape:
            kept = saved.to(master.device)
            same = kept.to(parameter.dtype) == parameter
            master.copy_(torch.where(same, kept, master))
            fits = bool(same.all())
        master.__dict__.update(parameter.__dict__)  # marks such as "no weight decay" that optimizers look for
        group["params"][:] = [master if each is parameter else each for each in group["params"]]
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = map_tensors(lambda x: x.float() if x.dtype in LOW_DTYPES else x, state)
        MASTER_OF[parameter] = master
        for lows in (self.fp16_groups[number], self.all_fp16_params):
            lows.append(parameter)
        for masters in (self.fp32_from_fp16_groups[number], self.all_fp32_from_fp16_params):
            masters.append(master)
        return fits

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """Round the masters into the model."""
        if self.all_fp16_params:
            torch._foreach_copy_(list[Tensor](self.all_fp16_params), list[Tensor](self.all_fp32_from_fp16_params))


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiply the gradients that are there."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@torch.no_grad()
def clear_gradients(parameters: Iterable[Parameter], to_none: bool) -> None:
    """Make gradients zeros, or None, as sparse ones always become."""
    kept: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or to_none or parameter.grad.layout is not torch.strided:
            parameter.grad = None
        else:
            kept.append(parameter.grad.detach_())
    if kept:
        torch._foreach_zero_(kept)


@torch.no_grad()
def update_master(parameter: Tensor, written: Tensor) -> None:
    """A 16-bit parameter is about to be given new values: its master takes those that it does not round to already."""
    master = MASTER_OF.get(parameter)
    if master is not None and master.shape == written.shape:
        new = written.to(master.device, torch.float32)
        master.copy_(torch.where(new.to(parameter.dtype) == master.to(parameter.dtype), master, new))


def fitting(masters: Iterable[Tensor | None], saved: Iterable[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Masters with the saved ones, by position; those that are missing on either side are left out.

    `StateError`, a ValueError, if they do not fit.
    """
    own, given = list(masters), list(saved)
    pairs = [(m, s) for m, s in zip(own, given, strict=False) if m is not None and s is not None]
    if len(own) != len(given) or any(master.shape != value.shape for master, value in pairs):
        shapes = [[None if each is None else tuple(each.shape) for each in some] for some in (given, own)]
        raise StateError(
            f"the masters in this state have shapes {shapes[0]}, and those of the optimizer {shapes[1]}: they are "
            "matched by position, so build model and optimizer as they were when it was saved, at the same opt_level"
        )
    return pairs


def forwarded(path: str, doc: str) -> property:
    """An attribute of something inside, such as "optimizer.state", which may be set."""
    inner, _, name = path.rpartition(".")
    return property(attrgetter(path), lambda self, value: setattr(attrgetter(inner)(self), name, value), doc=doc)
