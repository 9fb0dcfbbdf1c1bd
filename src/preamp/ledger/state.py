"""The step counts in `optimizer.state`, and the dtypes of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..sharding import held_here


def cast_states(optimizer: Optimizer, dtypes: Mapping[Parameter, torch.dtype]) -> None:
    """Cast an optimizer's states of its parameters' shapes to the dtypes in which these are stepped from now on."""
    inner = getattr(optimizer, "optim", None)  # by which a ZeroRedundancyOptimizer steps its part
    if isinstance(inner, Optimizer):
        cast_states(inner, dtypes)
    castable = (torch.float16, torch.bfloat16, torch.float32)
    for parameter, dtype in dtypes.items():
        state: Any = optimizer.state.get(parameter)
        for key, value in state.items() if isinstance(state, dict) else ():
            fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in castable
            if fits and key != "step":
                state[key] = value.to(dtype)


class Steps:
    """The step counts of parameters that have seen equally many steps, float32 on their device.

    A step increments one number for all; one copy updates the others. An optimizer's state has views of them under
    "step", which share one version counter: user code may write them. `count`: a number, or 0-d on their device.
    """

    def __init__(self, params: Sequence[Parameter], count: Tensor | float) -> None:
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode count no versions
            self._all = torch.empty(len(params), dtype=torch.float32, device=params[0].device)
            self._all.copy_(count) if isinstance(count, Tensor) else self._all.fill_(count)
            self._shown = dict(zip(params, self._all.unbind(), strict=True))
            self.one, self._others = self._all[0], self._all[1:]
        self._version = self._all._version

    @property
    def intact(self) -> bool:
        """Whether user code has written none of the counts."""
        return self._all._version == self._version

    def counted(self) -> None:
        """Give the other counts the value of `one`, which a step has incremented."""
        self._others.copy_(self.one)
        self._version = self._all._version

    def of(self, param: Parameter) -> Tensor:
        """The count that a parameter's state shows, 0-d."""
        return self._shown[param]

    def knows(self, param: Parameter, shown: Any) -> bool:
        """Whether this is a parameter's count, unchanged."""
        return shown is not None and self._shown.get(param) is shown and self.intact

    def are_of(self, params: Sequence[Parameter]) -> bool:
        """Whether the counts are of exactly these parameters."""
        return len(params) == len(self._shown) and all(param in self._shown for param in params)


def ages(
    params: Sequence[Parameter], state: Mapping[Parameter, Mapping[str, Any]], known: Mapping[Parameter, Steps]
) -> Callable[[Parameter], Steps | float]:
    """A key for each parameter of one device, equal for those with equal step counts.

    Counts that are unchanged in `known` are not read. Loaded counts and those that user code has written are read, all
    at once, by one host sync.
    """
    shown = {param: state.get(param, {}).get("step") for param in params}
    kept = {param: known[param] for param, step in shown.items() if param in known and known[param].knows(param, step)}
    others = {param: 0.0 if step is None else step for param, step in shown.items() if param not in kept}
    tensors = {param: step for param, step in others.items() if isinstance(step, Tensor)}
    if tensors:
        counts = [held_here(step).detach().to(params[0].device, torch.float32) for step in tensors.values()]
        others.update(zip(tensors, torch.stack([count.reshape(()) for count in counts]).tolist(), strict=True))
    return lambda param: kept[param] if param in kept else float(others[param])
