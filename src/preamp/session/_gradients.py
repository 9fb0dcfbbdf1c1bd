"""A session's gradients between backward and step: scaled or true, in the parameters or in float32 beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..gradients import check_and_unscale_, global_norm
from ..masters import Masters


@dataclass(slots=True)
class _True:
    """A float32 gradient kept for a low parameter, whose own 16-bit gradient shows the same, rounded."""

    value: Tensor
    shown: Tensor
    version: int


class GradientBook:
    """Knows of every optimizer's gradients whether they are still scaled.

    One loss: gradients accumulate scaled, and `make_true` unscales them before the step. Several losses with scales of
    their own: `backward_apart` unscales each loss's gradients at once and adds them up, in float32 for low parameters.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._kept: dict[Parameter, _True] = {}
        self._found: dict[Optimizer, Tensor] = {}
        self._norms: dict[Optimizer, Tensor] = {}

    def is_true(self, optimizer: Optimizer) -> bool:
        """Whether `make_true` has run since the optimizer's last step."""
        return optimizer in self._found

    def any_true(self) -> bool:
        """Whether some optimizer waits for its step with true gradients."""
        return bool(self._found)

    def make_true(self, optimizer: Optimizer, inverse: Tensor | None) -> None:
        """Unscale an optimizer's gradients by `inverse` (None: they are true), once; low parameters get masters in."""
        if optimizer in self._found:
            return
        for index, parameter in enumerate(low_strangers(optimizer, self._masters)):
            self._masters.adopt(f"(added later):{index}:{len(self._masters)}", parameter)
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is torch.sparse_coo:
                parameter.grad = parameter.grad.coalesce()
        self._masters.refresh_before_step(parameters)
        low = [p for p in parameters if p in self._masters]
        wide = {p: self._float_gradient(p) for p in low}
        for parameter in low:
            self._kept.pop(parameter, None)
        gradients = [wide.get(p, p.grad) for p in parameters]
        self._found[optimizer] = check_and_unscale_([g for g in gradients if g is not None], inverse)
        self._masters.swap_in(low, wide)

    def _float_gradient(self, parameter: Parameter) -> Tensor:
        grad = parameter.grad
        assert grad is not None
        kept = self._kept.get(parameter)
        if kept is None:
            return grad.float()
        if kept.shown is grad and kept.version == grad._version:
            return kept.value
        return torch.where(grad == kept.value.to(grad.dtype), kept.value, grad.float())  # somebody wrote into it

    def backward_apart(
        self, run: Callable[[], None], inverse: Tensor | None, optimizers: Iterable[Optimizer]
    ) -> dict[Optimizer, Tensor]:
        """Run a backward pass, unscale what it adds by `inverse`, and add that to the true gradients so far.

        Returns a finite flag for each optimizer that got gradients from it. Whatever happens in `run`, the gradients
        that were there before stay.
        """
        optimizers = list(optimizers)
        parameters = {p: None for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad}
        before = {p: p.grad for p in parameters}
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = None
            else:
                self._kept.pop(parameter, None)  # zeroed since: what was kept for it is void
        try:
            run()
        except BaseException:
            for parameter, grad in before.items():
                parameter.grad = grad
            raise
        added: dict[Parameter, Tensor] = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                grad = grad.coalesce() if grad.layout is torch.sparse_coo else grad
                added[parameter] = grad.float() if parameter in self._masters else grad
        found = {}
        scaled = dict(added)
        for optimizer in optimizers:
            own = [scaled.pop(p) for p in parameters_of(optimizer) if p in scaled]
            if own:
                found[optimizer] = check_and_unscale_(own, inverse)
        for parameter, grad in before.items():
            parameter.grad = grad
            if parameter in added:
                self._add(parameter, added[parameter])
        return found

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        if parameter not in self._masters:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return
        total = gradient if parameter.grad is None else self._float_gradient(parameter) + gradient
        shown = total.to(parameter.dtype)
        parameter.grad = shown
        self._kept[parameter] = _True(total, shown, shown._version)

    def found(self, optimizer: Optimizer) -> Tensor:
        """0-d float32: 1 if a gradient of the optimizer was not finite when it was made true."""
        return self._found[optimizer]

    def norm(self, optimizer: Optimizer) -> Tensor:
        """L2 norm of an optimizer's true gradients, before clipping."""
        if optimizer not in self._norms:
            self._norms[optimizer] = global_norm(gradients_of(optimizer))
        return self._norms[optimizer]

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or its gradients were thrown away."""
        self._masters.swap_out(parameters_of(optimizer))
        self._found.pop(optimizer, None)
        self._norms.pop(optimizer, None)


def parameters_of(optimizer: Optimizer) -> Iterator[Parameter]:
    """Every parameter in an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's parameters have now."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def low_strangers(optimizer: Optimizer, masters: Masters) -> list[Parameter]:
    """16-bit parameters that were added to an optimizer after the session began, and have no master yet."""
    if not masters.wanted:
        return []
    low = (torch.float16, torch.bfloat16)
    return [p for p in parameters_of(optimizer) if p.dtype in low and p not in masters]


def state_like_parameters(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to the dtype that its parameters have now, where it has their shape."""
    castable = (torch.float16, torch.bfloat16, torch.float32)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in castable
            if fits and parameter.dtype in castable and value.dtype is not parameter.dtype:
                state[key] = value.to(parameter.dtype)
