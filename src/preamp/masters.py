"""Master weights: the float32 copies that an optimizer steps while the model computes in 16 bits.

The optimizer keeps the model's own parameters in its groups. While it works, each parameter's data is swapped for its
master and its gradient for a float32 one; afterwards the new master is rounded into the 16-bit data. So
`zero_grad` of the optimizer and of the model, `add_param_group`, LR schedulers, hooks and `state_dict` see the
parameters they always saw, and any optimizer's state is made in float32.

A master follows its parameter: one that was written from outside (`load_state_dict`, an EMA, a clamp) takes over the
entries that changed, and keeps its own bits where the written value is what the master rounds to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from .errors import PreampWarning, StateError

AUDITS = 4
"""Steps at the start in which parameters are compared with their masters."""


@dataclass(slots=True)
class _Entry:
    name: str
    master: Tensor
    """float32, of the parameter's shape; the parameter's data while swapped in."""
    low: Tensor
    """The 16-bit data that the model computes with."""
    version: int
    """The parameter's version counter when master and low last agreed."""
    low_grad: Tensor | None = None


class Masters:
    """The masters of a session's low parameters, by parameter."""

    wanted = True
    """Whether a low parameter that turns up later should get a master too."""

    def __init__(self) -> None:
        self._entries: dict[Parameter, _Entry] = {}
        self._inside: dict[Parameter, _Entry] = {}
        self._audits_left = AUDITS

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._entries

    @property
    def swapped_in(self) -> bool:
        """Whether some parameters hold their masters now."""
        return bool(self._inside)

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a low one; its present data becomes the master."""
        master = parameter.data
        parameter.data = master.to(dtype)
        if parameter.grad is not None:
            parameter.grad = None
        self._entries[parameter] = _Entry(name, master, parameter.data, parameter._version)

    def adopt(self, name: str, parameter: Parameter) -> None:
        """Make a master for a parameter that is already low."""
        self._entries[parameter] = _Entry(name, parameter.data.float(), parameter.data, parameter._version)

    def refresh(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Let the masters follow parameters that were written from outside since the last step."""
        for parameter in self._entries if parameters is None else parameters:
            entry = self._entries.get(parameter)
            if entry is None or parameter in self._inside:
                continue
            data = parameter.data
            if parameter._version == entry.version and data.data_ptr() == entry.low.data_ptr():
                continue
            master = entry.master.to(data.device)
            kept = data == master.to(data.dtype)
            entry.master = torch.where(kept, master, data.float()) if data.dtype is not torch.float32 else data.clone()
            entry.low, entry.version = data, parameter._version

    def refresh_before_step(self, parameters: Sequence[Parameter]) -> None:
        """`refresh`, and in the first steps a look at the values themselves.

        A write through `parameter.data` leaves no trace but its values. Comparing those costs a pass over the
        parameters, so it is done at the start of training only, unless it finds something: then always.
        """
        self.refresh(parameters)
        if not self._audits_left:
            return
        written = [p for p in parameters if p in self._entries and not self._agrees(p)]
        for parameter in written:
            self._entries[parameter].version = -1
        self.refresh(written)
        if written and self._audits_left > 0:
            self._audits_left = -1
            warnings.warn(
                f"{self._entries[written[0]].name} was written through .data, which leaves no trace, so every step "
                "has to compare parameters with their masters from now on. Write through the parameter itself: "
                "`with torch.no_grad(): p.clamp_(...)`",
                PreampWarning,
                stacklevel=2,
            )
        elif self._audits_left > 0:
            self._audits_left -= 1

    def _agrees(self, parameter: Parameter) -> bool:
        entry = self._entries[parameter]
        low = parameter.data
        return bool(((low == entry.master.to(low.dtype)) | low.isnan()).all())

    def swap_in(self, parameters: Iterable[Parameter], gradients: Mapping[Parameter, Tensor] | None = None) -> None:
        """Give parameters their masters as data, and the float32 `gradients` (None where a parameter has none)."""
        for parameter in parameters:
            entry = self._entries.get(parameter)
            if entry is None or parameter in self._inside:
                continue
            entry.low_grad, parameter.grad = parameter.grad, None
            parameter.data = entry.master
            if gradients is not None:
                parameter.grad = gradients.get(parameter)
            self._inside[parameter] = entry

    def swap_out(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Round the masters into the low data and give it back, with the low gradients that were there."""
        leaving = list(self._inside if parameters is None else (p for p in parameters if p in self._inside))
        entries = [self._inside.pop(parameter) for parameter in leaving]
        for parameter, entry in zip(leaving, entries, strict=True):
            parameter.grad = None
            entry.master = parameter.data  # an optimizer may have put another tensor there
        with torch.no_grad():
            if entries:
                torch._foreach_copy_([e.low for e in entries], [e.master for e in entries])
        for parameter, entry in zip(leaving, entries, strict=True):
            parameter.data = entry.low
            parameter.grad, entry.low_grad = entry.low_grad, None
            entry.version = parameter._version

    def full(self) -> None:
        """Every parameter in float32, without a gradient, for as long as it takes; `low` is the way back."""
        self.refresh()
        self.swap_in(self._entries)

    def low(self) -> None:
        """Undo `full`; what was written into the parameters meanwhile is kept."""
        self.swap_out()

    def restore(self) -> None:
        """Give every parameter its master for good, and forget it."""
        self.swap_out()
        self.refresh()
        for parameter, entry in self._entries.items():
            parameter.grad = None
            parameter.data = entry.master
        self._entries.clear()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master) pairs, the masters being the live tensors."""
        self.refresh()
        for entry in self._entries.values():
            yield entry.name, entry.master

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take masters by name, and round them into the parameters. `StateError`, changing nothing, if not fitting."""
        self.swap_out()
        by_name = {entry.name: (parameter, entry) for parameter, entry in self._entries.items()}
        missing, foreign = sorted(by_name.keys() - state.keys()), sorted(state.keys() - by_name.keys())
        if missing or foreign:
            raise StateError(f"masters do not fit this model: missing {missing[:5]}, unexpected {foreign[:5]}")
        for name, (_, entry) in by_name.items():
            if state[name].shape != entry.master.shape:
                seen, expected = tuple(state[name].shape), tuple(entry.master.shape)
                raise StateError(f"the master {name!r} has shape {seen} in the state and {expected} here")
        with torch.no_grad():
            for name, (parameter, entry) in by_name.items():
                entry.master.copy_(state[name])
                entry.low = parameter.data
                entry.low.copy_(entry.master)
                entry.version = parameter._version


class NoMasters(Masters):
    """Parameters that nobody keeps a float32 copy of; the optimizer steps them as they are."""

    wanted = False

    def __init__(self) -> None:
        super().__init__()
        self._lowered: dict[Parameter, torch.dtype] = {}

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Round a float32 parameter into a low one."""
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
        self._lowered[parameter] = dtype

    def adopt(self, name: str, parameter: Parameter) -> None:
        """A low parameter stays as it is."""

    def full(self) -> None:
        """Every lowered parameter in float32, without a gradient."""
        for parameter in self._lowered:
            parameter.grad = None
            parameter.data = parameter.data.float()

    def low(self) -> None:
        """Undo `full`."""
        for parameter, dtype in self._lowered.items():
            parameter.data = parameter.data.to(dtype)

    def restore(self) -> None:
        """Every lowered parameter in float32 for good."""
        self.full()
        self._lowered.clear()
