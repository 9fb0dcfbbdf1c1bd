"""Sessions without masters: parameters that the optimizer steps as they are, in float32 or in 16 bits."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from ..formats import LOW_DTYPES
from ..sharding import held_here
from .masters import Masters
from .swap import rebuild_reducers, set_data, swap


class NoMasters(Masters):
    """Parameters without a float32 copy."""

    wanted = False

    def __init__(self) -> None:
        super().__init__()
        self._low: dict[Parameter, bool] = {}
        """The 16-bit parameters, each with whether it came in float32."""
        self._others: dict[Parameter, Parameter] = {}
        """The 16-bit versions of lowered parameters, while they are float32."""

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Round a float32 parameter into a low one."""
        set_data(parameter, parameter.data.to(dtype))
        self._low[parameter] = True

    def adopt(self, name: str, parameter: Parameter) -> None:
        """Have a parameter that is 16-bit take part in `full` and `low`."""
        if parameter.dtype in LOW_DTYPES:
            self._low.setdefault(parameter, False)

    def drop(self, parameter: Parameter) -> None:
        """Undo `adopt` or `lower`."""
        if self._low.pop(parameter, False):
            set_data(parameter, parameter.data.float())

    def full(self, adopted: bool = True) -> None:
        """Turn every low parameter into float32, without a gradient; those that came so if `adopted`."""
        for parameter, was_float in self._low.items():
            if parameter not in self._others and (was_float or adopted):
                self._others[parameter] = Parameter(parameter.data.float(), parameter.requires_grad)
                swap(parameter, self._others[parameter])

    def low(self) -> None:
        """Undo `full`."""
        for parameter, other in list(self._others.items()):
            if other.dtype is not torch.float32:  # not so where an interrupt came before they changed places
                other.requires_grad_(parameter.requires_grad)
                swap(parameter, other)
                self._handed_over(parameter, other)
            with torch.no_grad():
                if parameter.shape != other.shape:  # it was given other data
                    parameter.data = other.data.to(parameter.dtype)
                elif not torch.equal(held_here(parameter), held_here(other.to(parameter.dtype))):
                    parameter.copy_(other)
            del self._others[parameter]

    @property
    def recast(self) -> dict[Parameter, torch.dtype]:
        """The dtypes of parameters that came in float32, and are 16-bit."""
        return {parameter: parameter.dtype for parameter, was_float in self._low.items() if was_float}

    def restore(self) -> dict[Parameter, torch.dtype]:
        """Turn every lowered parameter into float32 for good."""
        self.low()
        lowered = dict.fromkeys(self.recast, torch.float32)
        for parameter in lowered:
            set_data(parameter, parameter.data.float())
        rebuild_reducers(lowered.keys())
        self._low.clear()
        return lowered
